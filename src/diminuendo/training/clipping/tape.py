"""What one forward pass leaves behind for the gradient engine.

Each supported layer runs its usual operation with detached parameters, so autograd builds the
graph of the activations only, and hangs a :class:`Piece` on its output by a tensor hook: the
layer's input, waiting for the gradient of the output. Only the graph holds the piece, so a
forward pass that leads nowhere leaves nothing behind, and a later change of the output in place
does no harm. During the backward pass a piece turns its gradient into squared norms at once,
while the data are still in the cache, and keeps only what the clipped sum needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from diminuendo.training.clipping import kernels
from diminuendo.training.clipping.contract import Factor
from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.sums import Term

WHOLE = slice(None)

if TYPE_CHECKING:
    from diminuendo.training.clipping.marks import Made
    from diminuendo.training.clipping.watch import Watch


class Kind(Enum):
    """What a piece reports about a parameter, for the examples ``i``."""

    NORM = 1  # upper bounds of the norms, shape (N,), float64
    ROWS = 2  # the gradients themselves, (N, *shape): the engine measures and sums them


class Report(NamedTuple):
    """What is known of the gradients of the parameter whose ``id`` is ``key``."""

    key: int
    kind: Kind
    value: Tensor


class _Root(torch.autograd.Function):
    """Makes a tensor without history the start of a graph, without copying it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, out: Tensor) -> Tensor:  # noqa: ARG004
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return None, None


class Piece:
    """One use of one layer: what is needed for its per-example gradients.

    ``params`` are the trainable parameters it touches, ``arrived`` the output gradients it has
    got so far, ``examples`` the size of the first dimension it saw. An ``eager`` piece with a
    single output is processed during the backward pass, the others after it.
    """

    eager = True
    tokens = 1  # how many products an entry of an example's gradient is the sum of
    engaged = processed = False
    heavy: tuple[str, ...] = ()  # attributes that hold one tensor each, examples first
    _pending: Counter[int] | None = None

    def __init__(self, path: str, params: Sequence[nn.Parameter | None], examples: int) -> None:
        self.path, self.examples = path, examples
        self.params = tuple([param for param in params if param is not None])
        self.arrived: list[Tensor | None] = []
        self.measured: set[int] = set()
        self._saved: list[tuple[Tensor, int]] = []

    def announce(self, pending: Counter[int]) -> None:
        """Count as a waiting user of its parameters."""
        self._pending = pending
        for param in self.params:
            pending[id(param)] += 1

    def retire(self) -> Counter[int] | None:
        """Stop counting as a waiting user; the counts of those that still wait."""
        pending, self._pending = self._pending, None
        if pending is not None:
            for param in self.params:
                pending[id(param)] -= 1
        return pending

    def __del__(self) -> None:
        self.retire()

    def save(self, tensor: Tensor) -> Tensor:
        """Keep ``tensor`` without its history and notice later changes in place."""
        detached = tensor.detach() if tensor.requires_grad else tensor
        self._saved.append((detached, detached._version))
        return detached

    def check(self) -> None:
        """Raise if a saved tensor was changed in place since the forward pass."""
        for tensor, version in self._saved:
            if tensor._version != version:
                raise EngineError(
                    f"the input of {place(self.path)} (shape {tuple(tensor.shape)}) was changed in "
                    "place after the layer read it, so its gradient cannot be computed; use the "
                    "out-of-place version of the operation that follows it"
                )
        self._saved.clear()

    def check_examples(self, examples: int) -> None:
        """Raise if the layer saw another number of examples than there are losses."""
        if self.examples != examples:
            raise EngineError(
                f"the input of {place(self.path)} has first dimension {self.examples}, but there "
                f"are {examples} losses; the first dimension of everything must be "
                "the example: keep shapes like (N, tokens, features) instead of folding "
                "tokens into the batch, and give one loss per example"
            )

    def by_example(self, position: int, grad: Tensor) -> Tensor:  # noqa: ARG002
        """The gradient of one output as ``(N, entries)``, the way this piece reads it."""
        return grad.reshape(self.examples, -1)

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        """Take the output gradients; False if none arrived (the layer had no effect)."""
        raise NotImplementedError

    @property
    def briefly(self) -> bool:
        """Whether `measure` takes little, and reads nothing but what the piece keeps."""
        return False

    def measure(self, wanted: set[int]) -> list[Report]:
        """What the norms follow from, for the parameters whose ``id`` is wanted."""
        raise NotImplementedError

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        """``sum_i factors[i] g_i`` of one parameter, in its shape."""
        raise NotImplementedError

    def add_weighted(
        self, total: Tensor, param: nn.Parameter, factors: Tensor, scale: float
    ) -> None:
        """Add ``scale`` times the weighted sum to ``total``."""
        total.add_(self.weighted_sum(param, factors), alpha=scale)

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        """What ``sum_i factors[i] g_i`` of one parameter consists of, by rows of the parameter."""
        raise NotImplementedError

    def instantiate(self, param: nn.Parameter) -> Tensor:
        """The per-example gradients of one parameter, ``(N, *shape)``, in float64.

        They are what ``terms`` adds up, but for ``(tokens + 2) 2^-53`` of :meth:`bulk`.
        """
        raise NotImplementedError

    def bulk(self, param: nn.Parameter) -> Tensor:
        """Upper bounds ``(N,)``, float64, of the sizes of what is added up, before any cancel."""
        raise NotImplementedError

    def factor(self, param: nn.Parameter) -> Factor | None:  # noqa: ARG002
        """The per-example gradients as a product over tokens, where they have that form."""
        return None

    @property
    def entries(self) -> int:
        """How much is kept for the sums."""
        kept = [getattr(self, name) for name in self.heavy]
        return sum([tensor.numel() for tensor in kept if tensor is not None])

    def purge(self, keep: Tensor) -> None:
        """Set everything that belongs to the examples with ``keep[i]`` False to zero."""
        for name in self.heavy:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, kept_rows(tensor, keep))

    def release(self) -> None:
        """Let go of the data; the graph may hold the piece itself for longer."""
        for name in self.heavy:
            setattr(self, name, None)


_RUNNING: list[Tape] = []
"""The tapes whose backward passes are under way: one may pass through another engine's model."""


class Tape:
    """Ties layers to the backward pass of the engine.

    ``watcher`` watches the operations of a forward pass while there is one, ``names``
    the names of the parameters by ``id``.
    """

    def __init__(self) -> None:
        self.paused = 0
        self.watcher: Watch | None = None
        self.names: dict[int, str] = {}
        self.pending: Counter[int] = Counter()
        self.arrive: Callable[[Piece], None] | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def title(self, made: Made | None) -> str:
        """What a tensor made of parameters is called."""
        names = [] if made is None else [self.names[key] for key in made.params]
        return names[0] if len(names) == 1 else " and ".join(names[:3]) or "a parameter"

    @contextmanager
    def running(self, arrive: Callable[[Piece], None]) -> Iterator[None]:
        """While a backward pass is under way, pieces go to ``arrive``."""
        self.arrive = arrive
        _RUNNING.append(self)
        try:
            yield
        finally:
            _RUNNING.remove(self)
            self.arrive = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Layers within leave no pieces: they run as they are."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def recording(self) -> bool:
        """Whether layers should leave pieces now."""
        return not self.paused and torch.is_grad_enabled()

    def attach(self, out: Tensor) -> Tensor:
        """``out`` with a place in the graph of its own.

        A view would be cut off from its hook by a later change in place, hence the aliases.
        """
        if not out.requires_grad:
            plain = out.data if out._is_view() else out
            rooted: Tensor = _Root.apply(self._anchor, plain)  # type: ignore[no-untyped-call]
            return rooted
        if out._is_view():
            alias: Tensor = torch.ops.aten._unsafe_view.default(out, out.shape)
            return alias
        return out

    def watch(self, piece: Piece, *outs: Tensor) -> None:
        """Let ``piece`` wait for the gradients of ``outs`` (as returned by ``attach``)."""
        piece.arrived = [None] * len(outs)
        piece.eager = piece.eager and len(outs) == 1
        piece.announce(self.pending)
        for position, out in enumerate(outs):
            self._hang(piece, out, self._hook(piece, position, out.output_nr))

    def watch_op(self, piece: Piece, out: Tensor, rooted: bool) -> Tensor:
        """Let ``piece`` wait for the gradient of ``out``, fresh from an operation.

        If ``rooted``, a parameter was passed with ``requires_grad`` only to give ``out`` a node:
        the hook then ends the backward pass, so that no gradient of that parameter is computed.
        """
        source = out
        if out._is_view():
            # A change of the view in place leads past its own node, but not past its base's.
            base = out._base
            if base is not None and base.numel() == out.numel() and base.grad_fn is not None:
                source = base
            else:
                source = out = torch.ops.aten._unsafe_view.default(out, out.shape)
        piece.arrived = [None]
        piece.announce(self.pending)
        self._hang(piece, source, self._hook(piece, 0, source.output_nr, rooted))
        return out

    def watch_leaf(self, piece: Piece, out: Tensor) -> Tensor:
        """Let ``piece`` wait for the gradient of ``out``, which goes no further."""
        piece.arrived = [None]
        piece.announce(self.pending)
        self._hang(piece, out, self._hook(piece, 0, out.output_nr, True))
        return out

    def _hang(self, piece: Piece, out: Tensor, hook: Callable[..., Any]) -> None:
        node = out.grad_fn
        if node is None:
            raise EngineError(f"the output of {place(piece.path)} has no place in the graph")
        node.register_prehook(hook)

    def watch_inputs(self, piece: Piece, out: Tensor, positions: tuple[int, ...]) -> None:
        """Let ``piece`` wait for what the node of ``out`` sends to some of its inputs."""
        piece.announce(self.pending)
        node = out.grad_fn
        assert node is not None

        def arrive(
            inputs: tuple[Tensor | None, ...],
            outputs: Any,  # noqa: ARG001
        ) -> tuple[Tensor | None, ...]:
            if self.arrive is None:
                _refuse_outside(piece)
            else:
                with torch._C.DisableTorchFunction():
                    piece.arrived = [inputs[position] for position in positions]
                    if any(grad is not None for grad in piece.arrived):
                        self.arrive(piece)
            return tuple(  # what was taken goes no further
                None if position in positions else grad for position, grad in enumerate(inputs)
            )

        node.register_hook(arrive)

    def _hook(
        self, piece: Piece, position: int, output: int, last: bool = False
    ) -> Callable[[tuple[Tensor | None, ...]], tuple[None, ...] | None]:
        def arrive(grads: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
            grad = grads[output]
            if self.arrive is None:
                _refuse_outside(piece)
            elif grad is not None:
                with torch._C.DisableTorchFunction():
                    piece.arrived[position] = grad
                    self.arrive(piece)
            return (None,) * len(grads) if last else None

        return arrive


def _refuse_outside(piece: Piece) -> None:
    """Raise unless the backward pass is another engine's, on its way through this model."""
    if _RUNNING:
        return
    raise EngineError(
        f"a backward pass reached {place(piece.path)} outside the engine; instead of "
        "loss.backward() hand one loss per example to private.backward(losses), "
        "engine.clipped_sum(losses, clip) or the Opacus adapter's optimizer.backward(losses); or "
        "run the forward pass within engine.frozen() if another model learns from this loss. A "
        "gradient that the model itself takes in its forward pass (torch.autograd.grad) cannot be "
        "followed"
    )


def trained(param: Tensor | None) -> nn.Parameter | None:
    """``param`` if it is to be trained, else None."""
    return param if isinstance(param, nn.Parameter) and param.requires_grad else None


def kept_rows(tensor: Tensor, keep: Tensor) -> Tensor:
    """``tensor`` with the rows of the examples that are not kept set to zero.

    While steps are recorded on a GPU that happens in place, in memory that belongs to the
    recording: one look at ``keep`` in place of a pass over the tensor.
    """
    recorded = kernels.available and tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if recorded and len(tensor) > 1 and tensor.is_contiguous() and tensor.numel():
        kernels.zero_rows(tensor, keep)
        return tensor
    mask = keep.view(-1, *([1] * (tensor.dim() - 1)))
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))

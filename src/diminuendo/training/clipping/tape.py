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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.contract import Factor
from diminuendo.training.clipping.errors import EngineError


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
    _pending: Counter[int] | None = None

    def __init__(self, path: str, params: Sequence[nn.Parameter | None], examples: int) -> None:
        self.path, self.examples = path, examples
        self.params = tuple(param for param in params if param is not None)
        self.arrived: list[Tensor | None] = []
        self.engaged = self.processed = False
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
        """Keep ``tensor`` (detached) and notice later changes in place."""
        detached = tensor.detach()
        self._saved.append((detached, detached._version))
        return detached

    def check(self) -> None:
        """Raise if a saved tensor was changed in place since the forward pass."""
        for tensor, version in self._saved:
            if tensor._version != version:
                raise EngineError(
                    f"the input of '{self.path}' (shape {tuple(tensor.shape)}) was changed in "
                    "place after the layer read it, so its gradient cannot be computed; use the "
                    "out-of-place version of the operation that follows it"
                )
        self._saved.clear()

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        """Take the output gradients; False if none arrived (the layer had no effect)."""
        raise NotImplementedError

    def square_norms(self, wanted: Callable[[nn.Parameter], bool]) -> list[tuple[int, Tensor]]:
        """Pairs of ``id(parameter)`` and squared norms ``(N,)`` for the wanted parameters."""
        raise NotImplementedError

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        """``sum_i factors[i] g_i`` of one parameter, in its shape."""
        raise NotImplementedError

    def instantiate(self, param: nn.Parameter) -> Tensor:
        """The per-example gradients of one parameter, ``(N, *shape)``."""
        raise NotImplementedError

    def factor(self, param: nn.Parameter) -> Factor | None:  # noqa: ARG002
        """The per-example gradients as a product over tokens, where they have that form."""
        return None

    def purge(self, keep: Tensor) -> None:
        """Set everything that belongs to the examples with ``keep[i]`` False to zero."""
        raise NotImplementedError


class Tape:
    """Ties layers to the backward pass of the engine."""

    def __init__(self) -> None:
        self.paused = 0
        self.pending: Counter[int] = Counter()
        self.arrive: Callable[[Piece], None] | None = None
        self._anchor = torch.zeros((), requires_grad=True)

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
            alias: Tensor = torch.ops.aten._unsafe_view(out, out.shape)
            return alias
        return out

    def watch(self, piece: Piece, *outs: Tensor) -> None:
        """Let ``piece`` wait for the gradients of ``outs`` (as returned by ``attach``)."""
        piece.arrived = [None] * len(outs)
        piece.announce(self.pending)
        for position, out in enumerate(outs):
            out.register_hook(self._hook(piece, position))  # type: ignore[no-untyped-call]

    def _hook(self, piece: Piece, position: int) -> Callable[[Tensor], None]:
        def arrive(grad: Tensor) -> None:
            if self.arrive is None:
                raise EngineError(
                    f"a backward pass reached '{piece.path}' outside the engine; call "
                    "engine.clipped_sum(losses, clip) instead of backward(), or close() the "
                    "engine and run the forward pass again"
                )
            piece.arrived[position] = grad
            self.arrive(piece)

        return arrive


def trained(param: Tensor | None) -> nn.Parameter | None:
    """``param`` if it is to be trained, else None."""
    return param if isinstance(param, nn.Parameter) and param.requires_grad else None


def kept_rows(tensor: Tensor, keep: Tensor) -> Tensor:
    """``tensor`` with the rows of the examples that are not kept set to zero."""
    mask = keep.view(-1, *([1] * (tensor.dim() - 1)))
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))

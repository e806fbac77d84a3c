"""Per-example clipped gradient sums in one forward and one backward pass.

    engine = Engine(model)
    losses = loss_fn(model(x), y)                # one loss per example, shape (N,)
    result = engine.clipped_sum(losses, Flat(1.0))

The engine replaces the ``forward`` of the layers it has code for by one that does the same
computation with detached parameters and remembers the input; every other use of a trainable
parameter is watched operation by operation. ``clipped_sum`` then runs one backward pass to the
layers' outputs (no weight gradients), gets every example's squared norm layer by layer, turns the
norms into factors c_i and contracts once per layer: ``sum_i c_i g_i``.

That each row of a gradient belongs to one example is tested by a probe at the first use of a
shape; see :mod:`~diminuendo.training.clipping.probe` for what it can and cannot see. A tensor
outside the model that requires gradients, such as an input, gets its ``.grad`` as in any backward
pass; the parameters' ``.grad`` is left alone.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.clip import Clip
from diminuendo.training.clipping.contract import row_norm, shared_square_norm, square_norm, upcast
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.lift import MetPiece, returned
from diminuendo.training.clipping.marks import Made
from diminuendo.training.clipping.probe import Sketch, probe
from diminuendo.training.clipping.registry import forward_for, owned_parameters
from diminuendo.training.clipping.tape import Kind, Piece, Report, Tape, kept_rows
from diminuendo.training.clipping.watch import Root, Watch, routed
from diminuendo.training.memory import keep_freed

# Per-example gradients with at most this many entries are joined with those of other parameters,
# so that one kernel measures them all and one sums them: on a GPU kernels cost more than copies.
_JOINED = 1 << 20
_JOINED_CPU = 1 << 15
# Up to so many norms are joined one by one, which takes a host less time than to line them up.
_FEW = 4
# Entries kept for the sums up to which a GPU is taken to wait for the host.
_LITTLE = 1 << 24

Buffers = Sequence[Tensor] | Callable[[], Sequence[Tensor]]
"""Where sums go; a function is called once the backward pass has let go of its memory."""


@dataclass
class ClippedSum:
    """The result of one call of :meth:`Engine.clipped_sum`.

    ``sums`` is aligned with ``Engine.parameters``; ``norms`` are the unclipped norms ``(N,)``;
    ``finite`` says which of them are finite, unless all are.
    """

    sums: list[Tensor]
    norms: Tensor
    finite: Tensor | None = None

    @property
    def nonfinite(self) -> int:
        """How many examples were left out because their norm was not finite."""
        return 0 if self.finite is None else int((~self.finite).sum())


class Engine:
    """Attach to ``model`` and compute clipped gradient sums; ``close()`` detaches.

    ``eval_mode`` says what to do when ``clipped_sum`` is called while the model is in eval
    mode: ``"ignore"``, ``"warn"`` or ``"raise"``. Which parameters are trainable is read once,
    here; attach a new engine after freezing or unfreezing. With ``probing=False`` the engine calls
    :meth:`probe` only when told to: for computations that release nothing, on a model that was
    probed before.
    """

    def __init__(self, model: nn.Module, eval_mode: str = "ignore", probing: bool = True) -> None:
        if eval_mode not in ("ignore", "warn", "raise"):
            raise EngineError(f"eval_mode must be 'ignore', 'warn' or 'raise', got {eval_mode!r}")
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self.model = model
        self.eval_mode, self.probing = eval_mode, probing
        self._tape = Tape()
        self._probed: weakref.ref[Tensor] | None = None
        self._uses: Counter[Hashable] = Counter()
        self._installed: list[tuple[nn.Module, Any]] = []
        self._ones = torch.ones(0)
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        if not named:
            raise EngineError("the model has no parameter with requires_grad=True to train")
        self.names: list[str] = [name for name, _ in named]
        self.parameters: list[nn.Parameter] = [param for _, param in named]
        if self.parameters[0].device.type == "cpu":
            keep_freed()
        self._frozen = [
            (name, param) for name, param in model.named_parameters() if not param.requires_grad
        ]
        self._slot = {id(param): slot for slot, param in enumerate(self.parameters)}
        self.layers: list[tuple[str, ...]] = []
        self._layer_of: list[int] = [-1] * len(named)
        plan = []
        seen: set[int] = set()
        for path, module in model.named_modules():
            holder = getattr(module.__dict__.get("forward"), "engine_holder", None)
            if holder is module:
                raise EngineError(
                    f"an engine is already attached to '{path}'; call its close() first"
                )
            if holder is not None:  # copied from a model that had an engine attached
                del module.__dict__["forward"]
            if _inside_parametrization(path):
                continue
            owned = owned_parameters(module)
            forward = forward_for(module, self._tape, path)
            if forward is not None:
                plan.append((module, routed(module, forward, self._tape) if owned else forward))
                seen.update(map(id, owned.values()))
            if owned:
                self._group(module)
        if {torch.float32, torch.float64} <= {param.dtype for _, param in named}:
            raise EngineError(
                "the model has trainable parameters of float32 and of float64; convert it to one "
                "of them: model.float() or model.double()"
            )
        self._tape.names = {id(param): name for name, param in named}
        self._sizes = {size for param in self.parameters for size in param.shape}
        made = {id(param): Made({id(param): param}) for param in self.parameters}
        self._root = Root(self._tape, Watch(self._tape, made), len(seen) < len(self.parameters))
        for module, forward in plan:
            self._install(module, _outside_graphs(forward))
        self._install(model, self._root.around(model))

    def _install(self, module: nn.Module, forward: Any) -> None:
        self._installed.append((module, module.__dict__.get("forward")))
        forward.engine_holder = module
        object.__setattr__(module, "forward", MethodType(forward, module))

    def _group(self, module: nn.Module) -> None:
        own = [self._slot[id(param)] for param in owned_parameters(module).values()]
        new = sorted({slot for slot in own if self._layer_of[slot] < 0})
        if new:
            for slot in new:
                self._layer_of[slot] = len(self.layers)
            self.layers.append(tuple(self.names[slot] for slot in new))

    def close(self) -> None:
        """Detach from the model: every layer gets its own forward back."""
        for module, previous in reversed(self._installed):
            if previous is None:
                module.__dict__.pop("forward", None)
            else:
                object.__setattr__(module, "forward", previous)
        self._installed.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def zeros(self) -> list[Tensor]:
        """Buffers of zeros to accumulate into, aligned with ``parameters``."""
        return [torch.zeros_like(upcast(param.detach())) for param in self.parameters]

    def clipped_sum(
        self,
        losses: Tensor,
        clip: Clip,
        accumulate: Buffers | None = None,
        scale: float = 1.0,
    ) -> ClippedSum:
        """``scale * sum_i c_i g_i`` for every parameter, with the factors c_i of ``clip``.

        ``losses`` has one entry per example, shape ``(N,)``. With ``accumulate`` (for example
        ``engine.zeros``) the sums are added into those buffers, which are also returned. An
        example whose norm is not finite contributes exactly zero.
        """
        self.check_losses(losses)
        if accumulate is None and scale != 1.0:
            accumulate = self.zeros
        device = losses.device.type
        with torch.no_grad():
            if not torch.is_autocast_enabled(device):
                return self._clipped_sum(losses, clip, accumulate, scale)
            with torch.autocast(device, enabled=False):
                return self._clipped_sum(losses, clip, accumulate, scale)

    def _clipped_sum(
        self, losses: Tensor, clip: Clip, accumulate: Buffers | None, scale: float
    ) -> ClippedSum:
        if losses.shape[0] == 0:
            empty = self.zeros() if accumulate is None else _made(accumulate)
            return ClippedSum(empty, upcast(losses.detach()))
        collected = _Norms(self._slot, losses.shape[0])
        self._backward(collected, losses)
        groups = [_Group() for _ in self.layers] if clip.per_layer else [_Group()]
        for slot, report in collected.finish(self.parameters):
            groups[self._layer_of[slot] if clip.per_layer else 0].add(slot, report)
        norms, factors = self._factors(groups, clip, losses)
        live, collected.live = collected.live, []
        sums: list[Tensor] | None = None
        if self._may_sum_twice(live, losses, accumulate):
            sums = self._sums(live, groups, factors, accumulate, scale, keep=True)
        finite = _unless_all_finite(norms)
        if finite is not None:
            sums, factors = None, [torch.where(finite, row, 0.0) for row in factors]
            for piece in live:
                piece.purge(finite)
            for group in groups:
                group.purge(finite)
        if sums is None:
            sums = self._sums(live, groups, factors, accumulate, scale)
        for piece in live:
            piece.release()
        return ClippedSum(sums, norms, finite)

    def _may_sum_twice(self, live: list[Piece], losses: Tensor, accumulate: Buffers | None) -> bool:
        """Whether to sum before it is known that all norms are finite, and again if they are not.

        A GPU with little to do waits for the host: better not to let the host wait for it too.
        """
        anew = accumulate is None or callable(accumulate)
        return losses.is_cuda and anew and sum([piece.entries for piece in live]) <= _LITTLE

    def _sums(
        self,
        live: list[Piece],
        groups: list[_Group],
        rows: Sequence[Tensor],
        accumulate: Buffers | None,
        scale: float,
        keep: bool = False,
    ) -> list[Tensor]:
        """``sum_i c_i g_i`` for every parameter; the pieces let go of their data unless told to
        ``keep`` it."""
        params = self.parameters
        sums: list[Tensor | None] = [None] * len(params)
        if accumulate is not None:
            sums = list(_made(accumulate))
        done: set[int] = set()
        for group, row in zip(groups, rows, strict=True):
            parts = {slot: part.view(params[slot].shape) for slot, part in group.sums(row)}
            done.update(parts)
            if parts and accumulate is not None:
                totals = [total for slot in parts if (total := sums[slot]) is not None]
                torch._foreach_add_(totals, list(parts.values()), alpha=scale)
            else:
                for slot, part in parts.items():
                    sums[slot] = part
        for piece in live:
            for param in piece.params:
                slot = self._slot[id(param)]
                if slot not in done:
                    row = rows[self._layer_of[slot] if len(rows) > 1 else 0]
                    total = sums[slot]
                    if total is None:
                        sums[slot] = piece.weighted_sum(param, row)
                    else:
                        piece.add_weighted(total, param, row, scale)
            if not keep:
                piece.release()
        return [
            torch.zeros_like(upcast(param.detach())) if total is None else total
            for param, total in zip(params, sums, strict=True)
        ]

    def check_losses(self, losses: Tensor) -> None:
        """Raise where ``clipped_sum`` could not work with these losses; changes nothing."""
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise EngineError(
                f"losses must hold one loss per example, shape (N,), got {shape}; use "
                "reduction='none' and, where an example has several terms, sum or average them "
                "within the example, not over the batch"
            )
        if not self._installed:
            raise EngineError("the engine was closed; attach a new Engine(model)")
        thawed = next((name for name, param in self._frozen if param.requires_grad), None)
        if thawed is not None:
            raise EngineError(
                f"parameter '{thawed}' was frozen when the engine was attached and is trainable "
                "now; close() this engine and attach a new one"
            )
        if losses.shape[0] and not losses.requires_grad:
            raise EngineError(
                "losses do not depend on the model through autograd; compute them from "
                "model(x) with gradients enabled (not under torch.no_grad) after Engine(model)"
            )
        if not self.model.training and self.eval_mode != "ignore":
            message = "the model is in eval mode; call model.train() before the forward pass"
            if self.eval_mode == "raise":
                raise EngineError(message)
            warnings.warn(message, stacklevel=3)
        self._probe_if_due(losses)

    def _probe_if_due(self, losses: Tensor) -> None:
        """Probe at the 1st, 2nd, 4th, 8th, ... use of a shape of the batch.

        Batches of other sizes have the same shape, unless the size is that of something else.
        """
        examples = losses.shape[0]
        if (
            not self.probing
            or examples < 2
            or (self._probed is not None and self._probed() is losses)
        ):
            return
        key = (self._root.shape, examples if examples in self._sizes else None)
        self._uses[key] += 1
        uses = self._uses[key]
        if uses & (uses - 1) == 0:
            self.probe(losses)
        self._probed = weakref.ref(losses)

    def probe(self, losses: Tensor) -> None:
        """Raise :class:`MixedExamples` unless every gradient row belongs to one example.

        Takes two backward passes, and leaves the graph of ``losses`` as it was. ``clipped_sum``
        and ``check_losses`` call it where it is due.
        """
        dtypes = {param.dtype for param in self.parameters}
        if torch.is_autocast_enabled(losses.device.type):
            dtypes.add(torch.get_autocast_dtype(losses.device.type))
        lowest = min(dtypes, key=lambda dtype: torch.finfo(dtype).max)

        def run(weights: Tensor, sketch: Sketch) -> None:
            self._run_backward(losses, weights, sketch.arrive, keep=True)
            sketch.finish()

        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            self._sizes |= probe(run, losses, lowest)

    def _backward(self, norms: _Norms, losses: Tensor) -> None:
        """One backward pass to the layers' outputs, which hand their gradients to ``norms``."""
        self._run_backward(losses, self._ones_like(losses), norms.arrive, keep=False)

    def _run_backward(
        self, losses: Tensor, weights: Tensor, arrive: Callable[[Piece], None], keep: bool
    ) -> None:
        arrived: list[Piece] = []

        def note(piece: Piece) -> None:
            arrived.append(piece)
            arrive(piece)

        params = self.parameters
        stash = [param.grad for param in params]
        for param, grad in zip(params, stash, strict=True):
            if grad is not None:
                param.grad = None
        try:
            with self._tape.running(note), self._root.again(losses.shape[0]):
                _backward(losses, weights, keep)
            reached = [param.grad is not None for param in params]
        finally:
            for param, grad in zip(params, stash, strict=True):
                if grad is not None or param.grad is not None:
                    param.grad = grad
        if any(reached):
            self._refuse_direct_use(self.names[reached.index(True)], bool(arrived))

    def _ones_like(self, losses: Tensor) -> Tensor:
        """Ones, made anew only if the last ones do not fit or somebody wrote on them."""
        ones = self._ones
        if (
            ones.shape != losses.shape
            or ones.dtype != losses.dtype
            or ones.device != losses.device
            or ones._version
        ):
            ones = self._ones = torch.ones_like(losses)
        return ones

    def _refuse_direct_use(self, name: str, recorded: bool) -> None:
        if not recorded:
            raise EngineError(
                "the forward pass was not recorded: run model(x) after Engine(model), and each "
                "forward pass needs its own clipped_sum"
            )
        raise EngineError(
            f"parameter '{name}' reaches the loss outside the model's forward (for example as a "
            "penalty on weights, or in a part of the model that is called on its own), or through "
            "a function that PyTorch does not let be watched (a torch.autograd.Function or a "
            "compiled one), where its per-example gradient cannot be seen; do it within the "
            "model's forward, with PyTorch's own operations"
        )

    def _factors(
        self, groups: list[_Group], clip: Clip, losses: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Norms ``(N,)``, and the factors of each group."""
        rows = [group.norms() for group in groups]
        known = [torch.zeros_like(upcast(losses.detach())) if r is None else r for r in rows]
        if not clip.per_layer:
            return known[0], [clip.factors(known[0])]
        stacked = torch.stack(known)
        norms = torch.linalg.vector_norm(stacked, dim=0)
        return norms, clip.factors(stacked).unbind(0)


def _backward(losses: Tensor, weights: Tensor, keep: bool) -> None:
    """``torch.autograd.backward`` without its checks of shapes, which take a tenth of a small
    step: the graph may be kept, nothing is differentiated twice, every leaf is served."""
    autograd = torch.autograd.Variable._execution_engine
    autograd.run_backward((losses,), (weights,), keep, False, (), True, True)


def _unless_all_finite(norms: Tensor) -> Tensor | None:
    """Which of the norms are finite, or None where all are.

    The one place where the host waits for the device: to mask every tensor on the device
    instead would cost two kernels for each layer.
    """
    if math.isfinite(norms.cpu().numpy().sum()):
        return None
    return norms.isfinite()


class _Group:
    """What is known of the gradients of parameters that are clipped together."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._rows: list[tuple[int, Tensor]] = []
        self._joined: Tensor | None = None

    def add(self, slot: int, report: Report) -> None:
        """Take one report."""
        value = report.value
        if report.kind is Kind.SQUARE:
            self._squares.append(value)
        elif report.kind is Kind.NORM:
            self._norms.append(value)
        else:
            self._rows.append((slot, value if value.dim() == 2 else value.flatten(1)))

    def norms(self) -> Tensor | None:
        """The norms of all together, or None if there is nothing."""
        terms = self._norms
        if self._rows:
            rows = [value for _, value in self._rows]
            self._joined = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            terms.append(row_norm(self._joined))
        if self._squares:
            squares = self._squares
            total = squares[0] if len(squares) == 1 else torch.stack(squares).sum(0)
            terms.append(total.clamp(min=0.0).sqrt_())
        if len(terms) <= _FEW:
            return reduce(torch.hypot, terms) if terms else None
        joint: Tensor = torch.linalg.vector_norm(torch.cat(terms).view(len(terms), -1), dim=0)
        return joint

    def purge(self, keep: Tensor) -> None:
        """Set the rows of the examples that are not kept to zero."""
        if self._joined is not None:
            self._joined = kept_rows(self._joined, keep)

    def sums(self, factors: Tensor) -> list[tuple[int, Tensor]]:
        """The weighted sums of the parameters whose rows were joined, by slot, flat."""
        if self._joined is None:
            return []
        total = torch.mv(self._joined.t(), factors)
        slots = [slot for slot, _ in self._rows]
        if len(slots) == 1:
            return [(slots[0], total)]
        sizes = [value.shape[1] for _, value in self._rows]
        return list(zip(slots, torch.split(total, sizes), strict=True))


class _Norms:
    """Collects the pieces of one backward pass and what they report.

    A piece is processed as soon as its gradient arrives, except for parameters that other
    pieces use too: those need the cross terms and wait for the end.
    """

    def __init__(self, slot: dict[int, int], examples: int) -> None:
        self.slot, self.examples = slot, examples
        self.live: list[Piece] = []
        self._reports: list[tuple[int, Report]] = []
        self._seen: set[int] = set()

    def arrive(self, piece: Piece) -> None:
        """Take a piece one of whose output gradients has just arrived."""
        if piece.engaged:
            return
        piece.engaged = True
        pending = piece.retire()
        self.live.append(piece)
        seen, alone = self._seen, set()
        for param in piece.params:
            key = id(param)
            if key not in seen:
                seen.add(key)
                if pending is None or not pending[key]:
                    alone.add(key)
        if piece.eager:
            self._process(piece)
            self._measure(piece, alone)

    def finish(self, params: list[nn.Parameter]) -> list[tuple[int, Report]]:
        """All reports, each with the slot of its parameter."""
        users: list[list[Piece]] = [[] for _ in params]
        for piece in self.live:
            if not piece.processed:
                self._process(piece)
        back = returned([p for p in self.live if isinstance(p, MetPiece)], self.examples)
        if back is not None:
            self.live.append(back)
        for piece in self.live:
            for param in piece.params:
                users[self.slot[id(param)]].append(piece)
        for piece in self.live:
            if len(piece.measured) < len(piece.params):
                ready = {
                    id(param) for param in piece.params if len(users[self.slot[id(param)]]) == 1
                }
                self._measure(piece, ready - piece.measured)
        reports = [report for report in self._reports if len(users[report[0]]) == 1]
        for slot, pieces in enumerate(users):
            if len(pieces) > 1:
                param = params[slot]
                reports.append((slot, Report(id(param), Kind.SQUARE, _shared(param, pieces))))
        return reports

    def _process(self, piece: Piece) -> None:
        piece.check_examples(self.examples)
        piece.check()
        piece.receive(piece.arrived)
        piece.arrived, piece.processed = [], True

    def _measure(self, piece: Piece, todo: set[int]) -> None:
        if not todo:
            return
        piece.measured |= todo
        for report in piece.measure(todo):
            key, kind, value = report
            if kind is Kind.ROWS:
                limit = _JOINED_CPU if value.device.type == "cpu" else _JOINED
                if value.numel() > limit:
                    report = Report(key, Kind.NORM, row_norm(value))
            self._reports.append((self.slot[key], report))


def _shared(param: nn.Parameter, pieces: list[Piece]) -> Tensor:
    """Squared norm of the summed gradients of a parameter used several times."""
    factors = [piece.factor(param) for piece in pieces]
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(factors):
        return shared_square_norm(known)
    total = pieces[0].instantiate(param)
    for piece in pieces[1:]:
        total = total + piece.instantiate(param)
    return square_norm(total)


def _made(buffers: Buffers) -> list[Tensor]:
    return list(buffers() if callable(buffers) else buffers)


def _outside_graphs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, called as it is, or between two graphs where a compiler traces the model."""
    disabled = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]

    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return disabled(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return patched


def _inside_parametrization(path: str) -> bool:
    return "parametrizations" in path.split(".")

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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from diminuendo.training.clipping import kernels
from diminuendo.training.clipping.backward import Backward
from diminuendo.training.clipping.certificate import ALLOWANCE
from diminuendo.training.clipping.certified import Buffers, Summation, check_request
from diminuendo.training.clipping.clip import Automatic, Clip, Flat
from diminuendo.training.clipping.contract import upcast
from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.marks import Made
from diminuendo.training.clipping.probe import Sketch, nodes, probe
from diminuendo.training.clipping.registry import batch_norm_guard, forward_for, owned_parameters
from diminuendo.training.clipping.reports import Group, Norms
from diminuendo.training.clipping.rounding import (
    TF32,
    above,
    coarse,
    joint_norm,
)
from diminuendo.training.clipping.scaled import Scaled, made
from diminuendo.training.clipping.tape import Piece, Tape
from diminuendo.training.clipping.watch import Root, Watch, routed
from diminuendo.training.cores import Beside
from diminuendo.training.memory import keep_freed

# Keeps a factor that is rounded to float32 from growing.
_DOWN = 1.0 - 2.0**-23
# Entries kept for the sums up to which a GPU is taken to wait for the host.
_LITTLE = 1 << 24


@dataclass
class ClippedSum:
    """The result of one call of :meth:`Engine.clipped_sum`.

    ``sums`` is aligned with ``Engine.parameters``; ``norms`` are upper bounds of the unclipped
    norms ``(N,)`` in float64; ``finite`` says which of them are finite, unless all are.
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
    probed before. With ``static=True`` the sums take the same operations whatever the data are, so
    that the host need not wait for a result: rows that are not finite are masked in every call, and
    certified sums are taken in float64 rather than checked.
    """

    def __init__(
        self,
        model: nn.Module,
        eval_mode: str = "ignore",
        probing: bool = True,
        static: bool = False,
    ) -> None:
        if eval_mode not in ("ignore", "warn", "raise"):
            raise EngineError(f"eval_mode must be 'ignore', 'warn' or 'raise', got {eval_mode!r}")
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        if not isinstance(model, nn.Module):
            raise EngineError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.eval_mode, self.probing, self.static = eval_mode, probing, static
        self._tape = Tape()
        self._probed: weakref.ref[Tensor] | None = None
        self._summed: weakref.ref[Tensor] | None = None
        self._uses: Counter[Hashable] = Counter()
        self._installed: list[tuple[nn.Module, Any]] = []
        self._summation = Summation()
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
                    f"an engine is already attached to {place(path)}; call its close() first"
                )
            if holder is not None:  # copied from a model that had an engine attached
                del module.__dict__["forward"]
            if _inside_parametrization(path):
                continue
            owned = owned_parameters(module)
            forward = forward_for(module, self._tape, path)
            if isinstance(module, _BatchNorm):
                plan.append((module, batch_norm_guard(module, path)))
            elif forward is not None:
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
        self._backward = Backward(self._tape, self._root, self.names, self.parameters)
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

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Forward passes within take the model as it is, with constants for parameters.

        For a loss of something else that goes through the model, such as a generator's through
        its critic, and its ordinary ``backward()``.
        """
        self._tape.paused += 1
        for param in self.parameters:
            param.requires_grad_(False)
        try:
            yield
        finally:
            self._tape.paused -= 1
            if not self._tape.paused:
                for param in self.parameters:
                    param.requires_grad_(True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def unrecorded(self) -> AbstractContextManager[None]:
        """Within, the model runs as if no engine were attached."""
        return self._tape.pause()

    @property
    def recording(self) -> bool:
        """Whether a forward pass now would be recorded: not within `unrecorded` or no_grad."""
        return self._tape.recording()

    def before_forward(self, look: Callable[[Any, dict[str, Any]], None] | None) -> None:
        """Have ``look(args, kwargs)`` called before every recorded call of the whole model.

        What it does with the model itself is not recorded.
        """
        self._root.before = look

    def zeros(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Buffers of zeros to accumulate into, aligned with ``parameters``: float32 or as wide as
        the parameters, or of ``dtype``."""
        return [torch.zeros_like(upcast(p.detach()), dtype=dtype) for p in self.parameters]

    def clipped_sum(
        self,
        losses: Tensor,
        clip: Clip,
        accumulate: Buffers | None = None,
        scale: float = 1.0,
        *,
        certify: bool = False,
        share: float = 1.0,
        real: Tensor | None = None,
        beside: Beside | None = None,
        places: Sequence[Tensor] | None = None,
    ) -> ClippedSum:
        """``scale * sum_i c_i g_i`` for every parameter, with the factors c_i of ``clip``.

        ``losses`` has one entry per example, shape ``(N,)``. With ``accumulate`` (for example
        ``engine.zeros``) the sums are added into those buffers, which are also returned. An
        example whose norm is not finite contributes exactly zero.

        With ``certify`` the sums are float64 (so must be the buffers, and ``scale`` be 1), and the
        norm of their rounding error, over all parameters together, is at most ``ALLOWANCE *
        share`` times ``clip.sensitivity``, but for a probability of ``FAILURE`` (docs/rounding.md).
        ``share`` is the part of the allowance that this call may take, in (0, 1]: 1 over the number
        of micro-batches and ranks whose sums are added up.

        ``real`` says which rows are examples, shape ``(N,)``, bool; all of them unless given. The
        others fill the batch up: they contribute exactly zero, whatever their gradients are.
        ``beside`` is work that a core does while others multiply, if several do; it may be left
        undone. ``places`` are memory on a GPU, float32, one for each parameter: instead of adding
        float64 to buffers, certified sums are returned as they come, some of them in there.
        """
        self.check_losses(losses)
        self.probe_if_due(losses)
        if certify:
            check_request(accumulate, scale, share)
        elif accumulate is None and scale != 1.0:
            accumulate = self.zeros
        device = losses.device.type
        allowance = ALLOWANCE * share if certify else None
        with torch.no_grad():
            if not torch.is_autocast_enabled(device):
                return self._clipped_sum(
                    losses, clip, accumulate, scale, allowance, real, beside, places
                )
            with torch.autocast(device, enabled=False):
                return self._clipped_sum(
                    losses, clip, accumulate, scale, allowance, real, beside, places
                )

    def draw_with(self, key: Tensor | None) -> None:
        """Take the random vectors of checks on a GPU from the key that lies in this memory, which
        is another one in each step, rather than from a fresh one."""
        self._summation.key = key

    @property
    def checks(self) -> bool:
        """Whether certified sums so far had shapes for which they may fail, with ``FAILURE``.

        Where not, all their errors are bounded beforehand. Told from shapes, not from data.
        """
        return self._summation.checks

    def sensitivity_factor(self, certified: bool) -> float:
        """What the noise's sensitivity is to be multiplied by for rounding errors; at least 1.

        Two neighbouring sums differ by one contribution and by the errors of both. Sums that are
        not certified have no proven bound: what TF32 rounds off a factor is counted alone.
        """
        if certified:
            return 1 + 2 * ALLOWANCE
        return 1 + 4 * TF32 if coarse(self.parameters[0]) else 1.0

    def _clipped_sum(
        self,
        losses: Tensor,
        clip: Clip,
        accumulate: Buffers | None,
        scale: float,
        allowance: float | None,
        real: Tensor | None,
        beside: Beside | None,
        places: Sequence[Tensor] | None,
    ) -> ClippedSum:
        if losses.shape[0] == 0:
            dtype = None if allowance is None else torch.float64
            empty = self.zeros(dtype) if accumulate is None else made(accumulate)
            return ClippedSum(empty, losses.detach().double())
        self._summed = weakref.ref(losses)
        collected = Norms(self._slot, losses.shape[0], self._root)
        self._backward.run(losses, collected.arrive)
        groups = [Group() for _ in self.layers] if clip.per_layer else [Group()]
        for slot, report in collected.finish(self.parameters):
            groups[self._layer_of[slot] if clip.per_layer else 0].add(slot, report)
        decided = self._decided_at_once(groups[0], clip, real)
        if decided is not None:
            norms = decided.norms
            factors: Sequence[Tensor] = [decided.lower if allowance is None else decided.factors]
        else:
            norms, factors = self._factors(groups, clip, losses)
            if real is not None:
                factors = [torch.where(real, row, 0.0) for row in factors]
            if allowance is None:
                factors = [self._lower(row) for row in factors]
        live, collected.live = collected.live, []
        scaled = Scaled(self.parameters, self._slot, self._layer_of, live, groups, factors)
        sums: list[Tensor] | None = None
        if allowance is None and self._may_sum_twice(live, losses, accumulate):
            sums = scaled.sums(accumulate, scale, keep=True)
        if decided is not None:
            finite: Tensor | None = decided.finite
        else:
            finite = norms.isfinite() if self.static else _unless_all_finite(norms)
        if finite is not None:
            sums = None
            scaled.purge(finite)
        summation = self._summation
        summation.static = self.static
        if allowance is not None and places is not None:
            sums = scaled.certified(places, summation, clip.sensitivity, allowance)
        elif allowance is not None:
            sums = self.zeros(torch.float64) if accumulate is None else made(accumulate)
            check_request(sums)
            scaled.add_certified(sums, summation, clip.sensitivity, allowance, beside)
        elif sums is None:
            sums = scaled.sums(accumulate, scale)
        for piece in live:
            piece.release()
        if real is not None:
            norms = torch.where(real, norms, 0.0)
            finite = None if finite is None else finite | ~real
        return ClippedSum(sums, norms, finite)

    def _decided_at_once(
        self, group: Group, clip: Clip, real: Tensor | None
    ) -> kernels.Clipped | None:
        """Norms and factors by one kernel, where a GPU is not to be waited for."""
        if not self.static or not isinstance(clip, (Flat, Automatic)):
            return None
        parts = group.parts()
        if not parts or not kernels.available or not parts[0].is_cuda:
            return None
        if upcast(self.parameters[0].detach()).dtype is torch.float64:
            return None
        return kernels.clip_norms(
            torch.cat(parts).view(len(parts), -1),
            real,
            (above(len(parts) + 8), *clip.numbers, _DOWN),
        )

    def _lower(self, factors: Tensor) -> Tensor:
        """The factors in the type of the gradients, not above what they were."""
        dtype = upcast(self.parameters[0].detach()).dtype
        return factors if dtype is torch.float64 else factors.mul(_DOWN).to(dtype)

    def _may_sum_twice(self, live: list[Piece], losses: Tensor, accumulate: Buffers | None) -> bool:
        """Whether to sum before it is known that all norms are finite, and again if they are not.

        A GPU with little to do waits for the host: better not to let the host wait for it too.
        """
        anew = accumulate is None or callable(accumulate)
        if self.static:
            return False
        return losses.is_cuda and anew and sum([piece.entries for piece in live]) <= _LITTLE

    def check_losses(self, losses: Tensor) -> None:
        """Raise where ``clipped_sum`` could not work with these losses; changes nothing."""
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise EngineError(
                f"losses must hold one loss per example, shape (N,), got {shape}; use "
                "reduction='none' and, where an example has several terms, sum or average them "
                "within the example, not over the batch"
            )
        if self._summed is not None and self._summed() is losses:
            raise EngineError(
                "these losses were summed before, and their graph is gone: run the model again, "
                "once for each sum"
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

    def probe_if_due(self, losses: Tensor) -> None:
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
        use = self.use_of(losses)
        self.count_use(use)
        uses = self._uses[use]
        if uses & (uses - 1) == 0:
            self.probe(losses)
        self._probed = weakref.ref(losses)

    def use_of(self, losses: Tensor) -> Hashable:
        """What counts as one shape of the batch that was last seen."""
        examples = losses.shape[0]
        return (self._root.shape, examples if examples in self._sizes else None)

    def count_use(self, use: Hashable) -> None:
        """One more use of a shape: `probe_if_due` counts its own."""
        self._uses[use] += 1

    def probe(self, losses: Tensor) -> None:
        """Raise :class:`MixedExamples` unless every gradient row belongs to one example.

        Takes two backward passes, and leaves the graph of ``losses`` and all gradients as they
        were. ``probe_if_due`` calls it, and ``clipped_sum`` where nobody did before.
        """
        dtypes = {param.dtype for param in self.parameters}
        if torch.is_autocast_enabled(losses.device.type):
            dtypes.add(torch.get_autocast_dtype(losses.device.type))
        lowest = min(dtypes, key=lambda dtype: torch.finfo(dtype).max)

        def run(weights: Tensor, sketch: Sketch) -> None:
            self._backward.run(losses, sketch.arrive, weights, keep=True)
            sketch.finish()

        leaves = [node.variable for node in nodes(losses) if hasattr(node, "variable")]
        stash = [(leaf, leaf.grad) for leaf in leaves]
        for leaf, _ in stash:
            leaf.grad = None
        try:
            with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
                self._sizes |= probe(run, losses, lowest)
        finally:
            for leaf, grad in stash:
                leaf.grad = grad

    def _factors(
        self, groups: list[Group], clip: Clip, losses: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Norms ``(N,)``, and the factors of each group."""
        rows = [group.norms() for group in groups]
        known = [
            losses.new_zeros(len(losses), dtype=torch.float64) if r is None else r for r in rows
        ]
        if not clip.per_layer:
            return known[0], [clip.factors(known[0])]
        return joint_norm(known), clip.factors(torch.stack(known)).unbind(0)


def _unless_all_finite(norms: Tensor) -> Tensor | None:
    """Which of the norms are finite, or None where all are.

    The one place where the host waits for the device: to mask every tensor on the device
    instead would cost two kernels for each layer.
    """
    if math.isfinite(norms.cpu().numpy().sum()):
        return None
    return norms.isfinite()


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

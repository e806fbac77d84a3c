"""Per-example clipped gradient sums in one forward and one backward pass.

    engine = Engine(model)
    losses = loss_fn(model(x), y)                # one loss per example, shape (N,)
    result = engine.clipped_sum(losses, Flat(1.0))

The engine replaces the ``forward`` of the layers with trainable parameters by one that does the
same computation with detached parameters and remembers the input. ``clipped_sum`` then runs one
backward pass to the layers' outputs (no weight gradients), gets every example's squared norm
layer by layer, turns the norms into factors c_i and contracts once per layer:
``sum_i c_i g_i``.

Assumptions that cannot be checked cheaply: the first dimension of every tensor a layer sees is
the example, and no operation mixes examples (a loss or an operation across the batch makes the
result meaningless for privacy). A tensor outside the model that requires gradients, such as an
input, gets its ``.grad`` as in any backward pass; the parameters' ``.grad`` is left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.clip import Clip
from diminuendo.training.clipping.contract import shared_square_norm, square_norm, upcast
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.registry import forward_for, owned_parameters
from diminuendo.training.clipping.tape import Piece, Tape


@dataclass
class ClippedSum:
    """The result of one call of :meth:`Engine.clipped_sum`.

    ``sums`` is aligned with ``Engine.parameters``; ``norms`` are the unclipped norms ``(N,)``;
    ``nonfinite`` is a 0-dim tensor, the number of examples left out because their norm was
    infinite or not a number.
    """

    sums: list[Tensor]
    norms: Tensor
    nonfinite: Tensor


class Engine:
    """Attach to ``model`` and compute clipped gradient sums; ``close()`` detaches.

    ``eval_mode`` says what to do when ``clipped_sum`` is called while the model is in eval
    mode: ``"ignore"``, ``"warn"`` or ``"raise"``. Which parameters are trainable is read once,
    here; attach a new engine after freezing or unfreezing.
    """

    def __init__(self, model: nn.Module, eval_mode: str = "ignore") -> None:
        if eval_mode not in ("ignore", "warn", "raise"):
            raise EngineError(f"eval_mode must be 'ignore', 'warn' or 'raise', got {eval_mode!r}")
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self.model = model
        self.eval_mode = eval_mode
        self._tape = Tape()
        self._installed: list[tuple[nn.Module, Any]] = []
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        if not named:
            raise EngineError("the model has no parameter with requires_grad=True to train")
        self.names: list[str] = [name for name, _ in named]
        self.parameters: list[nn.Parameter] = [param for _, param in named]
        self._frozen = [
            (name, param) for name, param in model.named_parameters() if not param.requires_grad
        ]
        self._slot = {id(param): slot for slot, param in enumerate(self.parameters)}
        self.layers: list[tuple[str, ...]] = []
        self._layer_of: list[int] = [-1] * len(named)
        plan = []
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
            forward = forward_for(module, self._tape, path)
            if forward is not None:
                plan.append((module, forward))
                self._group(module)
        for module, forward in plan:
            self._installed.append((module, module.__dict__.get("forward")))
            patched = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
            patched.engine_holder = module
            object.__setattr__(module, "forward", MethodType(patched, module))

    def _group(self, module: nn.Module) -> None:
        own = [self._slot[id(param)] for param in owned_parameters(module).values()]
        new = sorted({slot for slot in own if self._layer_of[slot] < 0})
        if new:
            for slot in new:
                self._layer_of[slot] = len(self.layers)
            self.layers.append(tuple(self.names[slot] for slot in new))

    def close(self) -> None:
        """Detach from the model: every layer gets its own forward back."""
        for module, previous in self._installed:
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
        self, losses: Tensor, clip: Clip, accumulate: Sequence[Tensor] | None = None
    ) -> ClippedSum:
        """``sum_i c_i g_i`` for every parameter, with the factors c_i of ``clip``.

        ``losses`` has one entry per example, shape ``(N,)``. With ``accumulate`` (for example
        ``engine.zeros()``) the sums are added into those buffers, which are also returned. An
        example whose norm is not finite contributes exactly zero.
        """
        self._check_losses(losses)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            return self._clipped_sum(losses, clip, accumulate)

    def _clipped_sum(
        self, losses: Tensor, clip: Clip, accumulate: Sequence[Tensor] | None
    ) -> ClippedSum:
        if losses.shape[0] == 0:
            sums = self.zeros() if accumulate is None else list(accumulate)
            dtype = upcast(losses).dtype
            return ClippedSum(
                sums,
                torch.zeros(0, dtype=dtype, device=losses.device),
                torch.zeros((), dtype=torch.int64, device=losses.device),
            )
        norms_by_slot = _Norms(self._slot, losses.shape[0])
        self._backward(norms_by_slot, losses)
        live, users = norms_by_slot.finish(self.parameters)
        groups: list[list[Tensor]] = [[] for _ in self.layers] if clip.per_layer else [[]]
        for slot, squares in norms_by_slot.squares:
            groups[self._layer_of[slot] if clip.per_layer else 0].append(squares)
        norms, factors, finite = self._factors(groups, clip, losses)
        if losses.device.type != "cpu" or not bool(finite.all()):
            for piece in live:
                piece.purge(finite)
        sums = []
        for slot, param in enumerate(self.parameters):
            row = factors[self._layer_of[slot] if clip.per_layer else 0]
            total: Tensor | None = None if accumulate is None else accumulate[slot]
            for piece in users[slot]:
                part = piece.weighted_sum(param, row)
                total = part if total is None else total.add_(part)
            if total is None:
                total = torch.zeros_like(upcast(param.detach()))
            sums.append(total)
        return ClippedSum(sums, norms, (~finite).sum())

    def _check_losses(self, losses: Tensor) -> None:
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

    def _backward(self, norms: _Norms, losses: Tensor) -> None:
        """One backward pass to the layers' outputs, which hand their gradients to ``norms``."""
        params = self.parameters
        stash = [param.grad for param in params]
        for param, grad in zip(params, stash, strict=True):
            if grad is not None:
                param.grad = None
        self._tape.arrive = norms.arrive
        try:
            torch.autograd.backward(losses, torch.ones_like(losses))
            reached = [param.grad is not None for param in params]
        finally:
            self._tape.arrive = None
            for param, grad in zip(params, stash, strict=True):
                if grad is not None or param.grad is not None:
                    param.grad = grad
        if any(reached):
            self._refuse_direct_use(self.names[reached.index(True)], bool(norms.live))

    def _refuse_direct_use(self, name: str, recorded: bool) -> None:
        if not recorded:
            raise EngineError(
                "the forward pass was not recorded: run model(x) after Engine(model), and each "
                "forward pass needs its own clipped_sum"
            )
        raise EngineError(
            f"parameter '{name}' reaches the loss outside the forward of the module that "
            "owns it (for example F.linear(h, embedding.weight) or a penalty on weights), "
            "where its per-example gradient cannot be seen; call a module instead (to tie "
            "weights: head = nn.Linear(..., bias=False); head.weight = embedding.weight)"
        )

    def _factors(
        self, squares: list[list[Tensor]], clip: Clip, losses: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norms ``(N,)``, factors (groups, N) and which examples are finite."""
        zero = torch.zeros_like(upcast(losses.detach()))
        rows = [torch.stack(terms).sum(0) if terms else zero for terms in squares]
        stacked = torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)
        stacked = stacked.clamp_(min=0.0)
        groups = stacked.sqrt()
        norms = stacked.sum(0).sqrt() if len(rows) > 1 else groups[0]
        finite = norms.isfinite()
        factors = torch.where(finite, clip.factors(groups), 0.0)
        return norms, factors, finite


class _Norms:
    """Collects the pieces of one backward pass and their squared norms.

    A piece is processed as soon as its gradient arrives, except for parameters that other
    pieces use too: those need the cross terms and wait for the end.
    """

    def __init__(self, slot: dict[int, int], examples: int) -> None:
        self.slot, self.examples = slot, examples
        self.live: list[Piece] = []
        self.squares: list[tuple[int, Tensor]] = []
        self._seen: set[int] = set()

    def arrive(self, piece: Piece) -> None:
        """Take a piece one of whose output gradients has just arrived."""
        if not piece.engaged:
            piece.engaged = True
            pending = piece.retire()
            self.live.append(piece)
            shared = {
                id(param)
                for param in piece.params
                if id(param) in self._seen or (pending is not None and pending[id(param)] > 0)
            }
            self._seen.update(id(param) for param in piece.params)
            if piece.eager and len(piece.arrived) == 1:
                self._process(piece)
                self._measure(piece, lambda param: id(param) not in shared)

    def finish(self, params: list[nn.Parameter]) -> tuple[list[Piece], list[list[Piece]]]:
        """The live pieces, and those that use each parameter; all norms are known after it."""
        users: list[list[Piece]] = [[] for _ in params]
        for piece in self.live:
            if not piece.processed:
                self._process(piece)
            for param in piece.params:
                users[self.slot[id(param)]].append(piece)
        for slot, pieces in enumerate(users):
            if len(pieces) > 1:
                self.squares.append((slot, _shared(params[slot], pieces)))
        for piece in self.live:
            if len(piece.measured) < len(piece.params):
                self._measure(piece, lambda param: len(users[self.slot[id(param)]]) == 1)
        return self.live, users

    def _process(self, piece: Piece) -> None:
        if piece.examples != self.examples:
            raise EngineError(
                f"the input of '{piece.path}' has first dimension {piece.examples}, but there "
                f"are {self.examples} losses; the first dimension of everything must be "
                "the example: keep shapes like (N, tokens, features) instead of folding "
                "tokens into the batch, and give one loss per example"
            )
        piece.check()
        piece.receive(piece.arrived)
        piece.arrived, piece.processed = [], True

    def _measure(self, piece: Piece, ready: Callable[[nn.Parameter], bool]) -> None:
        todo = {
            id(param) for param in piece.params if id(param) not in piece.measured and ready(param)
        }
        if todo:
            piece.measured |= todo
            for key, squares in piece.square_norms(lambda param: id(param) in todo):
                self.squares.append((self.slot[key], squares))


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


def _inside_parametrization(path: str) -> bool:
    return "parametrizations" in path.split(".")

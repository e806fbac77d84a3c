"""Any other module that owns trainable parameters: replay it once for each example.

The module's inputs and output gradients are saved; the per-example gradients of the parameters
it owns are those of ``sum(module(x_i) * B_i)``, taken by ``torch.func`` (``vmap`` of ``grad`` of
``functional_call``). That recomputes the module's forward pass, so it costs about as much as the
module itself; on the first use the replayed outputs are compared with the recorded ones, which
catches modules that mix examples or that read arguments the replay splits wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from diminuendo.training.clipping.contract import upcast
from diminuendo.training.clipping.errors import EngineError, UnsupportedModule
from diminuendo.training.clipping.layers.norm import DirectPiece
from diminuendo.training.clipping.tape import Tape


class ReplayPiece(DirectPiece):
    """One call of a module that will be replayed, after the backward pass."""

    eager = False

    def __init__(self, unit: Unit, arguments: Any, examples: int) -> None:
        super().__init__(unit.path, list(unit.owned.values()), examples)
        self.unit = unit
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.leaves = [self.save(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.batched = unit.split(self.leaves, examples)
        self.witnesses: list[tuple[Tensor, int]] = []

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        if all(grad_ is None for grad_ in grads):
            return False
        values = self.unit.replay(self.leaves, self.spec, list(grads), self)
        for name, param in self.unit.owned.items():
            self.values[id(param)] = upcast(values[name])
        self.leaves, self.witnesses = [], []
        return True


class Unit:
    """A module whose own parameters (``owned``: by name) are handled by replaying it."""

    def __init__(
        self, module: nn.Module, tape: Tape, path: str, owned: dict[str, nn.Parameter]
    ) -> None:
        self.module, self.tape, self.path, self.owned = module, tape, path, owned
        self.verified: list[tuple[bool, ...]] = []

    def split(self, leaves: list[Any], examples: int) -> tuple[bool, ...]:
        """Which arguments are per example: those whose first dimension is N.

        A way of splitting that was checked before is preferred, so that an argument which is
        not per example is not taken for one when a batch happens to have its size.
        """
        fits = tuple(
            isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == examples
            for leaf in leaves
        )
        for known in self.verified:
            if len(known) == len(fits) and all(
                fit or not used for fit, used in zip(fits, known, strict=True)
            ):
                return known
        return fits

    def refuse(self, verdict: str, remedy: str) -> UnsupportedModule:
        """The refusal of this module."""
        return UnsupportedModule(self.path, type(self.module).__name__, verdict, remedy)

    def replay(
        self, leaves: list[Any], spec: Any, grads: list[Tensor | None], piece: ReplayPiece
    ) -> dict[str, Tensor]:
        """Per-example gradients of the owned parameters."""
        batched = piece.batched
        moving = [leaf for leaf, moves in zip(leaves, batched, strict=True) if moves]
        targets = [position for position, value in enumerate(grads) if value is not None]
        weights = [value for value in grads if value is not None]

        def objective(
            params: dict[str, Tensor], inputs: list[Tensor], weights: list[Tensor]
        ) -> tuple[Tensor, list[Tensor]]:
            rows = iter(inputs)
            filled = [
                next(rows).unsqueeze(0) if moves else leaf
                for leaf, moves in zip(leaves, batched, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            outputs = _tensors(functional_call(self.module, params, args, kwargs))
            total = sum(
                (
                    (outputs[position].squeeze(0) * weight)
                    .sum()
                    .to(torch.promote_types(weight.dtype, torch.float32))
                )
                for position, weight in zip(targets, weights, strict=True)
            )
            return total, [output.squeeze(0) for output in outputs]  # type: ignore[return-value]

        params = {name: param.detach() for name, param in self.owned.items()}
        self.tape.paused += 1
        try:
            with torch.enable_grad():
                values, outputs = vmap(grad(objective, has_aux=True), in_dims=(None, 0, 0))(
                    params, moving, weights
                )
        except Exception as error:
            raise self.refuse(
                "not yet",
                "it owns trainable parameters, is no layer the engine knows, and torch.func "
                f"cannot replay it one example at a time ({type(error).__name__}: {error}); "
                "freeze its parameters or rebuild it from supported layers (randomness such as "
                "dropout must live in modules of its own, outside the ones that own parameters)",
            ) from error
        finally:
            self.tape.paused -= 1
        if piece.witnesses:
            self._verify(outputs, piece)
        return values  # type: ignore[no-any-return]

    def _verify(self, outputs: list[Tensor], piece: ReplayPiece) -> None:
        for output, (seen, version) in zip(outputs, piece.witnesses, strict=True):
            if seen._version != version:
                return  # changed in place since: look again at the next step
            loose = 1e-4 if output.dtype in (torch.float32, torch.float64) else 5e-2
            if output.shape != seen.shape or not torch.allclose(
                output, seen, rtol=loose, atol=loose, equal_nan=True
            ):
                raise self.refuse(
                    "never",
                    "its output for one example alone differs from its output in the batch, so "
                    "it mixes examples, or takes an argument that is not per example but whose "
                    "first dimension equals the batch size",
                )
        self.verified.append(piece.batched)


def _tensors(outputs: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def forward_of(
    module: nn.Module, tape: Tape, path: str, owned: dict[str, nn.Parameter]
) -> Callable[..., Any]:
    """A forward that runs the module as it is, cut off from the parameters it owns."""
    unit = Unit(module, tape, path, owned)
    previous = module.__dict__.get("forward")
    original: Callable[..., Any] = type(module).forward

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if previous is not None and self is module:
            return previous(*args, **kwargs)
        return original(self, *args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module or not tape.recording():
            return call(self, *args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        first = next((leaf for leaf in inputs if leaf.dim() > 0), None)
        if first is None:
            raise EngineError(
                f"'{path}' ({type(module).__name__}) owns trainable parameters and was called "
                "without a tensor whose first dimension is the example; pass it the batch, or "
                "freeze its parameters"
            )
        if first.shape[0] == 0:
            return call(self, *args, **kwargs)
        piece = ReplayPiece(unit, (args, kwargs), first.shape[0])
        trained = [param for param in owned.values() if param.requires_grad]
        for param in trained:
            param.requires_grad_(False)
        try:
            result = call(self, *args, **kwargs)
        finally:
            for param in trained:
                param.requires_grad_(True)
        leaves, spec = pytree.tree_flatten(result)
        storages = {leaf.data_ptr() for leaf in inputs}
        targets, witnesses = [], []
        for position, leaf in enumerate(leaves):
            if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
                continue
            fresh = leaf.clone() if leaf._is_view() or leaf.data_ptr() in storages else leaf
            leaves[position] = tape.attach(fresh)
            targets.append(leaves[position])
            witnesses.append((leaves[position].detach(), leaves[position]._version))
        piece.witnesses = witnesses if piece.batched not in unit.verified else []
        tape.watch(piece, *targets)
        return pytree.tree_unflatten(leaves, spec)

    return forward

"""What is refused because nobody would pay for it: gradients and statistics that leave unseen.

Everything here raises before a step is charged, and changes nothing. `probe` adds what can only be
seen by trying the model out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.spending import Spending
from diminuendo.training.clipping import Clip


class Guard:
    """Watches over a model: only its trained parameters change, and only by paid gradients."""

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter]) -> None:
        self._model = model
        self._trained = {id(parameter) for parameter in trained}
        self._untrained = self._all_untrained()

    def watch(self) -> None:
        """From here on nobody may change what is not trained: the forward pass comes next."""
        self._untrained = self._all_untrained()

    def check(self, losses: Tensor, expected: int) -> None:
        """Raise where a step on these losses would release more than the budget pays for."""
        if len(losses) != expected:
            raise InputError(
                f"one for each of the {expected} examples of the batch that was drawn",
                name="the number of losses",
                value=len(losses),
                remedy="Compute them from this batch, whole and alone.",
            )
        self._refuse_new_parameters()
        self._refuse_statistics()
        self._refuse_other_leaves(losses)

    def _refuse_new_parameters(self) -> None:
        for module in self._model.modules():  # half as long as model.parameters() takes
            for name, parameter in module._parameters.items():
                if (
                    parameter is not None
                    and parameter.requires_grad
                    and id(parameter) not in self._trained
                ):
                    raise InputError(
                        "there when PrivateGradients was made",
                        name=f"the parameter {name} of a {type(module).__name__}",
                        value="added since",
                        remedy="Its gradient would not be private: close() this one and make "
                        "another.",
                    )

    def _refuse_statistics(self) -> None:
        now = self._all_untrained()
        if len(now) != len(self._untrained) or any(
            part is not before or version != version_before
            for (part, version), (before, version_before) in zip(now, self._untrained, strict=True)
        ):
            raise InputError(
                "left alone by the forward pass",
                name="the model's buffers and frozen parameters",
                value="changed",
                remedy="A running statistic of the data is a release that nobody pays for. "
                "Changes of your own belong before the batch is drawn.",
            )

    def _all_untrained(self) -> list[tuple[Tensor, int]]:
        """Whatever the model holds beside trained parameters, with versions."""
        return [
            (part, part._version)
            for module in self._model.modules()
            for parts in (module._buffers, module._parameters)
            for part in parts.values()
            if part is not None and not part.requires_grad
        ]

    def _refuse_other_leaves(self, losses: Tensor) -> None:
        """A parameter outside the model (of the loss, say) would get its plain gradient."""
        waiting, seen = [losses.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [source for source, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._trained:
                raise InputError(
                    "trained only as part of the model",
                    name="every parameter that the loss depends on",
                    value=tuple(leaf.shape),
                    remedy="The gradient of this one would be neither clipped nor noisy: move it "
                    "into a module of the model, or detach it.",
                )

    def check_optimizer(self, optimizer: Any) -> None:
        """Its parameters must be the model's: others would be trained without privacy, or not."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                "an optimizer that was made",
                name="optimizer",
                value=optimizer,
                remedy="Write torch.optim.Adam(model.parameters(), lr=0.001), say.",
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InputError(
                "one that takes one gradient a step",
                name="optimizer",
                value="LBFGS",
                remedy="It asks for several, and each would have to be paid for.",
            )
        stepped = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if not stepped or any(id(parameter) not in self._trained for parameter in stepped):
            raise InputError(
                "made of the model's own parameters",
                name="optimizer",
                value=type(optimizer).__name__,
                remedy="Parameters outside the model get no private gradient: make them part of "
                "it.",
            )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """What would fail, or do nothing, after the first step was paid."""
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            "one that needs no loss",
            name="lr_scheduler",
            value="ReduceLROnPlateau",
            remedy="The training loss is not released; take a scheduler that counts steps.",
        )
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise InputError(
            "a scheduler that was made for the optimizer that is given",
            name="lr_scheduler",
            value=scheduler,
        )


def check_policy(policy: Any, spending: Spending | None) -> None:
    """σ that are chosen while training are covered only by a filter."""
    if policy is not None and (spending is None or not spending.adaptive):
        raise InputError(
            "given together with a spending that has a filter",
            name="policy",
            value=policy,
            remedy="A plan fixes every σ; use AdaptiveSpending.",
        )


def check_seed(seed: Any, spending: Spending | None) -> None:
    """A seeded run is not private, and a ledger's budget is for runs that are."""
    if seed is not None and spending is not None and spending.durable:
        raise InputError(
            "left out with a ledger",
            name="seed",
            value=seed,
            remedy="A seeded run is not private: no budget can pay for it.",
        )


def check_clip(clip: Any, name: str = "clip", *, callable_too: bool = False) -> None:
    """A clip whose sensitivity is known, or (where allowed) a function of the step."""
    if isinstance(clip, Clip) or (callable_too and callable(clip)):
        return
    also = ", or a function of the step that returns one" if callable_too else ""
    raise InputError(
        f"Flat, PerLayer or Automatic{also}",
        name=name,
        value=clip,
        remedy="For the norm C write Flat(C).",
    )


def check_own_batch(losses: Tensor, plan: Plan, rate: float, world: int) -> None:
    """A batch that `batches` did not draw: only the whole dataset can be one."""
    if rate == 1 and losses.shape[:1] == (plan.examples,) and world == 1:
        return
    raise InputError(
        "drawn by private.batches(dataset)",
        name="the batch",
        value=tuple(losses.shape),
        remedy="The claim is for the plan's own sampler; only a full batch may come from "
        "elsewhere, and only in a single process.",
    )

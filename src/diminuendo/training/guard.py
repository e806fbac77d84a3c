"""What is refused because nobody would pay for it: gradients and statistics that leave unseen.

Everything here raises before a step is charged, and changes nothing. `probe` adds what can only be
seen by trying the model out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from diminuendo import accounting, events
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.spending import Spending
from diminuendo.training.clipping import Clip
from diminuendo.training.clipping.probe import nodes
from diminuendo.training.contents import Contents
from diminuendo.training.probe import Shapes, first_rows, other_batch, refuse_mixing_calls
from diminuendo.training.sampling import Drawn


class Guard:
    """Watches over a model: only its trained parameters change, and only by paid gradients.

    Versions of tensors are compared in every step. Contents, and whether the model mixes examples,
    are looked at when a batch has a shape that was not seen before: that takes as long as some
    forward passes.
    """

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, trained
        self._trained = {id(parameter) for parameter in trained}
        self._shapes = Shapes(model)
        self._size = 0
        self._drawn: Drawn | None = None
        self._outputs: set[Any] | None = None
        self._versions: list[int] | None = None
        self._around, self._since_saved = Contents(), Contents()
        self._untrained = self._all_untrained()

    def watch(self, size: int, drawn: Drawn | None = None) -> None:
        """From here on nobody may change what is not trained.

        size   the number of examples that the next call of the model is made for
        drawn  the batch, where a forward pass on it comes next: then nobody may change trained
               parameters, too
        """
        self._untrained = self._all_untrained()
        self._size, self._drawn, self._outputs = size, drawn, None
        self._versions = None if drawn is None else self._trained_versions()
        self._around.forget()

    def before_forward(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Look at a call of the model that will be differentiated, before it is made."""
        if self._versions is None:
            self._versions = self._trained_versions()
        if self._drawn is not None and self._drawn.rows < 2:
            return  # blank rows beside one example, or none, would tell too little of a shape
        rows = first_rows(args, kwargs, self._size)
        if rows is None or not self._shapes.new(rows, self._model.training):
            return
        if self._drawn is not None and self._drawn.other_rows(rows):
            raise other_batch()
        if self._drawn is not None and self._drawn.out_of_order(rows):
            raise _out_of_order()
        self._around.record([*self._parameters, *[part for part, _ in self._untrained]])
        refuse_mixing_calls(self._model, args, kwargs, self._size)

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
        self.refuse_writes()
        self._refuse_other_sources(losses)

    def verify(self) -> None:
        """Raise where somebody wrote on a buffer or frozen parameter unseen since the last call.

        For the beginning, the end and whenever a state is saved: contents are compared, since a
        write through `.data` or numpy changes no version.
        """
        if self._since_saved.overwritten():
            raise _overwritten()
        self._since_saved.record([part for part, _ in self._all_untrained()])

    def _refuse_new_parameters(self) -> None:
        for module in _modules(self._model):
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

    def refuse_writes(self) -> None:
        """Raise where a forward or backward pass wrote on what the model holds."""
        now = self._all_untrained()
        if len(now) != len(self._untrained) or any(
            part is not before or version != version_before
            for (part, version), (before, version_before) in zip(now, self._untrained, strict=True)
        ):
            raise InputError(
                "left alone by the forward and backward passes",
                name="the model's buffers and frozen parameters",
                value="changed",
                remedy="A running statistic of the data is a release that nobody pays for. "
                "Changes of your own belong before the batch is drawn.",
            )
        if self._versions not in (None, self._trained_versions()):
            raise InputError(
                "left alone by the forward and backward passes",
                name="the model's trained parameters",
                value="changed",
                remedy="They may change by private gradients alone: what a forward pass writes on "
                "them is a release that nobody pays for. Changes of your own belong before the "
                "batch is drawn.",
            )
        if self._around.overwritten():
            raise _overwritten()
        self._around.forget()

    def _trained_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _all_untrained(self) -> list[tuple[Tensor, int]]:
        """Whatever the model holds beside trained parameters, with versions."""
        return [
            (part, part._version)
            for module in _modules(self._model)
            for parts in (module._buffers, module._parameters)
            for part in parts.values()
            if part is not None and not part.requires_grad
        ]

    def _refuse_other_sources(self, losses: Tensor) -> None:
        """A parameter outside the model (of the loss, say) would get its plain gradient.

        And losses that come from another call of the model than the one on the batch.
        """
        waited_for = self._outputs
        for node in nodes(losses):
            if waited_for is not None and node in waited_for:
                waited_for = None
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._trained:
                raise InputError(
                    "trained only as part of the model",
                    name="every parameter that the loss depends on",
                    value=tuple(leaf.shape),
                    remedy="The gradient of this one would be neither clipped nor noisy: move it "
                    "into a module of the model, or detach it.",
                )
        if waited_for and len(losses):
            raise other_batch()

    def expect(self, outputs: Any) -> None:
        """The losses of this step come from these outputs of the model, or are refused."""
        tensors = [part for part in _pytree.tree_leaves(outputs) if isinstance(part, Tensor)]
        self._outputs = {part.grad_fn for part in tensors if part.grad_fn is not None}

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


def _modules(model: nn.Module) -> list[nn.Module]:
    """Each module once. Every step looks several times, and `model.modules()` takes three times as
    long: it makes up names."""
    found, seen = [model], {model}
    for module in found:  # grows while it is read
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                found.append(part)
    return found


def _out_of_order() -> InputError:
    return InputError(
        "in the order in which they were drawn",
        name="the rows of the batch",
        value="others",
        remedy="Blank rows come last: by their places they count for nothing, and examples in "
        "their places would. Leave the order as it is, or train with pad=False.",
    )


def _overwritten() -> InputError:
    return InputError(
        "left alone by the forward and backward passes",
        name="the contents of the model's buffers and parameters",
        value="changed past PyTorch (through .data, numpy or another library)",
        remedy="A statistic of the data is a release that nobody pays for. Changes of your own "
        "belong between steps, by PyTorch's operations.",
    )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """What would fail, or do nothing, after the first step was paid."""
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            "one that needs no loss, or one with a metric that is public or paid for",
            name="lr_scheduler",
            value="ReduceLROnPlateau",
            remedy="The training loss is not released. fit takes OnPlateau(scheduler, "
            "public=(x, y)), or OnPlateau(scheduler, paid=0.1).",
        )
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise InputError(
            "a scheduler that was made for the optimizer that is given",
            name="lr_scheduler",
            value=scheduler,
        )


def check_plan(plan: Plan) -> None:
    """A plan that somebody changed after planning: what its σ cost is accounted anew.

    For a plan of uniform noise this takes milliseconds, for one of 20,000 different σ at a
    sampling rate below 1 about two seconds.
    """
    check_kind(plan)
    cost = accounting.claim(events.from_schedule(plan.sigmas, plan.rates), plan.budget)
    if len(plan.sigmas) != plan.steps or cost > min(plan.epsilon, plan.budget.epsilon) * (1 + 1e-9):
        raise InputError(
            f"within what it states (epsilon = {plan.epsilon:g} in {plan.steps} steps)",
            name="the cost of the plan",
            value=f"epsilon = {cost:g} in {len(plan.sigmas)} steps",
            remedy="Its noise multipliers were replaced after planning: plan again. For σ that "
            "are chosen while training use AdaptiveSpending.",
        )


def check_kind(plan: Any) -> None:
    """A plan, and not what it was made of or what holds it."""
    if isinstance(plan, Plan):
        return
    raise InputError(
        "a Plan",
        name="plan",
        value=plan,
        remedy="dim.plan(…) makes one; what dim.tune chose has one in .plan.",
    )


def check_spending(spending: Any) -> None:
    """Something that can be asked for budget."""
    if spending is None or isinstance(spending, Spending):
        return
    raise InputError(
        "a Spending",
        name="spending",
        value=spending,
        remedy='ledger.pay("patients", plan, data=data), say; left out, the plan itself pays.',
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


def check_unit(spending: Spending, grouped: bool) -> None:
    """A budget for patients is not spent by rows, of which a patient may have many."""
    if spending.unit != "example" and not grouped:
        raise InputError(
            f"given, since the budget protects each {spending.unit}",
            name="groups",
            value=None,
            remedy=f"Pass a column that says which {spending.unit} each row belongs to, to fit or "
            'to private.batches, or as [data] groups = "NAME" in a run file, and plan with '
            f"examples = the number of {spending.unit}s.",
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


LEAST_ON_GPU = 1e-9
"""What the bound on underflow in products asks of a clip norm (docs/rounding.md)."""


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


def check_clip_on_gpu(clip: Clip) -> None:
    """A clip norm beside which what underflows in a product in TF32 is nothing."""
    if clip.sensitivity < LEAST_ON_GPU:
        raise InputError(
            f"at least {LEAST_ON_GPU:.0e} on a GPU",
            name="the clip norm",
            value=clip.sensitivity,
            remedy="Multiply losses and clip norm by the same number, and divide the learning rate "
            "by it.",
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

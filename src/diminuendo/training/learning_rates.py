"""Learning rates as the plan has them, with PyTorch's schedulers as the mechanism."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.planning import Plan, PlanWarning, mismatch
from diminuendo.training.guard import check_kind, check_scheduler
from diminuendo.training.plateau import OnPlateau

_CLOSE = 1e-4


class PlannedRates(LambdaLR):
    """The learning rate of the optimizer times η_1…η_T of a plan, step by step."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
        super().__init__(optimizer, lambda step: rates[min(step, len(rates) - 1)])

    def catch_up(self, step: int) -> None:
        """Go on to the learning rate after `step` steps: a crash may have spent some untaken."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while self.last_epoch < step:
                self.step()


class Watch:
    """Warns, once, where an optimizer steps with another learning rate than the plan has.

    For loops of one's own, which nothing else can look into. The learning rate of the first step
    that is seen is taken as the unit of the plan's. Warns as well where the noise was made for
    momentum and the optimizer has another one, or none.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        rates: Sequence[float] | None,
        steps: int,
        taken: Callable[[], int | None],
        momentum: float | None = None,
    ) -> None:
        """`rates` is None for a constant learning rate; `taken` says how many steps are over, or
        None once there is nothing to watch.
        """
        self._momentum = momentum
        self._own = {id(parameter) for parameter in parameters}
        self._constant = rates is None
        self._rates = [1.0] * steps if rates is None else rates
        self._taken = taken
        self._unit: float | None = None
        self._over = False
        while Watch._ended:
            Watch._ended.pop().remove()
        self._hook = register_optimizer_step_pre_hook(self._look)

    _ended: ClassVar[list[RemovableHandle]] = []
    """Hooks that found no more to do: within a step PyTorch goes through them all, so that they are
    removed when the next one is made."""

    def stop(self) -> None:
        """Look no more. Not to be called within a step of an optimizer."""
        self._over = True
        self._hook.remove()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            Watch._ended.append(self._hook)

    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._over:
            return
        step = self._taken()
        if step is None:
            self._end()
            return
        self.look(optimizer, step)

    def look(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Compare the learning rate with which step 1, 2, … is taken."""
        group = self._group(optimizer)
        if self._over or group is None or not 0 < step <= len(self._rates):
            return
        self._look_at_momentum(group)
        if isinstance(group["lr"], Tensor) and step & (step - 1):
            return  # to read it may be to wait for a GPU: at the 1st, 2nd, 4th, 8th … step only
        used, planned = float(group["lr"]), self._rates[step - 1]
        if self._unit is None and used > 0 and planned > 0:
            self._unit = used / planned
            return
        unit = self._unit
        if used == planned == 0 or (
            unit and abs(used - unit * planned) <= _CLOSE * unit * max(self._rates)
        ):
            return
        self._end()
        made_for = (
            "a constant one. Plan"
            if self._constant
            else "its own learning rates. Let follow_plan(optimizer, plan) set them, or plan"
        )
        due = f"{(unit or 0) * planned:.6g}" if unit or planned == 0 else "one above 0"
        warnings.warn(
            f"The learning rate of step {step} is {used:.6g}, where the plan has {due}: its noise "
            f"was made for {made_for} for yours with lr=….",
            PlanWarning,
            stacklevel=4,
        )

    def _look_at_momentum(self, group: dict[str, Any]) -> None:
        planned, self._momentum = self._momentum, None
        if planned is None:
            return
        names = [name for name in ("beta", "betas", "momentum") if name in group]
        used = group[names[0]] if names else 0.0
        used = used[0] if isinstance(used, tuple | list) else used
        if not isinstance(used, int | float | Tensor):
            return  # an optimizer that means something else by the name
        if abs(float(used) - planned) > _CLOSE:
            warnings.warn(
                f"The optimizer's momentum is {float(used):.6g}, where the plan has {planned:.6g}: "
                "its noise was made for that. Give the optimizer this momentum, or plan for yours "
                "with momentum=….",
                PlanWarning,
                stacklevel=5,
            )

    def _group(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        for group in optimizer.param_groups:
            if any(id(parameter) in self._own for parameter in group["params"]):
                return group
        return None


@overload
def follow_plan(
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    lr_scheduler: LRScheduler | None = None,
    *,
    strict: bool = False,
) -> LRScheduler | None: ...


@overload
def follow_plan(
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    lr_scheduler: LRScheduler | OnPlateau | None,
    *,
    strict: bool = False,
) -> LRScheduler | OnPlateau | None: ...


def follow_plan(
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    lr_scheduler: LRScheduler | OnPlateau | None = None,
    *,
    strict: bool = False,
) -> LRScheduler | OnPlateau | None:
    """The scheduler to step after each training step, for the learning rates of the plan.

    optimizer      its learning rate is the unit of the plan's: 1/M, where the plan was made from
                   kappa or gamma, and the unit of one over an eigenvalue with a spectrum
    lr_scheduler   one of your own, in place of the plan's learning rates
    strict         refuse learning rates that differ from the plan's, instead of warning

    Returns your scheduler, one that follows plan.lr, or None where the learning rate is constant.
    Nothing is spent here: where your scheduler differs from what the noise was planned for, a
    PlanWarning (with strict=True an InputError) says what that is expected to cost.
    """
    check_kind(plan)
    _validate.flag("strict", strict)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError("an optimizer that was made", name="optimizer", value=optimizer)
    check_scheduler(lr_scheduler, optimizer)
    if lr_scheduler is None:
        if plan.lr is None:
            return None
        return PlannedRates(optimizer, plan.lr.tolist())
    if isinstance(lr_scheduler, OnPlateau):  # nobody knows in advance which rates it will set
        worst = planned_by(lr_scheduler.scheduler, plan.steps, lr_scheduler.without_improvement)
        _say_mismatch(plan, worst, strict, "If the metric never improves: ")
    else:
        _say_mismatch(plan, planned_by(lr_scheduler, plan.steps), strict)
    return lr_scheduler


def _say_mismatch(plan: Plan, rates: Vector, strict: bool, when: str = "") -> None:
    cost = mismatch(plan, rates)
    if cost is None:
        return
    if strict:
        raise InputError(
            f"{cost.planned:.6g} of the largest one, as planned",
            name=f"the learning rate of step {cost.step}",
            value=cost.used,
            remedy=f"{when}{cost}",
        )
    warnings.warn(f"{when}{cost}", PlanWarning, stacklevel=4)


def planned_by(
    scheduler: LRScheduler, steps: int, step: Callable[[int], None] | None = None
) -> Vector:
    """The learning rates of the next `steps` steps; scheduler and optimizer end as they were.

    step   steps the scheduler after t = 1, 2, …; its own `step` unless given
    """
    optimizer = scheduler.optimizer
    kept = copy.deepcopy(scheduler.state_dict())
    groups = [
        {name: _kept(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    values = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for t in range(1, steps + 1):
                values.append(float(optimizer.param_groups[0]["lr"]))
                scheduler.step() if step is None else step(t)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"a scheduler for {steps} steps",
            name="lr_scheduler",
            value=type(scheduler).__name__,
            remedy=f"It stops after {len(values)}: {error}",
        ) from None
    finally:
        scheduler.load_state_dict(kept)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _restore(group, before)
    return torch.tensor(values, dtype=torch.float64).numpy()


def _kept(value: Any) -> Any:
    """As it is now: a scheduler writes on a learning rate that is a tensor."""
    return value.clone() if isinstance(value, Tensor) else value


def _restore(group: dict[str, Any], before: dict[str, Any]) -> None:
    """What was kept, in the tensors that are there: a recorded step reads those."""
    for name, value in before.items():
        now = group.get(name)
        if isinstance(now, Tensor) and isinstance(value, Tensor):
            now.copy_(value)
        else:
            group[name] = value

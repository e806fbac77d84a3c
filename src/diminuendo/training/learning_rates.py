"""Learning rates as the plan has them, with PyTorch's schedulers as the mechanism."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.planning import Plan, PlanWarning, mismatch
from diminuendo.training.guard import check_scheduler


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


def follow_plan(
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    lr_scheduler: LRScheduler | None = None,
    *,
    strict: bool = False,
) -> LRScheduler | None:
    """The scheduler to step after each training step, for the learning rates of the plan.

    optimizer      its learning rate is the unit of the plan's: 1/M, where the plan was made from
                   kappa or gamma, and the unit of one over an eigenvalue with a spectrum
    lr_scheduler   one of your own, in place of the plan's learning rates
    strict         refuse learning rates that differ from the plan's, instead of warning

    Returns your scheduler, one that follows plan.lr, or None where the learning rate is constant.
    Nothing is spent here: where your scheduler differs from what the noise was planned for, a
    PlanWarning (with strict=True an InputError) says what that is expected to cost.
    """
    check_scheduler(lr_scheduler, optimizer)
    if lr_scheduler is None:
        if plan.lr is None:
            return None
        return PlannedRates(optimizer, plan.lr.tolist())
    cost = mismatch(plan, planned_by(lr_scheduler, plan.steps))
    if cost is None:
        return lr_scheduler
    if strict:
        raise InputError(
            f"{cost.planned:.6g} of the largest one, as planned",
            name=f"the learning rate of step {cost.step}",
            value=cost.used,
            remedy=str(cost),
        )
    warnings.warn(str(cost), PlanWarning, stacklevel=3)
    return lr_scheduler


def planned_by(scheduler: LRScheduler, steps: int) -> Vector:
    """The learning rates of the next `steps` steps; scheduler and optimizer end as they were."""
    optimizer = scheduler.optimizer
    kept = copy.deepcopy(scheduler.state_dict())
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    values = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(steps):
                values.append(float(optimizer.param_groups[0]["lr"]))
                scheduler.step()
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
            group.update(before)
    return torch.tensor(values, dtype=torch.float64).numpy()

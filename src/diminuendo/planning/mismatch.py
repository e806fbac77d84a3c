"""What it costs to follow a plan's noise with other learning rates than it was made for."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.bounds.landscape import Landscape, Momentum
from diminuendo.influence import response
from diminuendo.planning.value import Plan

_SAME = 1e-6


class Mismatch(NamedTuple):
    """The step that differs most, both learning rates there, and what is lost.

    step                 t = 1…T
    planned, used        learning rates as shares of the largest one of the run
    over_planned         noise left in the final loss, over that of noise planned for `used`
    over_uniform         the same over that of uniform noise
    """

    step: int
    planned: float
    used: float
    over_planned: float
    over_uniform: float

    def __str__(self) -> str:
        worse = self.over_uniform > 1
        return (
            "The learning rates of this run are not those that the plan's noise was made for (step "
            f"{self.step}: {self.used:.4g} of the largest one where the plan has "
            f"{self.planned:.4g}). It is expected to leave {100 * (self.over_planned - 1):.1f}% "
            "more noise in the final loss than noise planned for them, and "
            f"{100 * abs(self.over_uniform - 1):.1f}% {'more' if worse else 'less'} than uniform "
            "noise. Plan again with lr=…, or let training follow the plan's learning rates."
        )


def forgetting(influence: Vector, lr: Vector | None) -> float:
    """By how much ln(q_t/η_t²) falls with a unit of learning rate in later steps, at least 0."""
    rates = np.ones_like(influence) if lr is None else lr
    moving = np.flatnonzero(rates > 0)
    first, last = moving[0], moving[-1]
    length = float(np.sum(rates[first + 1 : last + 1]))
    if length == 0:
        return 0.0
    kept = np.log(influence[[first, last]]) - 2 * np.log(rates[[first, last]])
    return max(float(kept[1] - kept[0]), 0.0) / length


def forgetting_of(loss: Landscape, influence: Vector, lr: Vector | None) -> float:
    """By how much a unit of learning rate in later steps lowers the logarithm of what noise leaves.

    Averages hold noise back, so that with momentum q_t does not show it; the landscape knows it.
    """
    if isinstance(loss, Momentum):
        return -math.log(max(loss.rate if lr is None else loss.plain_rate, 1e-30))
    return forgetting(influence, lr)


def _forgetting(plan: Plan, planned: Vector) -> float:
    """The plan's own; of plans that do not know it, what the optimal noise says: σ_t² ∝ 1/√q_t."""
    if plan.forgetting is not None:
        return plan.forgetting
    return forgetting((plan.sigmas / plan.rates) ** -4.0, planned)


def _influence(lr: Vector, rate: float, momentum: float | None) -> Vector:
    """q_1…q_T of steps of these lengths in a run that forgets noise at this rate."""
    if momentum is not None:
        curvature = np.array([max(-math.expm1(-rate / 2), 1e-12)])
        return response(curvature, lr, momentum=momentum).influence
    later = np.append(np.cumsum(lr[:0:-1])[::-1], 0.0)
    log_q = 2 * np.log(np.maximum(lr, 1e-100)) - rate * later
    return np.asarray(np.exp(np.maximum(log_q - log_q.max(), math.log(1e-200))))


def mismatch(plan: Plan, lr: ArrayLike) -> Mismatch | None:
    """What following `plan` with learning rates lr (any unit) costs; None where they agree.

    Learning rates agree if they are proportional to the plan's (to each other, where the plan has
    none), and uniform noise without learning rates of its own agrees with all. Otherwise the noise
    that they leave is estimated with the plan's own rate of forgetting.
    """
    used = _validate.vector("lr", lr, positive=False)
    planned = np.ones(plan.steps) if plan.lr is None else plan.lr
    _validate.same_length("lr", used, "the plan", planned)
    _validate.positive("max(lr)", float(used.max()))
    used, shares = used / used.max(), planned / planned.max()
    apart = np.abs(used - shares) > _SAME
    if not apart.any() or (plan.lr is None and float(np.ptp(plan.sigmas)) == 0):
        return None
    step = int(np.argmax(np.abs(used - shares)))
    lengths = used * float(planned.max())
    q = _influence(lengths, _forgetting(plan, planned), plan.momentum)
    noise, rates = plan.sigmas / plan.rates, plan.rates
    left = float(np.sum(q * noise**2))
    spent = float(np.sum((rates * plan.sigmas**-1.0) ** 2))
    return Mismatch(
        step + 1,
        float(shares[step]),
        float(used[step]),
        left * spent / float(np.sum(np.sqrt(q))) ** 2,
        left * spent / (plan.steps * float(np.sum(q))),
    )

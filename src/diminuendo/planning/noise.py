"""Noise multipliers for an influence, a budget and a sampling rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate, schedules
from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import (
    add_remove_target,
    calibrate,
    calibrate_near,
    roughly_scaled,
)
from diminuendo.accounting.subsampled import DeltaModel
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import InputError
from diminuendo.planning.value import PlanWarning

SCHEDULES = ("optimal", *schedules.shapes.NAMED)
"""The names that `plan(schedule=…)` takes."""

Schedule = str | Callable[[int], float] | ArrayLike

_ROUNDS = 4
_SETTLED = 0.3
_MOST_RATES = 4
_START_POWERS = (0.0, 0.125, 0.25)
_LEAST_ROOT = 1e-10
"""The least √q_t that noise is planned for, over the mean of all. To raise what is less costs
nothing, and without it a σ_t may be 10⁷⁰ times another: infinite in float32, where 0·∞ is NaN."""
_LEAST_RATE = 1e-5
"""The least learning rate that noise is planned for, over the largest of the run."""


def scheduled_sigmas(
    schedule: Schedule,
    influence: Vector,
    budget: Budget,
    rate: float | Vector,
    fall: float | None = None,
    *,
    uniform: Vector | None = None,
) -> Vector:
    """σ_1…σ_T of the named, computed or listed schedule, scaled onto the budget.

    `fall` is σ_T/σ_1 of a named shape, in (0, 1]; where it is None the shape falls as far as the
    optimal full-batch schedule for this influence does. `uniform` is the uniform schedule on this
    budget, where it is at hand.
    """
    if fall is not None and (not isinstance(schedule, str) or schedule in ("optimal", "uniform")):
        raise InputError(
            "given with a named schedule that falls",
            name="fall",
            value=fall,
            remedy="The optimal schedule falls as the influence decides.",
        )
    steps, influence = influence.size, _at_least(influence)
    if not isinstance(schedule, str):
        return calibrate(schedules.shapes.custom(schedule, steps), budget, rate)
    _validate.choice("schedule", schedule, SCHEDULES)
    if schedule == "optimal":
        return optimal_sigmas(influence, budget, rate, uniform=uniform)
    if fall is None:
        fall = min(float((influence[0] / influence[-1]) ** 0.25), 1.0)
    return calibrate(schedules.shapes.falling(schedule, steps, fall), budget, rate)


def _at_least(influence: Vector) -> Vector:
    """The influence with what is next to none raised to a share of the mean."""
    roots = np.sqrt(influence)
    least = _LEAST_ROOT * float(roots.mean())
    return np.where(roots < least, least**2, influence)


def noticed(lr: Vector) -> Vector:
    """The learning rates that noise is planned for: none is nearly zero.

    The noise of a step at zero costs nothing in plain descent, but an optimizer with a memory keeps
    it. With 300 times the noise of others such a step still takes next to nothing of the budget.
    """
    return np.asarray(np.maximum(lr, _LEAST_RATE * lr.max()))


def optimal_sigmas(
    influence: Vector,
    budget: Budget | tuple[float, float],
    sampling_rate: float | Vector,
    *,
    uniform: Vector | None = None,
) -> Vector:
    """The σ_t that minimise Σ q_t (σ_t/rate_t)² within the budget, never worse than uniform noise.

    A mean over an expected batch of rate_t·N examples has noise σ_t/rate_t. Full batch: the lemma.
    Subsampled at up to four different rates: the stationary point of δ(ε), scaled onto the budget
    by the certified accountant. At more rates: the best of uniform noise on the sum, uniform noise
    on the mean and the lemma's shape.
    """
    budget = as_budget(budget)
    if isinstance(sampling_rate, float) and sampling_rate == 1:
        return schedules.optimal(influence, budget.R)
    rates = np.broadcast_to(np.asarray(sampling_rate, dtype=np.float64), influence.shape)
    weights = influence / rates**2
    if uniform is None:
        uniform = calibrate(np.ones_like(influence), budget, rates)
    candidates = [uniform]
    if np.unique(rates).size > _MOST_RATES:
        shapes = (rates, schedules.optimal_shape(weights))
        candidates += [calibrate(shape, budget, rates) for shape in shapes]
    else:
        try:
            sigmas = _stationary(weights, rates, budget)
        except InputError:
            warnings.warn(
                "The best schedule could not be computed here. The plan takes the better of "
                "uniform noise and the full-batch rule, which may not be the best.",
                PlanWarning,
                stacklevel=5,
            )
            sigmas = calibrate(schedules.optimal_shape(weights), budget, rates)
        candidates.append(calibrate_near(sigmas, budget, rates))
    return min(candidates, key=lambda sigmas: float(np.sum(weights * sigmas**2)))


def _stationary(weights: Vector, rates: Vector, budget: Budget) -> Vector:
    """Σ weights·σ² at its least for the budget's (ε, δ), before the certified accountant."""
    target = add_remove_target(budget)
    kinds = schedules.Kinds(weights, rates)
    starts = [
        roughly_scaled(np.exp(-power * kinds.log_q), target, kinds.rates, kinds.counts)
        for power in _START_POWERS
    ]
    noise = [float(np.sum(kinds.counts * np.exp(kinds.log_q) * start**2)) for start in starts]
    log_sigmas = np.log(starts[int(np.argmin(noise))])
    for _ in range(_ROUNDS):
        model = DeltaModel(
            np.exp(log_sigmas), kinds.rates, kinds.counts, target.epsilon, target.delta
        )
        before = log_sigmas
        log_sigmas = schedules.least_noise(
            kinds.log_q, kinds.counts, model, float(np.log(target.delta)), before
        )
        if abs(float(log_sigmas.min() - before.min())) < _SETTLED:
            break
    return kinds.spread(log_sigmas)

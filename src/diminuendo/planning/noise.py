"""Noise multipliers for an influence, a budget and a sampling rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate, schedules
from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import calibrate
from diminuendo.accounting.subsampled import price_curve
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.planning.value import PlanWarning

SCHEDULES = ("optimal", *schedules.shapes.NAMED)
"""The names that `plan(schedule=…)` takes."""

Schedule = str | Callable[[int], float] | ArrayLike

_ROUNDS = 4
_WORTHWHILE = 1e-3


def scheduled_sigmas(
    schedule: Schedule,
    influence: Vector,
    budget: Budget,
    rate: float | Vector,
    fall: float | None = None,
) -> Vector:
    """σ_1…σ_T of the named, computed or listed schedule, scaled onto the budget.

    `fall` is σ_T/σ_1 of a named shape, in (0, 1]; where it is None the shape falls as far as the
    optimal full-batch schedule for this influence does.
    """
    if fall is not None and (not isinstance(schedule, str) or schedule in ("optimal", "uniform")):
        raise InputError(
            "given with a named schedule that falls",
            name="fall",
            value=fall,
            remedy="The optimal schedule falls as the influence decides.",
        )
    steps = influence.size
    if not isinstance(schedule, str):
        return calibrate(schedules.shapes.custom(schedule, steps), budget, rate)
    _validate.choice("schedule", schedule, SCHEDULES)
    if schedule == "optimal":
        return optimal_sigmas(influence, budget, rate)
    if fall is None:
        fall = min(float((influence[0] / influence[-1]) ** 0.25), 1.0)
    return calibrate(schedules.shapes.falling(schedule, steps, fall), budget, rate)


def optimal_sigmas(influence: Vector, budget: Budget, sampling_rate: float | Vector) -> Vector:
    """The σ_t that minimise Σ q_t σ_t² within the budget, at the price that sampling gives a step.

    With a rate for each step: the best of uniform noise on the sum, uniform noise on the mean and
    the lemma's shape, since prices are found for one rate at a time. A mean over an expected batch
    of rate_t·N has noise σ_t/rate_t, so Σ q_t (σ_t/rate_t)² is what they are compared by.

    Full batch: the lemma. Subsampled: from the better of uniform noise and the lemma's shape on,
    the price of a step is taken around the current schedule, the best schedule at these prices is
    scaled onto the budget by the certified accountant, and so on until nothing is gained.
    """
    q = influence
    if not isinstance(sampling_rate, float):
        per_mean = q / sampling_rate**2
        shapes = (np.ones_like(q), sampling_rate, schedules.optimal_shape(per_mean))
        scaled = [calibrate(shape, budget, sampling_rate) for shape in shapes]
        return min(scaled, key=lambda sigmas: float(np.sum(per_mean * sigmas**2)))
    if sampling_rate == 1:
        return schedules.optimal(q, budget.R)
    starts = (np.ones_like(q), schedules.optimal_shape(q))
    candidates = [calibrate(shape, budget, sampling_rate) for shape in starts]
    best = min(candidates, key=lambda sigmas: float(np.sum(q * sigmas**2)))
    noise = float(np.sum(q * best**2))
    for _ in range(_ROUNDS):
        try:
            price = price_curve(best, budget.delta, sampling_rate)
            spent = float(np.sum(price(best)))
            shape = schedules.priced(q, price, spent, sigma_range=price.sigma_range)
        except InputError:
            warnings.warn(
                "The price of a step could not be computed around this schedule. The plan takes "
                "the better of uniform noise and the 1/σ² rule, which may not be the best.",
                PlanWarning,
                stacklevel=5,
            )
            break
        sigmas = calibrate(shape, budget, sampling_rate)
        left = float(np.sum(q * sigmas**2))
        if left < noise:
            best = sigmas
        if left > noise * (1 - _WORTHWHILE):
            break
        noise = left
    return best

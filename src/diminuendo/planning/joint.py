"""The learning rates of a plan that chooses them together with its noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import calibrate
from diminuendo.bounds import runs
from diminuendo.bounds.landscape import Landscape, Quadratic
from diminuendo.budget import Budget
from diminuendo.planning.noise import Schedule

_COARSE = 50
"""Blocks of equal steps in which learning rates for uniform noise are found, to compare with."""


class Together(NamedTuple):
    """Learning rates planned for the noise of a schedule, and for uniform noise to compare with.

    Learning rates are in the plan's unit: 1/M, or one over an eigenvalue where a spectrum is known.
    The biases are what they leave of the start, as shares of the initial excess loss.
    """

    lr: Vector
    bias: float
    lr_uniform: Vector
    bias_uniform: float


def joint_learning_rates(
    loss: Landscape,
    alpha: float,
    steps: int,
    budget: Budget,
    rate: float,
    *,
    schedule: Schedule,
    noise: float,
    max_lr: float | None,
) -> Together:
    """η_1…η_T for the best noise, or for uniform noise where that is the schedule.

    noise   the variance of sampled gradients on each coordinate of the sum, in units of clip²

    Full batch: the price of a step is σ^{−2}. Subsampled: it is about proportional to e^{1/σ²} − 1,
    which around uniform noise falls like σ^{−2k}, k = (1/σ²)/(1 − e^{−1/σ²}).
    """
    _validate.choice(
        "schedule",
        schedule,
        ("optimal", "uniform"),
        remedy='With lr="joint" the noise is planned, too. Give lr yourself beside other noise.',
    )
    problem = runs.joint_problem(loss, alpha, max_lr=max_lr)
    per_noise = alpha * budget.R / rate**2
    variance = steps / budget.R
    if rate < 1:
        sigma = float(calibrate(np.ones(steps), budget, rate)[0])
        variance = sigma**2
        k = sigma**-2 / -math.expm1(-(sigma**-2))
        problem = replace(
            problem,
            alpha=per_noise * sigma**2 * steps ** (-1 / k),
            sampling=per_noise * noise,
            power=k / (k + 1),
        )
    even = replace(problem, alpha=0.0, sampling=per_noise * (variance + noise))
    if schedule == "uniform":
        solution = beside = even.solve(steps)
    else:
        solution, beside = problem.solve(steps), even.solve(steps, blocks=_COARSE)
    unit = float(loss.eigenvalues.max()) if isinstance(loss, Quadratic) else 1.0
    return Together(solution / unit, problem.bias(solution), beside / unit, problem.bias(beside))

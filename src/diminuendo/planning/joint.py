"""The learning rates of a plan that chooses them together with its noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import calibrate
from diminuendo.bounds import runs
from diminuendo.bounds.landscape import Landscape, Quadratic
from diminuendo.budget import Budget


def joint_learning_rates(
    loss: Landscape,
    alpha: float,
    steps: int,
    budget: Budget,
    rate: float,
    *,
    noise: float,
    max_lr: float | None,
) -> Vector:
    """η_1…η_T in the plan's unit: 1/M, or one over an eigenvalue where a spectrum is known.

    noise   the variance of sampled gradients on each coordinate of the sum, in units of clip²

    Full batch: the price of a step is σ^{−2}. Subsampled: it is about proportional to e^{1/σ²} − 1,
    which around uniform noise falls like σ^{−2k}, k = (1/σ²)/(1 − e^{−1/σ²}).
    """
    problem = runs.joint_problem(loss, alpha, max_lr=max_lr)
    if rate < 1:
        sigma = float(calibrate(np.ones(steps), budget, rate)[0])
        k = sigma**-2 / -math.expm1(-(sigma**-2))
        per_noise = alpha * budget.R / rate**2
        problem = replace(
            problem,
            alpha=per_noise * sigma**2 * steps ** (-1 / k),
            sampling=per_noise * noise,
            power=k / (k + 1),
        )
    solution = problem.solve(steps)
    if isinstance(loss, Quadratic):
        return np.asarray(solution / float(loss.eigenvalues.max()))
    return solution

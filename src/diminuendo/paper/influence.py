"""The influence that a study plans with: measured by retraining on auxiliary data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.measuring.retraining import ExponentialFit, MeasuredInfluence, measure
from diminuendo.replicas.engine import Model
from diminuendo.tuning.auxiliary import Labelled


def around_uniform(
    model: Model,
    data: Labelled,
    budget: Budget,
    *,
    steps: int,
    points: int,
    repeats: int,
    beta: float = 0.0,
    lr: float = 0.1,
    clip: float = 4.0,
    device: str | None = None,
    progress: bool = True,
) -> MeasuredInfluence:
    """The influence of a run whose noise is uniform, in the paper's setting."""
    return measure(
        model,
        data,
        source="auxiliary",
        sigmas=np.full(steps, np.sqrt(steps / budget.R)),
        lr=lr,
        clip=clip,
        beta=beta,
        steps=points,
        repeats=repeats,
        device=device,
        progress=progress,
    )


def curve(measured: MeasuredInfluence, beta: float) -> Callable[[int], Vector] | None:
    """q_1…q_T for any T: rising for gradient descent, as it was measured with momentum.

    None where too few steps hurt for a curve: noise can also help early on, and no schedule
    follows from that.
    """
    if _fit(measured) is None:
        return None
    return lambda steps: measured.curve(steps, fit="measured" if beta > 0 else "monotone")


def _fit(measured: MeasuredInfluence) -> ExponentialFit | None:
    try:
        return measured.exponential()
    except InputError:
        return None


def facts(measured: MeasuredInfluence) -> dict[str, Any]:
    """For pages and files: the points with their 95% half-widths, and the exponential fit."""
    fit = _fit(measured)
    low, high = measured.interval
    return {
        "steps": measured.steps.tolist(),
        "mean": measured.mean.tolist(),
        "half": ((high - low) / 2).tolist(),
        "total": measured.total_steps,
        "gamma": None if fit is None else fit.gamma,
        "gamma_low": None if fit is None else fit.low,
        "gamma_high": None if fit is None else fit.high,
        "r_squared": None if fit is None else fit.r_squared,
    }

"""The influence curves that a reproduction plans with, measured on auxiliary data."""

from __future__ import annotations

from typing import Any

import numpy as np

from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.measuring.result import ExponentialFit, MeasuredInfluence
from diminuendo.measuring.retraining import measure
from diminuendo.paper.results import InfluenceCurve
from diminuendo.replicas.replica import Model
from diminuendo.tuning.auxiliary import Labelled
from diminuendo.tuning.space import CurveOf


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
    """The influence in a run with uniform noise, at `points` of its steps, as the paper has it."""
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


def curve_of(measured: MeasuredInfluence, beta: float) -> CurveOf | None:
    """A function that gives q_1…q_T for any T: rising for gradient descent, as measured with
    momentum.

    None where the influence is positive at too few steps: early noise can also lower the final
    loss, and no schedule follows from that.
    """
    if _fit(measured) is None:
        return None
    return lambda steps: measured.curve(steps, fit="measured" if beta > 0 else "monotone")


def _fit(measured: MeasuredInfluence) -> ExponentialFit | None:
    try:
        return measured.exponential()
    except InputError:
        return None


def summary(measured: MeasuredInfluence, task: str, momentum: float) -> InfluenceCurve:
    """The measured points with their 95% half-widths, and the exponential fit."""
    fit = _fit(measured)
    low, high = measured.interval
    fitted: dict[str, Any] = dict.fromkeys(("gamma", "gamma_low", "gamma_high", "r_squared"))
    if fit is not None:
        fitted = {
            "gamma": fit.gamma,
            "gamma_low": fit.low,
            "gamma_high": fit.high,
            "r_squared": fit.r_squared,
        }
    return InfluenceCurve(
        task=task,
        momentum=momentum,
        steps=measured.steps.tolist(),
        mean=measured.mean.tolist(),
        half=((high - low) / 2).tolist(),
        total=measured.total_steps,
        **fitted,
    )

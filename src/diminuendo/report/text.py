"""A plan in words, with its noise as a small drawing."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal

import numpy as np
from numpy.typing import ArrayLike

from diminuendo._validate import Vector
from diminuendo.planning import Plan

_BARS = "▁▂▃▄▅▆▇█"


def drawing(values: ArrayLike, *, width: int = 48) -> str:
    """A curve as a line of bars, at most `width` long, from zero to its largest value."""
    curve: Vector = np.asarray(values, dtype=np.float64)
    if curve.size > width:
        curve = curve[np.linspace(0, curve.size - 1, width).round().astype(int)]
    heights = np.ceil(curve / curve.max() * len(_BARS)).astype(int) - 1
    return "".join(_BARS[max(h, 0)] for h in heights)


def number(value: float) -> str:
    """Four significant digits, as people write them."""
    return f"{value:.4g}"


def plan_summary(plan: Plan) -> str:
    budget, sigmas = plan.budget, plan.sigmas
    least, most = plan.rates.min(), plan.rates.max()
    rate = f"{least:g}" if least == most else f"{least:g} to {most:g}, step by step"
    batch = "full batch" if least == 1 else f"Poisson rate {rate}"
    lines = [
        f"Plan: {plan.steps} steps, {plan.schedule} schedule, {batch}, clip {plan.clip:g}",
        f"  noise σ      {drawing(sigmas)}  {number(sigmas[0])} → {number(sigmas[-1])}",
        f"  privacy      ε = {rounded_up(plan.epsilon)} of {budget.epsilon:g} at δ = "
        f"{budget.delta:g} ({budget.relation}, {budget.conversion} conversion)",
        f"  excess risk  ERUB {number(plan.erub)}, with uniform noise {number(plan.erub_uniform)}"
        f" in {plan.uniform_steps} steps",
        f"  noise        {number(plan.noise_ratio)} × what uniform noise of the same length "
        "leaves in the final loss",
        f"  digest       {plan.digest[:23]}…",
        "Assumptions:",
    ]
    return "\n".join(lines + [f"  - {assumption}" for assumption in plan.assumptions])


def rounded_up(epsilon: float) -> str:
    """Six digits, never below the value: a claim must not shrink in print."""
    digits = Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(epsilon))
    return f"{digits.normalize():f}" if 1e-4 < epsilon < 1e9 else f"{digits.normalize():e}"

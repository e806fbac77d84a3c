"""A shape, scaled onto a budget: the least noise whose certified ε is not above the target."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.accounting import gaussian
from diminuendo.accounting.account import check_rates, epsilon
from diminuendo.budget import Budget
from diminuendo.errors import InputError

_TOLERANCE = 5e-5
_SIGMA_RANGE = (0.05, 1e7)


def calibrate(shape: ArrayLike, budget: Budget, sampling_rate: ArrayLike = 1.0) -> Vector:
    """σ = c·shape with ε(σ) ≤ budget.epsilon, and within 1e-4 of it (relative).

    Full batch: exact, by the budget's own conversion. Subsampled: by bracketing on the certified
    ε, ending on the private side; a conversion other than "exact" does not apply there.
    """
    unit = _validate.vector("shape", shape)
    rates = check_rates(sampling_rate, unit.size)
    if (rates == 1).all():
        return gaussian.scale_onto(unit, budget.R)
    if budget.conversion != "exact":
        raise InputError(
            '"exact" where steps are subsampled',
            name="conversion",
            value=budget.conversion,
            remedy="The zCDP conversions are for full-batch Gaussian steps.",
        )
    unit = unit / unit.min()

    def excess(log_scale: float) -> float:
        """ln(ε/target), falling in the scale; −1 stands for an ε of zero."""
        spent = epsilon(math.exp(log_scale) * unit, budget.delta, rates, relation=budget.relation)
        return math.log(spent / budget.epsilon) if spent > 0 else -1.0

    return np.asarray(
        math.exp(falling_root(excess, *np.log(_SIGMA_RANGE), name="epsilon", value=budget.epsilon))
        * unit
    )


def falling_root(
    function: Callable[[float], float], lowest: float, highest: float, *, name: str, value: float
) -> float:
    """The x in [lowest, highest] where a falling function comes to zero, on its nonpositive side.

    Steps out from the middle of the range until the sign changes, then closes in by false
    position with halving (Illinois), until function(x) is in [−5e-5, 0] or the bracket is a single
    double wide. Where the sign never changes it raises; it never returns a positive side.
    """
    x = 0.0 if lowest < 0 < highest else (lowest + highest) / 2
    at_x, stride = function(x), 0.5
    low = high = (x, at_x)
    while at_x > 0:
        low, x = (x, at_x), min(x + stride, highest)
        if low[0] == highest:
            raise InputError(
                "reachable with some noise",
                name=name,
                value=value,
                remedy=f"Even σ = {math.exp(highest):.0e} spends more.",
            )
        at_x, stride = function(x), 2 * stride
        high = (x, at_x)
    while low[1] <= 0:
        high, x = (x, at_x), max(x - stride, lowest)
        if high[0] == lowest:
            raise InputError(
                "low enough to call for noise",
                name=name,
                value=value,
                remedy=f"Even σ = {math.exp(lowest):g} spends less.",
            )
        at_x, stride = function(x), 2 * stride
        low = (x, at_x)
    low_weight, high_weight = low[1], high[1] + _TOLERANCE / 2
    while high[1] < -_TOLERANCE and high[0] - low[0] > 1e-15 * max(1.0, abs(high[0])):
        x = (low[0] * high_weight - high[0] * low_weight) / (high_weight - low_weight)
        if not low[0] < x < high[0]:
            x = (low[0] + high[0]) / 2
        at_x = function(x)
        if at_x > 0:
            low, low_weight, high_weight = (x, at_x), at_x + _TOLERANCE / 2, high_weight / 2
        else:
            high, high_weight, low_weight = (x, at_x), at_x + _TOLERANCE / 2, low_weight / 2
    return high[0]

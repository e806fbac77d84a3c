"""What a budget allows with the rest fixed: the least noise, the most steps, the largest rate.

Formal guarantee: the certified ε of what is returned is never above budget.epsilon. Each answer is
found by bracketing on that ε and ends on the private side; where no answer exists it raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.accounting import gaussian
from diminuendo.accounting.account import Releases, check_rates, epsilon
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import InputError

_TOLERANCE = 5e-5
_USUAL_SLOPE, _FIRST_REACH = 1.3, 1e-5
_SIGMA_RANGE = (0.05, 1e7)
_MOST_STEPS = 10**9
_LEAST_RATE = 1e-9


def calibrate(
    shape: ArrayLike, budget: Budget | tuple[float, float], sampling_rate: ArrayLike = 1.0
) -> Vector:
    """Noise multipliers σ = c·shape with ε(σ) ≤ budget.epsilon, and within 1e-4 of it (relative).

    shape           one positive number for each step, in any unit
    budget          a Budget, or the pair (ε, δ)
    sampling_rate   Poisson sampling rate in (0, 1], one for all steps or one for each

    Full batch: exact, by the budget's own conversion. Subsampled: by bracketing on the certified
    ε; a conversion other than "exact" does not apply there.
    """
    unit, budget = _validate.vector("shape", shape), as_budget(budget)
    rates = check_rates(sampling_rate, unit.size)
    if (rates == 1).all():
        return gaussian.scale_onto(unit, budget.R)
    unit = unit / unit.min()
    return calibrate_near(roughly_scaled(unit, budget, rates), budget, rates)


def calibrate_near(sigmas: Vector, budget: Budget, rates: Vector) -> Vector:
    """`calibrate` of subsampled steps whose noise multipliers are about right already."""
    _only_exact(budget)
    least = float(sigmas.min())
    unit = sigmas / least
    low, high = (math.log(sigma) for sigma in _SIGMA_RANGE)

    def solve(terms: Budget, guess: float) -> float:
        return _falling_root(
            lambda log_scale: _excess(math.exp(log_scale) * unit, terms, rates),
            low,
            high,
            guess,
            name="epsilon",
            value=budget.epsilon,
        )

    root = math.log(least)
    if budget.relation == "replace-one":
        root = solve(add_remove_target(budget), root)
    return np.asarray(math.exp(solve(budget, root)) * unit)


def largest_clip_to_noise(
    shape: ArrayLike, budget: Budget | tuple[float, float], sampling_rate: ArrayLike = 1.0
) -> float:
    """The largest clip norm over noise standard deviation, 1/σ, of any step of this shape."""
    return 1 / float(np.min(calibrate(shape, budget, sampling_rate)))


def largest_sampling_rate(sigmas: ArrayLike, budget: Budget | tuple[float, float]) -> float:
    """The largest Poisson rate in (0, 1], one for all steps, at which these σ fit the budget."""
    noise, budget = _validate.vector("sigmas", sigmas), as_budget(budget)
    _only_exact(budget)
    if epsilon(noise, budget.delta, 1.0, relation=budget.relation) <= budget.epsilon:
        return 1.0

    def excess(minus_log_rate: float) -> float:
        return _excess(noise, budget, np.full(noise.size, math.exp(-minus_log_rate)))

    root = _falling_root(
        excess, 1e-9, -math.log(_LEAST_RATE), 2.0, name="sigmas", value=float(noise.min())
    )
    return math.exp(-root)


def most_steps(
    sigma: float, budget: Budget | tuple[float, float], sampling_rate: float = 1.0
) -> int:
    """The largest T for which T steps of noise multiplier σ fit the budget."""
    sigma, budget = _validate.real("sigma", sigma, above=0, at_most=1e12), as_budget(budget)
    rate = float(check_rates(sampling_rate, 1)[0])
    if rate == 1:
        return math.floor(budget.R * sigma**2 * (1 - 1e-12))
    _only_exact(budget)

    def fits(steps: int) -> bool:
        repeated = Releases(np.array([sigma]), np.array([rate]), np.array([float(steps)]))
        return repeated.epsilon(budget.delta, budget.relation) <= budget.epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST_STEPS:
            raise InputError(
                f"small enough that {_MOST_STEPS:,} steps exceed the budget",
                name="sigma",
                value=sigma,
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def add_remove_target(budget: Budget) -> Budget:
    """The add-remove budget that implies this one for subsampled steps; itself for add-remove.

    Replacing is removing and adding: (ε/2, δ/(1 + e^{ε/2})) for one gives (ε, δ) for both.
    """
    if budget.relation == "add-remove":
        return budget
    half = budget.epsilon / 2
    if half > 300:
        raise InputError(
            "at most 600 under replace-one neighbours where steps are subsampled",
            name="epsilon",
            value=budget.epsilon,
        )
    return Budget(epsilon=half, delta=budget.delta / (1 + math.exp(half)))


def _excess(sigmas: Vector, budget: Budget, rates: Vector) -> float:
    """ln(ε/target); −1 stands for an ε of zero, 10 for noise too low to certify any."""
    try:
        spent = epsilon(sigmas, budget.delta, rates, relation=budget.relation)
    except InputError:
        return 10.0
    return math.log(spent / budget.epsilon) if spent > 0 else -1.0


def _only_exact(budget: Budget) -> None:
    if budget.conversion != "exact":
        raise InputError(
            '"exact" where steps are subsampled',
            name="conversion",
            value=budget.conversion,
            remedy="The zCDP conversions are for full-batch Gaussian steps.",
        )


def roughly_scaled(
    unit: Vector, budget: Budget, rates: Vector, counts: Vector | float = 1.0
) -> Vector:
    """c·unit where Σ rate²(e^{1/σ²} − 1), capped by Σ 1/σ², meets μ²: where to start looking."""
    low, high = math.log(_SIGMA_RANGE[0]), math.log(_SIGMA_RANGE[1])
    for _ in range(40):
        middle = (low + high) / 2
        cost = (math.exp(middle) * unit) ** -2.0
        each = np.minimum(rates**2 * np.expm1(np.minimum(cost, 50)), cost)
        spends = float(np.sum(counts * each)) > budget.mu**2
        low, high = (middle, high) if spends else (low, middle)
    return np.asarray(math.exp(high) * unit)


def _falling_root(
    function: Callable[[float], float],
    lowest: float,
    highest: float,
    guess: float,
    *,
    name: str,
    value: Any,
) -> float:
    """The x in [lowest, highest] where a falling function comes to zero, on its nonpositive side.

    Secant steps, kept inside the bracket once the sign has changed and replaced by bisection where
    they leave it or are slow, until function(x) is in [−5e-5, 0] or the bracket is one double
    wide. Raises where the sign never changes.
    """
    x, slope, reach = min(max(guess, lowest), highest), _USUAL_SLOPE, _FIRST_REACH
    low, high = -math.inf, math.inf
    before: tuple[float, float] | None = None
    for attempt in itertools.count():
        at_x = function(x)
        if -_TOLERANCE <= at_x <= 0:
            return x
        low, high = (low, x) if at_x <= 0 else (x, high)
        if high < math.inf and high - low <= 1e-15 * max(1.0, abs(high)):
            return high
        if x == (highest if at_x > 0 else lowest):
            words = ("most", "more") if at_x > 0 else ("least", "less")
            raise InputError(
                "within reach of the budget",
                name=name,
                value=value,
                remedy=f"Even the {words[0]} private setting that was tried spends {words[1]}.",
            )
        if before is not None:
            slope = min(max((before[1] - at_x) / (x - before[0]), 0.1), 20.0)
        before = (x, at_x)
        step = (at_x + _TOLERANCE / 2) / slope
        if math.isinf(high - low):
            step = math.copysign(min(max(abs(step), reach), 2.0), at_x)
            x, reach = min(max(x + step, lowest), highest), 4 * reach
        else:
            x += step
            if not low < x < high or (attempt > 10 and attempt % 2):
                x = (low + high) / 2
    raise AssertionError

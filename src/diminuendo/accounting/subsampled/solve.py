"""From certified delta(epsilon) curves to certified epsilon and delta of a mixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from scipy.optimize import brentq

from diminuendo.accounting.subsampled.estimate import Estimate
from diminuendo.accounting.subsampled.laws import Laws
from diminuendo.accounting.subsampled.nodes import Mixture
from diminuendo.accounting.subsampled.transform import outcome_range

EPSILON_FLOOR = 2e-4
ATTEMPTS = 14
TAIL_SHARE = 1e-6
LOWEST_LOG = -600.0
WORK_BUDGET = 4e9


class Bracket(NamedTuple):
    """Certified enclosure: ``lower <= exact value <= upper``."""

    lower: float
    upper: float


def mixture_epsilon(mixture: Mixture, delta: float, tolerance: float) -> Bracket:
    """Enclose epsilon of the mixture's composition (the worse of the two directions)."""
    log_delta = math.log(delta)
    log_tail = log_delta + math.log(TAIL_SHARE / mixture.total_weight)
    bounds = outcome_range(mixture.mu, mixture.rate, log_tail)
    sides = []
    for remove in (True, False):
        estimate = Estimate(mixture, bounds, remove=remove)
        tilt = estimate.tilt_for_delta(log_delta)
        sides.append((max(estimate.epsilon(tilt), 0.0), tilt, estimate))
    sides.sort(key=lambda side: -side[0])
    worst = Bracket(0.0, 0.0)
    for guess, tilt, estimate in sides:
        found = _solve_side(estimate, guess, tilt, log_delta, tolerance, worst.lower)
        worst = Bracket(max(worst.lower, found.lower), max(worst.upper, found.upper))
    return worst


def _solve_side(
    estimate: Estimate,
    guess: float,
    tilt: float,
    log_delta: float,
    tolerance: float,
    other: float,
) -> Bracket:
    """Enclose epsilon of one direction.

    Refine until the width is small relative to epsilon, or until the upper end is below
    ``other``, what the other direction is known to need.
    """
    best = Bracket(0.0, estimate.largest_loss())
    if best.upper <= other:
        return best
    gaussian = estimate.is_nearly_gaussian(tilt)
    guess = min(guess, best.upper)
    safe = max(guess - 3.0 / tilt, 0.0) if gaussian else 0.0
    shrink = 0.4 if gaussian else 40.0
    spent = 0.0
    for _ in range(ATTEMPTS):
        scale = max(guess, EPSILON_FLOOR)
        width = max(shrink * tolerance * scale, 0.2 * (other - guess))
        laws = Laws(estimate, guess, safe, log_delta, min(width, 0.1 * max(scale, other)))
        upper = _crossing(laws.log_upper, log_delta, guess, laws.tilt, up=True)
        lower = _crossing(laws.log_lower, log_delta, min(guess, upper), laws.tilt, up=False)
        best = Bracket(max(best.lower, lower), min(best.upper, upper))
        gap = best.upper - best.lower
        allowed = tolerance * max(best.upper, EPSILON_FLOOR)
        spent += laws.work
        if gap <= allowed or best.upper <= other or spent > WORK_BUDGET:
            break
        target = other if best.lower < other else best.upper
        if abs(target - guess) <= 0.1 * target:
            if best.lower < 0.5 * best.upper and target > other:
                target = math.sqrt(max(best.lower, other, 0.01 * target) * target)
            elif laws.exhausted:
                break
            shrink *= min(0.5, max(0.5 * allowed / gap, 0.01 if best.lower > 0.9 * target else 0.3))
        guess, safe = target, best.lower
    return best


def _crossing(
    curve: Callable[[float], float], target: float, guess: float, tilt: float, *, up: bool
) -> float:
    """Point >= 0 next to where the decreasing curve meets target, on the certified side.

    ``up``: the value returned has curve <= target.  Otherwise curve >= target there, or it is 0.
    """

    def excess(eps: float) -> float:
        return max(curve(eps) - target, -1e3)

    if up and excess(0.0) <= 0.0:
        return 0.0
    step = max(1.0 / tilt, 1e-6 * guess) * 1e-2
    low, high = guess, guess
    while excess(high) > 0.0:
        low, high, step = high, high + step, 2.0 * step
        if not math.isfinite(high) or high > 1e12:
            raise OverflowError("epsilon is too large to be certified")
    while low > 0.0 and excess(low) <= 0.0:
        high, low, step = low, max(low - step, 0.0), 2.0 * step
    if excess(low) <= 0.0:
        return low
    root = float(brentq(excess, low, high, xtol=1e-9 * high + 1e-300, rtol=1e-12))
    nudge = 1e-9 * high
    while (excess(root) > 0.0) is up and root != (high if up else low):
        root = min(root + nudge, high) if up else max(root - nudge, low)
        nudge *= 2.0
    return root


def mixture_delta(mixture: Mixture, eps: float, tolerance: float) -> Bracket:
    """Enclose delta(eps) of the mixture's composition (the worse of the two directions)."""
    worst = Bracket(0.0, 0.0)
    for remove in (True, False):
        found = _side_delta(mixture, eps, tolerance, remove=remove)
        worst = Bracket(max(worst.lower, found.lower), max(worst.upper, found.upper))
    return worst


def _side_delta(mixture: Mixture, eps: float, tolerance: float, *, remove: bool) -> Bracket:
    log_delta, shrink = -40.0, 0.4
    best = Bracket(-math.inf, 0.0)
    for attempt in range(ATTEMPTS):
        log_tail = max(log_delta, LOWEST_LOG) + math.log(TAIL_SHARE / mixture.total_weight)
        estimate = Estimate(
            mixture, outcome_range(mixture.mu, mixture.rate, log_tail), remove=remove
        )
        if eps >= estimate.largest_loss():
            return Bracket(0.0, 0.0)
        tilt = estimate.tilt_for_epsilon(eps)
        if attempt == 0:
            log_delta = min(estimate.log_delta(tilt), -1e-3)
            continue
        laws = Laws(estimate, eps, eps, max(log_delta, LOWEST_LOG), shrink * tolerance / tilt)
        best = Bracket(max(best.lower, laws.log_lower(eps)), min(best.upper, laws.log_upper(eps)))
        if best.upper - best.lower <= tolerance or best.upper < LOWEST_LOG or laws.exhausted:
            break
        if abs(best.upper - log_delta) < 0.5:
            shrink *= min(0.5, max(0.5 * tolerance / (best.upper - best.lower), 0.01))
        log_delta = best.upper
    return Bracket(math.exp(best.lower), math.exp(best.upper))

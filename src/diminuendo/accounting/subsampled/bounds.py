"""Certified epsilon and delta of composed Poisson-subsampled Gaussian steps.

Step t adds Gaussian noise of standard deviation sigma_t to a query of sensitivity one on a
Poisson sample of rate p_t, count_t times over.  Neighbouring data sets differ by one record;
both directions (the record is removed, the record is added) are composed and the worse counts.
Every bound returned is certified: lower <= exact value <= upper, including rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import erf

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.closed_form import gaussian_epsilon, gaussian_log_delta
from diminuendo.accounting.subsampled.nodes import (
    DIRECT_LIMIT,
    Mixture,
    direct_mixture,
    interpolated_mixture,
    total_variation,
)
from diminuendo.accounting.subsampled.running import running_upper
from diminuendo.accounting.subsampled.solve import (
    EPSILON_FLOOR,
    Bracket,
    mixture_delta,
    mixture_epsilon,
)
from diminuendo.accounting.subsampled.transform import unamplified

NODE_FACTOR = 3.0
LARGEST_MU = 8.0
"""Beyond it total variation is one to rounding, and nodes cannot be told apart."""
MOST_DIRECT = 256
LOWER_SPACING = 0.4
RUNNING_TOLERANCE = 1e-3


class _Steps(NamedTuple):
    """Distinct subsampled steps, with all full-batch steps merged into one Gaussian."""

    mu: Vector
    rate: Vector
    repeats: Vector
    gaussian_variance: float

    @property
    def total_variation(self) -> float:
        """A bound on the total variation of the composition: delta at every epsilon >= 0.

        Total variations of composed steps add up at most; a subsampled step has rate times that
        of its Gaussian.
        """
        each = float(np.sum(self.repeats * self.rate * total_variation(self.mu)))
        each += math.erf(math.sqrt(self.gaussian_variance / 8.0))
        return min(each * (1.0 + 1e-12), 1.0)

    def mixture(self, spacing: float, *, upper: bool) -> Mixture:
        """Direct mixture if there are few distinct steps, else nodes ``spacing`` apart."""
        if self.mu.size > DIRECT_LIMIT and self.mu.max() <= LARGEST_MU:
            mixture = interpolated_mixture(*self, spacing, upper=upper)
            if mixture.mu.size < self.mu.size:
                return mixture
        return direct_mixture(*self)


def epsilon_bounds(
    sigmas: Vector,
    rates: Vector,
    counts: Vector,
    delta: float,
    *,
    tolerance: float = 5e-4,
) -> Bracket:
    """Enclose the smallest epsilon >= 0 for which the composition is (epsilon, delta)-DP.

    The width is at most ``tolerance * max(epsilon, 1e-3)`` unless a work limit is met first;
    the enclosure holds in any case.
    """
    steps = distinct(sigmas, rates, counts)
    exact = _closed_epsilon(steps, delta)
    if exact is not None:
        return exact
    if steps.total_variation <= delta:
        return Bracket(0.0, 0.0)
    spacing = math.sqrt(NODE_FACTOR * tolerance)
    best = Bracket(0.0, math.inf)
    for _ in range(3):
        mixture = steps.mixture(spacing, upper=True)
        found = mixture_epsilon(mixture, delta, tolerance)
        if not mixture.is_direct:
            below = mixture_epsilon(
                steps.mixture(LOWER_SPACING * spacing, upper=False), delta, tolerance
            )
            found = Bracket(below.lower, found.upper)
        best = Bracket(max(best.lower, found.lower), min(best.upper, found.upper))
        excess = (best.upper - best.lower) / (tolerance * max(best.upper, EPSILON_FLOOR))
        if mixture.is_direct or excess <= 1.0:
            return best
        spacing *= max(0.25, 0.9 / math.sqrt(excess))
    if steps.mu.size > MOST_DIRECT:
        return best
    exact = mixture_epsilon(direct_mixture(*steps), delta, tolerance)
    return Bracket(max(best.lower, exact.lower), min(best.upper, exact.upper))


def epsilon_upper(
    sigmas: Vector,
    rates: Vector,
    counts: Vector,
    delta: float,
    *,
    tolerance: float = 5e-4,
) -> float:
    """Certified upper bound on epsilon, at the resolution ``epsilon_bounds`` starts with."""
    steps = distinct(sigmas, rates, counts)
    exact = _closed_epsilon(steps, delta)
    if exact is not None:
        return exact.upper
    if steps.total_variation <= delta:
        return 0.0
    mixture = steps.mixture(math.sqrt(NODE_FACTOR * tolerance), upper=True)
    return mixture_epsilon(mixture, delta, tolerance).upper


def distinct(sigmas: Vector, rates: Vector, counts: Vector) -> _Steps:
    """Merge equal steps; merge all full-batch steps into one Gaussian."""
    full = rates >= 1.0
    repeat = counts.astype(np.float64)
    variance = math.fsum(repeat[full] / sigmas[full] ** 2)
    active = ~full & (repeat > 0.0)
    pairs, index = np.unique(
        np.stack([sigmas[active], rates[active]], axis=1), axis=0, return_inverse=True
    )
    count = np.zeros(pairs.shape[0])
    np.add.at(count, index.ravel(), repeat[active])
    return _Steps(1.0 / pairs[:, 0], pairs[:, 1], count, variance * (1.0 + 1e-15))


def delta_bounds(
    sigmas: Vector,
    rates: Vector,
    counts: Vector,
    epsilon: float,
    *,
    tolerance: float = 5e-3,
) -> Bracket:
    """Enclose the smallest delta for which the composition is (epsilon, delta)-DP.

    The width is at most about ``tolerance`` relative to delta unless a work limit is met first
    or delta is below 1e-250; the enclosure holds in any case.
    """
    steps = distinct(sigmas, rates, counts)
    exact = _closed_delta(steps, epsilon)
    if exact is not None:
        return exact
    spacing = math.sqrt(NODE_FACTOR * 5e-4)
    best = Bracket(0.0, steps.total_variation)
    for _ in range(3):
        mixture = steps.mixture(spacing, upper=True)
        found = mixture_delta(mixture, epsilon, tolerance)
        if not mixture.is_direct:
            below = mixture_delta(
                steps.mixture(LOWER_SPACING * spacing, upper=False), epsilon, tolerance
            )
            found = Bracket(below.lower, found.upper)
        best = Bracket(max(best.lower, found.lower), min(best.upper, found.upper))
        if mixture.is_direct or best.upper - best.lower <= tolerance * best.upper:
            break
        spacing *= 0.5
    return best


def running_epsilon(sigmas: Vector, rates: Vector, delta: float) -> Vector:
    """Certified upper bound on epsilon after each of the steps 1..T, in the order given."""
    full = rates >= 1.0
    variance = np.cumsum(np.where(full, 1.0 / sigmas**2, 0.0)) * (1.0 + 1e-12)
    pairs, index = np.unique(
        np.stack([sigmas[~full], rates[~full]], axis=1), axis=0, return_inverse=True
    )
    steps = _Steps(1.0 / pairs[:, 0], pairs[:, 1], np.ones(pairs.shape[0]), 0.0)
    mixture = steps.mixture(math.sqrt(NODE_FACTOR * RUNNING_TOLERANCE), upper=True)
    row = np.full(sigmas.size, -1, dtype=np.int64)
    row[~full] = index.ravel()
    ahead = int(np.argmin(full))
    leading = [gaussian_epsilon(delta, math.sqrt(v))[1] for v in variance[:ahead]]
    if ahead == 0:
        leading.append(epsilon_upper(sigmas[:1], rates[:1], np.ones(1), delta))
    upper = running_upper(mixture, row, variance, np.array(leading), delta, RUNNING_TOLERANCE)
    each = np.where(full, 0.0, rates * total_variation(1.0 / sigmas))
    spread = (np.cumsum(each) + erf(np.sqrt(variance / 8.0))) * (1.0 + 1e-9)
    return np.where(spread <= delta, 0.0, upper)


def _closed_epsilon(steps: _Steps, delta: float) -> Bracket | None:
    """Exact answer for full-batch steps alone and for one subsampled step alone.

    For a single subsampled step and epsilon >= 0 removing a record is the worse direction,
    with delta(epsilon) = p delta_G(log(1 + (e^epsilon - 1)/p)).
    """
    if steps.mu.size == 0:
        mu = math.sqrt(steps.gaussian_variance)
        low, high = gaussian_epsilon(delta, mu) if mu > 0.0 else (0.0, 0.0)
        return Bracket(low * (1.0 - 1e-12), high * (1.0 + 1e-12))
    if steps.gaussian_variance > 0.0 or steps.repeats.sum() != 1.0:
        return None
    rate = float(steps.rate[0])
    if delta >= rate:
        return Bracket(0.0, 0.0)
    inner = gaussian_epsilon(delta / rate, float(steps.mu[0]))
    low, high = (_amplified(value, rate) for value in inner)
    return Bracket(low * (1.0 - 1e-12), high * (1.0 + 1e-12))


def _amplified(eps: float, rate: float) -> float:
    """log(1 + rate (e^eps - 1)) without overflow."""
    if eps > 30.0:
        return eps + math.log(rate) + math.log1p((1.0 - rate) / rate * math.exp(-eps))
    return math.log1p(rate * math.expm1(eps))


def _closed_delta(steps: _Steps, epsilon: float) -> Bracket | None:
    """Exact delta where ``_closed_epsilon`` is exact."""
    if steps.mu.size == 0:
        mu = math.sqrt(steps.gaussian_variance)
        if mu == 0.0:
            return Bracket(0.0, 0.0)
        low = gaussian_log_delta(epsilon, mu * (1.0 - 1e-14))[0]
        return Bracket(math.exp(low), math.exp(gaussian_log_delta(epsilon, mu)[1]))
    if steps.gaussian_variance > 0.0 or steps.repeats.sum() != 1.0:
        return None
    rate = float(steps.rate[0])
    inner = float(unamplified(epsilon, steps.rate)[0])
    low = gaussian_log_delta(inner * (1.0 + 1e-13), float(steps.mu[0]))[0]
    high = gaussian_log_delta(inner * (1.0 - 1e-13), float(steps.mu[0]))[1]
    return Bracket(rate * math.exp(low) * (1.0 - 1e-12), rate * math.exp(high) * (1.0 + 1e-12))

"""The best schedule when a step's price is not 1/σ²: Poisson subsampling.

Minimise Σ_t q_t σ_t² subject to Σ_t price(σ_t) ≤ budget. For a price that is convex in s = σ² the
problem is convex, and at its solution every step has the same exchange rate: q_t = −λ·price'(s_t).
So one number λ decides everything: the marginal price is inverted from a table, and λ is found by
bracketing; once on a coarse table of all σ, and again on a fine one of the σ that occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import CubicSpline
from scipy.optimize import brentq

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError

Price = Callable[[Vector], Vector]
"""What one step costs at noise multiplier σ, for an array of σ; decreasing, convex in σ²."""

SIGMA_RANGE = (0.05, 1e6)
_NODES = 1000
_FEWEST = 50
_NEWTON_STEPS = 3


def _longest(falls: NDArray[np.bool_]) -> slice:
    """The longest stretch of nodes between which something falls all the way."""
    breaks = np.concatenate(([-1], np.flatnonzero(~falls), [falls.size]))
    best = int(np.argmax(np.diff(breaks)))
    return slice(int(breaks[best]) + 1, int(breaks[best + 1]) + 1)


class _Market:
    """A price curve, tabulated as ln price against x = ln σ², with its marginal price."""

    def __init__(self, price: Price, low: float, high: float) -> None:
        self.x = np.linspace(low, high, _NODES)
        costs = np.asarray(price(np.exp(self.x / 2)), dtype=np.float64)
        usable = np.isfinite(costs) & (costs > 1e-280)
        self.x, log_cost = self.x[usable], np.log(costs[usable])
        if self.x.size > _FEWEST:
            self.log_price = CubicSpline(self.x, log_cost)
            self.slope = self.log_price.derivative()
            self.curvature = self.slope.derivative()
            stretch = _longest(np.diff(self.log_marginal(self.x)) < 0)
            self.x = self.x[stretch]
            self.log_marginals = self.log_marginal(self.x)
        if self.x.size <= _FEWEST:
            raise InputError(
                "a positive, decreasing function of σ, convex in σ²",
                name="price",
                value=price,
                remedy="The price 1/σ², and any Rényi divergence of whole order, qualify.",
            )

    def log_marginal(self, x: Vector) -> Vector:
        """ln(−d price/ds) at s = e^x."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.log_price(x) - x + np.log(-self.slope(x)))

    def at_exchange_rate(self, log_q: Vector, log_rate: float) -> Vector:
        """The x_t at which the marginal price is q_t/λ, λ = e^log_rate."""
        wanted = log_q - log_rate
        x = np.interp(-wanted, -self.log_marginals, self.x)
        for _ in range(_NEWTON_STEPS):
            slope = self.slope(x)
            step = (self.log_marginal(x) - wanted) / (slope - 1 + self.curvature(x) / slope)
            x = np.clip(x - step, self.x[0], self.x[-1])
        return np.asarray(x)

    def total(self, x: Vector, counts: Vector) -> float:
        return float(np.sum(counts * np.exp(self.log_price(x))))


def priced(
    influence: ArrayLike,
    price: Price,
    budget: float,
    *,
    sigma_range: tuple[float, float] = SIGMA_RANGE,
) -> Vector:
    """σ_t minimising Σ q_t σ_t² with Σ price(σ_t) = budget, to 1e-8.

    With price(σ) = 1/σ² and budget R this is the lemma's schedule. The result is a shape for
    planning: what is *claimed* for it comes from the accountant.
    """
    values, inverse, counts = np.unique(
        _validate.vector("influence", influence), return_inverse=True, return_counts=True
    )
    budget = _validate.positive("budget", budget)
    log_q, weights = np.log(values), counts.astype(np.float64)
    low, high = 2 * math.log(sigma_range[0]), 2 * math.log(sigma_range[1])
    rough = _solve(_Market(price, low, high), log_q, weights, budget)
    fine = _Market(price, max(rough.min() - 0.1, low), min(rough.max() + 0.1, high))
    return np.asarray(np.exp(_solve(fine, log_q, weights, budget) / 2)[inverse])


def _solve(market: _Market, log_q: Vector, weights: Vector, budget: float) -> Vector:
    """x_t = ln σ_t² at the one exchange rate that spends the budget."""

    def excess(log_rate: float) -> float:
        return math.log(market.total(market.at_exchange_rate(log_q, log_rate), weights) / budget)

    lowest = float(log_q[-1] - market.log_marginals[0])
    highest = float(log_q[0] - market.log_marginals[-1])
    if lowest > highest or excess(lowest) < 0 or excess(highest) > 0:
        raise InputError(
            "reachable with every σ in the range of the price curve",
            name="budget",
            value=budget,
            remedy="Change the number of steps or the budget.",
        )
    log_rate = float(brentq(excess, lowest, highest, xtol=1e-13, rtol=1e-14))
    return market.at_exchange_rate(log_q, log_rate)

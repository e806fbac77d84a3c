"""Poisson-subsampled Gaussian steps: for now the Rényi bound, certified and loose."""

from __future__ import annotations

import math

from diminuendo.accounting import renyi
from diminuendo.accounting.renyi import Vector
from diminuendo.accounting.renyi import epsilon as epsilon_upper


def delta_upper(sigmas: Vector, rates: Vector, counts: Vector, epsilon: float) -> float:
    """The smallest δ at which the Rényi bound is at most ε, by bisection in ln δ."""
    low, high = -700.0, 0.0
    for _ in range(100):
        middle = (low + high) / 2
        fits = renyi.epsilon(sigmas, rates, counts, math.exp(middle)) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return math.exp(high)


__all__ = ["delta_upper", "epsilon_upper"]

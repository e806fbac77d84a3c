"""Full-batch Gaussian steps: the closed form, exact for any schedule.

Gaussian steps with Σ_t (Δ/σ_t)² = μ² compose to exactly μ-Gaussian differential privacy (Dong,
Roth and Su 2022), even where each σ_t is chosen after seeing the earlier releases (Smith and
Thakurta 2022). So the whole schedule is known by one number, R = Σ_t 1/σ_t².
"""

from __future__ import annotations

import math

import numpy as np

from diminuendo._validate import Vector
from diminuendo.budget import gaussian_delta
from diminuendo.errors import InputError

_MARGIN = 1e-12
"""Above the rounding error of T divisions and one pairwise sum, for any T that fits in memory."""


def spent(sigmas: Vector) -> float:
    """An upper bound on Σ_t 1/σ_t²."""
    return float(np.sum(sigmas**-2.0)) * (1 + _MARGIN)


def scale_onto(shape: Vector, R: float) -> Vector:
    """σ = c·shape with Σ_t 1/σ_t² ≤ R, and within 1e-11 of it.

    The shape is first divided by its smallest value, so that neither its unit nor its range can
    overflow the sum.
    """
    with np.errstate(over="ignore"):
        unit = shape / shape.min()
    if not np.isfinite(unit).all():
        raise InputError("of a range that doubles can hold", name="shape", value=float(shape.min()))
    scale = math.sqrt(spent(unit) / R) * (1 + _MARGIN)
    return np.asarray(unit * scale)


def running_epsilon(sigmas: Vector, delta: float) -> Vector:
    """An upper bound on ε at δ after each step, by bisection on all steps at once."""
    drift = 1 + 1e-11 + 2.3e-16 * np.arange(1, sigmas.size + 1)
    mu = np.sqrt(np.cumsum(sigmas**-2.0) * drift)
    low = np.zeros_like(mu)
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-12
    high = np.where(gaussian_delta(low, mu) <= delta, 0.0, high)
    for _ in range(60):
        middle = (low + high) / 2
        private = gaussian_delta(middle, mu) <= delta
        low, high = np.where(private, low, middle), np.where(private, middle, high)
    return np.asarray(np.maximum.accumulate(high) * (1 + 1e-10))

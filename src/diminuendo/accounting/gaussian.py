"""Full-batch Gaussian steps: the closed form, exact for any schedule.

Gaussian steps with Σ_t (Δ/σ_t)² = μ² compose to exactly μ-Gaussian differential privacy (Dong,
Roth and Su 2022), even where each σ_t is chosen after seeing the earlier releases (Smith and
Thakurta 2022). So the whole schedule is known by one number, R = Σ_t 1/σ_t².
"""

from __future__ import annotations

import math

import numpy as np

from diminuendo._validate import Vector

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
    unit = shape / shape.min()
    scale = math.sqrt(spent(unit) / R) * (1 + _MARGIN)
    return np.asarray(unit * scale)

"""The influence on a quadratic, exact from its Hessian's eigenvalues."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.influence.closed_forms import FLOOR


def spectrum(
    eigenvalues: ArrayLike,
    *,
    steps: int,
    weights: ArrayLike | None = None,
    step_size: float = 1.0,
) -> Vector:
    """q_t = s²·mean_i (λ_i/M)(1 − sλ_i/M)^{2(T−t)}, M = max λ_i, η = s/M with s < 2.

    Exact for a quadratic: noise of variance v on each coordinate in step t adds
    ½ Σ_i λ_i η² (1−ηλ_i)^{2(T−t)}·v to the final loss. `weights` turn the mean into a weighted
    one, for a spectrum given as a density.

    Costs one matrix product: with B ≈ √T, the power 2(jB + r) splits into two factors.
    """
    values = _validate.vector("eigenvalues", eigenvalues, positive=False)
    steps = _validate.count("steps", steps)
    size = _validate.real("step_size", step_size, above=0, below=2, remedy="In units of 1/M.")
    largest = _validate.positive(
        "max(eigenvalues)", values.max(), remedy="A flat loss has no influence to plan with."
    )
    shares = np.ones_like(values) if weights is None else _validate.vector("weights", weights)
    _validate.same_length("weights", shares, "eigenvalues", values)
    scaled = values / largest
    block = math.isqrt(steps - 1) + 1
    squared = (1 - size * scaled) ** 2
    within = squared[:, None] ** np.arange(block)
    between = (squared**block)[:, None] ** np.arange(-(-steps // block))
    mass = size**2 * shares / shares.sum() * scaled
    ages = np.asarray((between * mass[:, None]).T @ within).ravel()[:steps]
    return np.asarray(np.maximum(ages[::-1], FLOOR))

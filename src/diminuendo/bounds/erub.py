"""ERUB for gradient descent, for any schedule, and at its uniform and best dynamic one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate


def noise_level(
    *, parameters: int, clip: float, smoothness: float, examples: int, R: float, gap: float
) -> float:
    """α = D G² / (2 R M N² (f(θ₁) − f*)): the paper's summary of dimension, data and budget."""
    level = (
        _validate.count("parameters", parameters)
        * _validate.real("clip", clip, above=0, at_most=1e100) ** 2
        / (2 * _validate.positive("R", R) * _validate.positive("smoothness", smoothness))
        / (_validate.count("examples", examples) ** 2 * _validate.positive("gap", gap))
    )
    return _validate.positive(
        "alpha", level, remedy="Are clip, smoothness and gap in a sensible unit?"
    )


def weighted_noise(influence: ArrayLike, sigmas: ArrayLike) -> float:
    """Σ_t q_t σ_t²: what every bound charges for noise, up to its factor."""
    weights, noise = _validate.vector("influence", influence), _validate.vector("sigmas", sigmas)
    _validate.same_length("influence", weights, "sigmas", noise)
    return float(np.sum(weights * noise**2))


def gradient_descent_uniform(*, gamma: float, alpha: float, steps: int) -> float:
    """γ^T + ακ(1−γ^T)T, κ = 1/(1−γ): theorem "excess loss" at σ_t² = T/R."""
    gamma, alpha, steps = _check(gamma, alpha, steps)
    decay = float(gamma**steps)
    return float(decay + alpha * (1 - decay) / (1 - gamma) * steps)


def gradient_descent_dynamic(*, gamma: float, alpha: float, steps: int) -> float:
    """γ^T + α((1−γ^{T/2})/(1−√γ))²: the same at the lemma's schedule."""
    gamma, alpha, steps = _check(gamma, alpha, steps)
    return (
        float(gamma**steps)
        + alpha * ((1 - math.pow(gamma, steps / 2)) / (1 - math.sqrt(gamma))) ** 2
    )


def quadratic(
    eigenvalues: ArrayLike,
    *,
    influence: ArrayLike,
    sigmas: ArrayLike,
    alpha: float,
    R: float,
    step_size: float = 1.0,
) -> float:
    """Worst-start bias plus the exact noise of a quadratic: max_i (1−sλ_i/M)^{2T} + αRΣq_tσ_t²."""
    values = _validate.vector("eigenvalues", eigenvalues, positive=False)
    scaled = values[values > 0] / values.max()
    noise = np.asarray(sigmas, dtype=np.float64)
    bias = float(np.max((1 - step_size * scaled) ** (2.0 * noise.size)))
    return bias + alpha * R * weighted_noise(influence, noise)


def order_of_uniform(*, kappa: float, alpha: float) -> float:
    """κ²/(κ + 1/α)·ln(1 + 1/(κα)): the least uniform ERUB up to constants, as printed."""
    return kappa**2 / (kappa + 1 / alpha) * math.log1p(1 / (kappa * alpha))


def order_of_dynamic(*, kappa: float, alpha: float) -> float:
    """κ²/(κ² + 1/α): the least dynamic ERUB up to constants, as printed."""
    return kappa**2 / (kappa**2 + 1 / alpha)


def _check(gamma: float, alpha: float, steps: int) -> tuple[float, float, int]:
    return (
        _validate.real("gamma", gamma, at_least=0, below=1),
        _validate.positive("alpha", alpha),
        _validate.count("steps", steps),
    )

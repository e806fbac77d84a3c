"""Rényi divergence of Poisson-subsampled Gaussian steps: additive over steps, looser than exact.

Add-or-remove neighbours. For whole orders a the divergence has a finite sum (Mironov, Talwar and
Zhang 2019), and the direction written here is the larger one. Additive means: usable as the
*price* of a step when a schedule is optimised, and in filters that decide step by step.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

from diminuendo._validate import Vector

ORDERS: tuple[int, ...] = (*range(2, 65), *range(66, 129, 2), *range(136, 257, 8), 320, 384, 512)
_MARGIN = 1e-10


def divergence(order: int, sigmas: Vector, rate: float) -> Vector:
    """An upper bound on the Rényi divergence of whole `order` of one step, for each σ.

    ln(1 + Σ_{k≥2} C(a,k) p^k (1−p)^{a−k} (e^{k(k−1)/(2σ²)} − 1)) / (a−1): the usual sum with its
    first two terms taken out, so that nothing cancels when the divergence is tiny. As a function
    of 1/σ² it is a log-sum-exp of linear functions, hence convex, and so it is in σ².
    """
    if rate == 1.0:
        return order / 2 * sigmas**-2.0 * (1 + _MARGIN)
    k = np.arange(2, order + 1.0)
    log_weight = (
        gammaln(order + 1)
        - gammaln(k + 1)
        - gammaln(order - k + 1)
        + k * math.log(rate)
        + (order - k) * math.log1p(-rate)
    )
    # Rounded up where it would underflow to 0.
    exponent = np.maximum(0.5 * k * (k - 1) * sigmas[:, None] ** -2.0, np.finfo(float).tiny)
    log_terms = log_weight + exponent + np.log(-np.expm1(-exponent))
    total = np.asarray(logsumexp(log_terms, axis=1))
    return np.asarray(np.logaddexp(0.0, total)) / (order - 1) * (1 + _MARGIN)


def offset(order: int, delta: float) -> float:
    """What the conversion to (ε, δ) adds at this order (Canonne, Kamath and Steinke 2020)."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def divergences(sigmas: Vector, rates: Vector, counts: Vector) -> Vector:
    """The composition's divergence at each of ORDERS."""
    totals = np.zeros(len(ORDERS))
    for rate in np.unique(rates):
        chosen = rates == rate
        for i, order in enumerate(ORDERS):
            one = divergence(order, sigmas[chosen], float(rate))
            totals[i] += float(np.sum(counts[chosen] * one))
    return totals


def epsilon(sigmas: Vector, rates: Vector, counts: Vector, delta: float) -> float:
    """An upper bound on ε at δ: the best of ORDERS."""
    offsets = np.array([offset(order, delta) for order in ORDERS])
    return max(float(np.min(divergences(sigmas, rates, counts) + offsets)), 0.0)

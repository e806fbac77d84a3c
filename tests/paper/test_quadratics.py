"""Simulated excess risk equals its closed form and stays below its bound."""

from __future__ import annotations

import numpy as np

import diminuendo as dim
from diminuendo.paper import quadratics


def test_excess_risk_is_below_its_bound_and_dynamic_below_uniform() -> None:
    rows = quadratics.compare(dim.Budget(epsilon=4, delta=1e-8), counts=(50, 500), repeats=400)
    assert all(row.measured - row.half <= row.bound for row in rows)
    for uniform, dynamic in zip(rows[::2], rows[1::2], strict=True):
        assert dynamic.bound < uniform.bound


def test_simulated_risk_is_the_closed_form() -> None:
    """E f = ½ Σ λ(…): bias (1−λ/M)^{2T} and the noise of each step; 5 standard errors."""
    problem = quadratics.PROBLEMS[1]
    sigmas = np.linspace(20, 5, 30)
    risk = quadratics.measured(problem, sigmas, clip=1.0, examples=100, repeats=4000)
    shrink = 1 - problem.eigenvalues / problem.M
    bias = shrink**60 * problem.start**2
    ages = np.arange(29, -1, -1)
    noise = (shrink[:, None] ** (2 * ages) * (sigmas / 100 / problem.M) ** 2).sum(1)
    exact = 0.5 * np.sum(problem.eigenvalues * (bias + noise)) / problem.gap
    assert abs(risk.mean - exact) < 2.6 * risk.half

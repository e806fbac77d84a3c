# mypy: allow-untyped-defs, allow-incomplete-defs
"""Schedules land on the budget, and the best one is the best one."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

import diminuendo as dim
from diminuendo import influence, schedules
from diminuendo.accounting import renyi
from diminuendo.schedules import shapes

positive = st.floats(1e-6, 1e6)
vectors = st.lists(positive, min_size=1, max_size=40)


def exact_sum(sigmas: np.ndarray) -> Fraction:
    return sum((1 / Fraction(float(s)) ** 2 for s in sigmas), Fraction(0))


@given(q=vectors, R=st.floats(1e-8, 1e4))
def test_lands_on_the_budget_in_exact_arithmetic(q: list[float], R: float) -> None:
    for sigmas in (
        schedules.optimal(q, R),
        schedules.uniform(len(q), R),
        schedules.onto_budget(q, R),
    ):
        total = exact_sum(sigmas)
        assert total <= Fraction(R)
        assert total >= Fraction(R) * (1 - Fraction(1, 10**9))


@given(q=vectors, R=st.floats(1e-3, 1e2))
def test_lemma(q: list[float], R: float) -> None:
    """σ_t² = (1/R) Σ_i √(q_i/q_t), and R Σ q_t σ_t² = (Σ √q_t)²."""
    sigmas, roots = schedules.optimal(q, R), np.sqrt(q)
    np.testing.assert_allclose(sigmas**2, roots.sum() / roots / R, rtol=1e-9)
    assert R * np.sum(q * sigmas**2) == pytest.approx(roots.sum() ** 2, rel=1e-9)


@given(q=vectors)
def test_gain_over_uniform(q: list[float]) -> None:
    difference = len(q) * np.sum(q) - np.sum(np.sqrt(q)) ** 2
    assert schedules.gain_over_uniform(q) == pytest.approx(
        max(difference, 0), rel=1e-6, abs=1e-9 * len(q) * np.sum(q)
    )


@pytest.mark.parametrize("seed", range(5))
def test_lemma_against_a_numerical_optimiser(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, R = rng.uniform(0.01, 1, 12), 0.5
    start = np.full(12, np.sqrt(12 / R))
    found = minimize(  # type: ignore[call-overload]
        lambda s: np.sum(q * s**2),
        start,
        jac=lambda s: 2 * q * s,
        constraints={
            "type": "eq",
            "fun": lambda s: np.sum(s**-2.0) - R,
            "jac": lambda s: -2 * s**-3.0,
        },
        method="SLSQP",
        options={"maxiter": 2000, "ftol": 1e-14},
    )
    best = np.sum(q * schedules.optimal(q, R) ** 2)
    assert best <= found.fun * (1 + 1e-9)
    np.testing.assert_allclose(schedules.optimal(q, R), found.x, rtol=1e-3)


@given(q=vectors, seed=st.integers(0, 2**32), size=st.floats(1e-4, 2))
def test_no_perturbation_on_the_budget_surface_does_better(
    q: list[float], seed: int, size: float
) -> None:
    sigmas = schedules.optimal(q, 1.0)
    kicks = np.exp(size * np.random.default_rng(seed).standard_normal((50, len(q))))
    best = np.sum(q * sigmas**2)
    for kick in kicks:
        other = schedules.onto_budget(sigmas * kick, 1.0)
        assert np.sum(q * other**2) >= best * (1 - 1e-9)


def test_shapes_are_their_formulas() -> None:
    t = np.arange(1, 11)
    np.testing.assert_allclose(shapes.exponential(10, rate=0.1), np.exp(-0.1 * (t - 1)))
    np.testing.assert_allclose(shapes.time_decay(10, rate=0.3), 1 / (1 + 0.3 * t))
    np.testing.assert_allclose(
        shapes.step(10, factor=0.5, every=4), [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]
    )
    np.testing.assert_allclose(
        shapes.polynomial(10, power=2, end=0.2), 0.2 + 0.8 * (1 - (t - 1) / 9) ** 2
    )
    np.testing.assert_allclose(shapes.linear(10, end=0.5), np.linspace(1, 0.5, 10))
    np.testing.assert_allclose(
        shapes.piecewise(6, boundaries=[2, 5], values=[3, 2, 1]), [3, 3, 2, 2, 2, 1]
    )
    np.testing.assert_allclose(shapes.custom(lambda t: 1 / t, 3), [1, 1 / 2, 1 / 3])
    np.testing.assert_allclose(shapes.custom([3, 2, 1], 3), [3, 2, 1])


@pytest.mark.parametrize("name", shapes.NAMED)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_named_shapes_fall_as_told(name: str, steps: int) -> None:
    shape = shapes.falling(name, steps, 0.25)
    assert shape.shape == (steps,)
    assert (np.diff(shape) <= 1e-15).all()
    if name != "uniform" and steps > 1:
        assert shape[-1] / shape[0] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: schedules.optimal([], 1), "non-empty"),
        (lambda: schedules.optimal([1, 0], 1), r"influence\[1\]"),
        (lambda: schedules.optimal([1, math.nan], 1), r"influence\[1\]"),
        (lambda: schedules.optimal([[1, 2]], 1), "non-empty list"),
        (lambda: schedules.optimal([1, 2], 0), "Expected R"),
        (lambda: schedules.uniform(0, 1), "Expected steps"),
        (lambda: shapes.piecewise(5, boundaries=[3, 2], values=[1, 2, 3]), "increasing"),
        (lambda: shapes.piecewise(5, boundaries=[3], values=[1, 2, 3]), "one longer"),
        (lambda: shapes.exponential(1000, rate=10), "moderate"),
        (lambda: shapes.custom([1, 2], 3), "length of shape"),
        (lambda: shapes.custom(lambda t: t - 1, 3), r"shape\[0\]"),
        (lambda: shapes.falling("cosine", 3, 0.5), "one of uniform"),
        (lambda: shapes.falling("step", 3, 2), "Expected fall"),
    ],
)
def test_bad_input(call, said: str) -> None:
    with pytest.raises(dim.InputError, match=said):
        call()


def test_priced_at_inverse_square_is_the_lemma() -> None:
    q = influence.momentum(gamma=0.98, beta=0.9, steps=300)
    np.testing.assert_allclose(
        schedules.priced(q, lambda s: s**-2.0, 0.7), schedules.optimal(q, 0.7), rtol=1e-8
    )


@pytest.mark.parametrize(("order", "rate"), [(2, 0.01), (8, 0.01), (20, 0.1), (5, 1e-4)])
def test_priced_against_a_numerical_optimiser(order: int, rate: float) -> None:
    q = influence.gradient_descent(gamma=0.7, steps=10)

    def price(s: np.ndarray) -> np.ndarray:
        return renyi.divergence(order, np.asarray(s, dtype=float), rate)

    budget = float(np.sum(price(np.full(10, 0.9))))
    sigmas = schedules.priced(q, price, budget)
    assert np.sum(price(sigmas)) == pytest.approx(budget, rel=1e-8)
    found = minimize(  # type: ignore[call-overload]
        lambda x: np.sum(q * np.exp(2 * x)),
        np.log(np.full(10, 0.9)),
        constraints={"type": "eq", "fun": lambda x: np.sum(price(np.exp(x))) / budget - 1},
        method="SLSQP",
        options={"maxiter": 2000, "ftol": 1e-14},
    )
    assert np.sum(q * sigmas**2) <= found.fun * (1 + 1e-7)


def test_the_inverse_square_rule_is_far_off_below_one() -> None:
    """At σ near and below 1 the price of a subsampled step is steeper than 1/σ²: the paper's rule
    spreads the noise too widely and pays for it."""
    q = influence.gradient_descent(gamma=0.98, steps=200)

    def price(s: np.ndarray) -> np.ndarray:
        return renyi.divergence(4, s, 0.01)

    def waste(level: float) -> float:
        budget = float(np.sum(price(np.full(200, level))))
        best = np.sum(q * schedules.priced(q, price, budget) ** 2)
        low, high = -5.0, 5.0
        shape = schedules.optimal_shape(q)
        for _ in range(80):
            middle = (low + high) / 2
            spends = np.sum(price(np.exp(middle) * shape)) > budget
            low, high = (middle, high) if spends else (low, middle)
        return float(np.sum(q * (np.exp(high) * shape) ** 2) / best)

    assert waste(20.0) == pytest.approx(1, abs=1e-3)
    assert 1.001 < waste(2.0) < waste(1.0) < waste(0.6)


def test_a_price_that_is_not_convex_is_refused() -> None:
    with pytest.raises(dim.InputError, match="convex"):
        schedules.priced([1, 2], lambda s: s**2, 1.0)
    with pytest.raises(dim.InputError, match="reachable"):
        schedules.priced([1, 2], lambda s: s**-2.0, 1e9)


def test_noise_so_large_that_its_square_overflows_still_has_a_price() -> None:
    divergence = renyi.divergence(8, np.array([1e100, 1e160, 1e200]), 0.1)
    assert (divergence > 0).all()
    assert (divergence < 1e-190).all()

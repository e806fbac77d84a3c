# mypy: allow-untyped-defs, allow-incomplete-defs
"""Bounds against brute force, and against what the paper prints."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import diminuendo as dim
from diminuendo import bounds, influence, schedules

alphas = st.floats(-8, 1).map(lambda x: 10**x)


def test_steps_at_the_papers_example() -> None:
    """κ = 20, α = 1e-5: the surrogate says 167 and the print 341, the bounds themselves less."""
    uniform = bounds.best_steps_uniform(gamma=0.95, alpha=1e-5)
    dynamic = bounds.best_steps_dynamic(gamma=0.95, alpha=1e-5)
    assert (uniform.steps, uniform.printed) == (108, 167)
    assert (dynamic.steps, dynamic.printed) == (163, 341)
    assert dynamic.erub < uniform.erub


@given(kappa=st.floats(1, 300), alpha=alphas)
def test_gradient_descent_steps_against_all_steps(kappa: float, alpha: float) -> None:
    gamma = 1 - 1 / kappa
    for best, bound in (
        (bounds.best_steps_uniform, bounds.gradient_descent_uniform),
        (bounds.best_steps_dynamic, bounds.gradient_descent_dynamic),
    ):
        found = best(gamma=gamma, alpha=alpha)
        everything = [
            bound(gamma=gamma, alpha=alpha, steps=t) for t in range(1, 2 * found.steps + 50)
        ]
        assert found.erub == bound(gamma=gamma, alpha=alpha, steps=found.steps)
        assert found.erub <= min(everything) * (1 + 1e-12)


@settings(max_examples=25)
@given(
    beta=st.floats(0.05, 0.95),
    closeness=st.floats(0.05, 0.99),
    alpha=alphas,
    eta0=st.floats(-3, 0).map(lambda x: 10**x),
)
def test_momentum_steps_against_all_steps(
    beta: float, closeness: float, alpha: float, eta0: float
) -> None:
    gamma = beta + (1 - beta) * closeness
    for best, bound in (
        (bounds.best_steps_momentum_uniform, bounds.momentum_uniform),
        (bounds.best_steps_momentum_dynamic, bounds.momentum_dynamic),
    ):
        found = best(gamma=gamma, beta=beta, alpha=alpha, eta0=eta0)
        assume(found.steps < 1500)
        everything = [
            bound(gamma=gamma, beta=beta, alpha=alpha, eta0=eta0, steps=t)
            for t in range(1, 2 * found.steps + 50)
        ]
        assert found.erub == pytest.approx(everything[found.steps - 1], rel=1e-10)
        assert found.erub <= min(everything) * (1 + 1e-11)


@given(kappa=st.floats(1.5, 1e4), alpha=st.floats(-9, -1).map(lambda x: 10**x))
def test_least_bounds_have_the_printed_order(kappa: float, alpha: float) -> None:
    """The dynamic order is proven with constants ¼ and 4; the uniform one up to some constant."""
    gamma = 1 - 1 / kappa
    dynamic = bounds.best_steps_dynamic(gamma=gamma, alpha=alpha).erub
    ratio = dynamic / bounds.order_of_dynamic(kappa=kappa, alpha=alpha)
    assert 0.25 <= ratio <= 4.5
    uniform = bounds.best_steps_uniform(gamma=gamma, alpha=alpha).erub
    assert dynamic <= uniform * (1 + 1e-12)
    if kappa**2 * alpha < 0.05:
        assert 0.1 < uniform / bounds.order_of_uniform(kappa=kappa, alpha=alpha) < 10


@given(gamma=st.floats(0.1, 0.999), alpha=alphas, steps=st.integers(1, 300))
def test_closed_forms_are_the_general_bound_at_their_schedules(
    gamma: float, alpha: float, steps: int
) -> None:
    R, q = 0.37, influence.gradient_descent(gamma=gamma, steps=steps)
    for bound, sigmas in (
        (bounds.gradient_descent_uniform, schedules.uniform(steps, R)),
        (bounds.gradient_descent_dynamic, schedules.optimal(q, R)),
    ):
        general = gamma**steps + alpha * R * bounds.weighted_noise(q, sigmas)
        assert bound(gamma=gamma, alpha=alpha, steps=steps) == pytest.approx(general, rel=1e-8)


def test_admissible_step_is_solved_with_its_gamma() -> None:
    assert bounds.admissible_step_at(beta=0.9, gamma=0.99) == pytest.approx(0.0030, abs=5e-5)
    for beta in (0.1, 0.5, 0.9, 0.99):
        for kappa in (1.0, 5.0, 100.0, 1e6):
            eta0 = bounds.admissible_step(beta=beta, kappa=kappa)
            gamma = 1 - eta0 / (2 * kappa)
            assert gamma > beta
            assert bounds.zeta(eta0=eta0, beta=beta, gamma=gamma) == pytest.approx(0, abs=1e-8)
            more = 1.001 * eta0
            assert bounds.zeta(eta0=more, beta=beta, gamma=1 - more / (2 * kappa)) < 0


def test_psgd_batch_and_term() -> None:
    assert bounds.psgd_batch_size(examples=1000, R=0.25) == 500
    assert bounds.psgd_batch_size(examples=10, R=1e-9) == 1
    assert bounds.psgd_batch_size(examples=1000, R=9.0) == 1000
    assert bounds.psgd_sampling_term(
        parameters=8, strong_convexity=0.5, examples=100, R=0.2, gap=4
    ) == pytest.approx(8 / (2 * 0.5 * 100**2 * 0.2 * 4))


def test_a_batch_held_at_all_examples_saves_nothing() -> None:
    facts: dict[str, Any] = {"parameters": 8, "strong_convexity": 0.5, "examples": 100, "gap": 4}
    whole = bounds.psgd_sampling_term(**facts, R=1.0)
    assert bounds.psgd_sampling_term(**facts, R=9.0) == whole
    assert bounds.psgd_sampling_term(**facts, R=0.5) == pytest.approx(2 * whole)


@pytest.mark.parametrize("beta", [0.05, 0.2, 0.4, 0.9])
@pytest.mark.parametrize("gamma", [0.5, 0.95, 0.9999])
def test_psgd_term_with_momentum(beta: float, gamma: float) -> None:
    """Above α_g for β < 1/3, and an upper bound for every number of steps."""
    facts: dict[str, Any] = {
        "parameters": 8,
        "strong_convexity": 0.5,
        "examples": 100,
        "gap": 4,
        "R": 1.0,
    }
    plain = bounds.psgd_sampling_term(**facts)
    term = bounds.psgd_sampling_term(**facts, beta=beta, gamma=gamma)
    limit = 2 * (1 - beta) / (1 + beta) * plain
    assert term >= limit
    if gamma == 0.9999:
        assert term == pytest.approx(limit, rel=1e-2)
        assert (term > plain) is (beta < 1 / 3)
    for steps in (1, 2, 3, 5, 10, 30, 100, 1000):
        q = influence.momentum(gamma=gamma, beta=beta, steps=steps)
        assert 2 * (1 - gamma) * np.sum(q) * plain <= term * (1 + 1e-12)
    with pytest.raises(dim.InputError, match="gamma"):
        bounds.psgd_sampling_term(**facts, beta=beta)


def test_true_risk_terms() -> None:
    assert bounds.true_risk_by_stability(
        0.1, lipschitz=2, step_size=0.5, steps=10, examples=100
    ) == pytest.approx(0.1 + 2 * 4 * 0.5 * 10 / 100)
    asked: list[float] = []

    def excess(R: float) -> float:
        asked.append(R)
        return 1 / R

    risk = bounds.true_risk_in_probability(
        excess, R=1.0, lipschitz=1, strong_convexity=0.5, examples=100, failure=0.25
    )
    assert asked == [pytest.approx(1 / 3)]
    assert risk == pytest.approx(math.sqrt(2 / 50 * 6) + 8 / (0.25 * 50))


def test_tables_at_one_point() -> None:
    budget = dim.Budget(epsilon=2, delta=1e-6, conversion="zcdp")
    N, D = 10_000, 50
    loose = 4 / math.log(1e6)
    rows = {
        r.algorithm: r.bound for r in bounds.empirical_risk_table(budget, examples=N, parameters=D)
    }
    assert rows["GD + moments accountant"] == pytest.approx(D * math.log(N) ** 2 / (N**2 * loose))
    assert rows["GD, static"] / rows["GD, dynamic"] == pytest.approx(math.log(N))
    assert rows["GD, dynamic"] == rows["GD, non-private"] == pytest.approx(D / (N**2 * budget.R))
    true = {
        r.algorithm: r.bound
        for r in bounds.true_risk_table(budget, examples=N, parameters=D, failure=0.1)
    }
    assert true["GD, dynamic, likely"] == pytest.approx(
        (math.sqrt(D * math.log(10) / (N * budget.R)) + 40) / N
    )
    assert true["SGD + moments, convex"] == pytest.approx(
        max(math.sqrt(D / loose) / N, 1 / math.sqrt(N))
    )
    assert len(rows) == 10
    assert len(true) == 13


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: bounds.admissible_step(beta=0.9, kappa=0.5), "kappa"),
        (lambda: bounds.admissible_step_at(beta=0.9, gamma=0.8), "below gamma"),
        (lambda: bounds.best_steps_dynamic(gamma=1.0, alpha=1e-5), "gamma"),
        (lambda: bounds.best_steps_dynamic(gamma=0.9, alpha=0), "alpha"),
        (lambda: bounds.gradient_descent_uniform(gamma=0.9, alpha=1, steps=0), "steps"),
        (lambda: bounds.weighted_noise([1, 2], [1]), "length"),
        (lambda: bounds.psgd_batch_size(examples=0, R=1), "examples"),
        (
            lambda: bounds.true_risk_in_probability(
                lambda R: R, R=1, lipschitz=1, strong_convexity=1, examples=9, failure=1
            ),
            "failure",
        ),
    ],
)
def test_bad_input(call, said: str) -> None:
    with pytest.raises(dim.InputError, match=said):
        call()


def test_quadratic_bias_is_that_of_the_slowest_direction() -> None:
    q = influence.spectrum([1.0, 0.5], steps=3)
    bound = bounds.quadratic([1.0, 0.5], influence=q, sigmas=np.ones(3), alpha=0.1, R=2.0)
    assert bound == pytest.approx(0.5**6 + 0.2 * q.sum())

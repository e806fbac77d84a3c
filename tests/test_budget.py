"""Budgets against figures from print, a 50-digit computation, and dp-accounting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, pld
from hypothesis import given
from hypothesis import strategies as st

import diminuendo as dim
from diminuendo.budget import CONVERSIONS, Budget, Conversion, delta_of, epsilon_of, gaussian_delta
from diminuendo.planning import optimal_sigmas
from diminuendo.tuning import private_selection, private_tuning

EPSILONS = (1e-4, 1e-3, 0.01, 0.1, 1.0, 4.0, 20.0, 50.0, 100.0)
DELTAS = (1e-15, 1e-12, 1e-8, 1e-5, 1e-3, 0.1)
EDGES = list(itertools.product(EPSILONS, DELTAS))


def precise_delta(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(50):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


@pytest.mark.parametrize(
    ("epsilon", "delta", "conversion", "R"),
    [
        (4, 1e-8, "exact", 0.51344),
        (4, 1e-8, "zcdp", 0.39270),
        (4, 1e-8, "zcdp-tight", 0.46519),
        (1, 1e-5, "exact", 0.071851),
        (1, 1e-5, "zcdp", 0.041640),
    ],
)
def test_figures(epsilon: float, delta: float, conversion: Conversion, R: float) -> None:
    budget = dim.Budget(epsilon=epsilon, delta=delta, conversion=conversion)
    assert pytest.approx(R, rel=2e-5) == budget.R
    assert 2 * budget.rho == pytest.approx(budget.R) == pytest.approx(budget.mu**2)


@pytest.mark.parametrize(("epsilon", "delta"), EDGES)
def test_exact_conversion_against_fifty_digits(epsilon: float, delta: float) -> None:
    mu = dim.Budget(epsilon=epsilon, delta=delta).mu
    assert precise_delta(epsilon, mu) <= delta
    assert precise_delta(epsilon, mu * (1 + 1e-8)) > delta
    if delta > 1e-12:  # above the rounding of the 50-digit difference's double inputs
        assert gaussian_delta(epsilon, mu) == pytest.approx(
            float(precise_delta(epsilon, mu)), rel=1e-7
        )


@pytest.mark.parametrize(("epsilon", "delta"), EDGES)
def test_tight_zcdp_holds_at_every_order(epsilon: float, delta: float) -> None:
    rho = dim.Budget(epsilon=epsilon, delta=delta, conversion="zcdp-tight").rho
    best = min(
        order * rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order in (1 + 10 ** (k / 500) for k in range(-2500, 5000))
    )
    assert epsilon * (1 - 1e-6) <= best <= epsilon * (1 + 1e-4) + 1e-5


@pytest.mark.parametrize("sigma", [0.7, 1.4, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
def test_epsilon_against_dp_accounting(sigma: float, delta: float) -> None:
    accountant = pld.PLDAccountant()
    accountant.compose(GaussianDpEvent(sigma))
    pessimistic = accountant.get_epsilon(delta)
    ours = dim.epsilon([sigma], delta)
    assert ours <= pessimistic * (1 + 1e-9) + 1e-9
    assert ours == pytest.approx(pessimistic, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize(("epsilon", "delta"), EDGES)
def test_there_and_back_on_the_private_side(
    epsilon: float, delta: float, conversion: Conversion
) -> None:
    budget = dim.Budget(epsilon=epsilon, delta=delta, conversion=conversion)
    assert epsilon * (1 - 1e-6) <= budget.epsilon_of(budget.R) <= epsilon
    assert delta_of(budget.R, epsilon=epsilon, conversion=conversion) == pytest.approx(
        delta, rel=1e-5
    )


@given(
    epsilon=st.floats(1e-4, 100),
    delta=st.floats(1e-15, 0.1),
    more=st.floats(1.01, 10),
    conversion=st.sampled_from(CONVERSIONS),
)
def test_order(epsilon: float, delta: float, more: float, conversion: str) -> None:
    kind = cast(Conversion, conversion)
    small = dim.Budget(epsilon=epsilon, delta=delta, conversion=kind)
    assert small.R < dim.Budget(epsilon=epsilon * more, delta=delta, conversion=kind).R
    assert small.R < dim.Budget(epsilon=epsilon, delta=delta * more, conversion=kind).R
    exact = dim.Budget(epsilon=epsilon, delta=delta)
    tight = dim.Budget(epsilon=epsilon, delta=delta, conversion="zcdp-tight")
    paper = dim.Budget(epsilon=epsilon, delta=delta, conversion="zcdp")
    assert paper.R <= tight.R * (1 + 1e-8)
    assert tight.R <= exact.R * (1 + 1e-8)


def test_replacing_one_example_costs_four_times_as_much() -> None:
    one = dim.Budget(epsilon=2, delta=1e-6)
    two = dim.Budget(epsilon=2, delta=1e-6, relation="replace-one")
    assert pytest.approx(4 * two.R) == one.R
    assert (one.mu, one.sensitivity, two.sensitivity) == (two.mu, 1, 2)
    assert epsilon_of(two.R, delta=1e-6, relation="replace-one") <= 2
    assert epsilon_of(one.R, delta=1e-6, relation="replace-one") > 2


def test_from_R_gives_the_budget_that_R_uses_up() -> None:
    budget = dim.Budget.from_R(0.5, delta=1e-8)
    assert 0.5 * (1 - 1e-8) <= budget.R <= 0.5 * (1 + 1e-8)
    with pytest.raises(dim.InputError, match="already"):
        dim.Budget.from_R(1e-9, delta=0.1)


@pytest.mark.parametrize("delta", [5e-324, 1e-320, 1e-301])
def test_a_delta_whose_bounds_have_no_digits_is_refused(delta: float) -> None:
    budget = Budget(epsilon=1, delta=1e-300)
    assert 0.999 < budget.epsilon_of(budget.R) <= 1
    for ask in (
        lambda: Budget(epsilon=1, delta=delta),
        lambda: dim.epsilon([5.0], delta=delta),
        lambda: epsilon_of(0.1, delta=delta),
    ):
        with pytest.raises(dim.InputError, match=r"delta.*at least 1e-300"):
            ask()


def test_nothing_spent_costs_nothing() -> None:
    assert epsilon_of(0.0, delta=1e-5) == 0
    assert delta_of(0.0, epsilon=1.0) == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"epsilon": 0, "delta": 1e-5}, "epsilon"),
        ({"epsilon": -1, "delta": 1e-5}, "epsilon"),
        ({"epsilon": math.nan, "delta": 1e-5}, "epsilon"),
        ({"epsilon": math.inf, "delta": 1e-5}, "epsilon"),
        ({"epsilon": "4", "delta": 1e-5}, "epsilon"),
        ({"epsilon": True, "delta": 1e-5}, "epsilon"),
        ({"epsilon": 1, "delta": 0}, "delta"),
        ({"epsilon": 1, "delta": 1}, "delta"),
        ({"epsilon": 1, "delta": 1.5}, "delta"),
        ({"epsilon": 1, "delta": 1e-5, "relation": "swap"}, "relation"),
        ({"epsilon": 1, "delta": 1e-5, "conversion": "clt"}, "conversion"),
    ],
)
def test_bad_input_names_what_was_wrong(fields: dict[str, object], name: str) -> None:
    with pytest.raises(dim.InputError, match=f"Expected {name} to be .*, got "):
        dim.Budget(**fields)  # type: ignore[arg-type]


def test_a_pair_is_a_budget_everywhere() -> None:
    """(ε, δ) is taken wherever a Budget goes; anything else is refused in words."""
    pair, budget, step = (
        (2, 1e-5),
        Budget(epsilon=2, delta=1e-5),
        dim.GaussianStep(noise_multiplier=10.0),
    )
    same: list[Callable[[Any], Any]] = [
        lambda b: dim.plan(b, examples=1000, parameters=10, steps=3, gamma=0.9),
        lambda b: dim.calibrate([1.0, 1.0], b).tolist(),
        lambda b: dim.accounting.claim([step], b),
        lambda b: dim.accounting.GaussianFilter(b).limit,
        lambda b: dim.accounting.RenyiFilter(b, order=16).limit,
        lambda b: dim.accounting.best_order(b, step),
        lambda b: optimal_sigmas(np.array([1.0, 2.0]), b, 1.0).tolist(),
        lambda b: dim.bounds.empirical_risk_table(b, examples=1000, parameters=10),
        lambda b: dim.bounds.true_risk_table(b, examples=1000, parameters=10),
        lambda b: private_tuning.share(b, 4, 1e4),
        lambda b: private_selection.share(b, 4),
    ]
    for call in same:
        assert call(pair) == call(budget)
        for wrong in (2, "2", (2,), (2, 1e-5, 1), None):
            with pytest.raises(dim.InputError, match="a Budget, or a pair"):
                call(wrong)
        with pytest.raises(dim.InputError, match="epsilon"):
            call((-1, 1e-5))


def test_a_ledger_takes_a_pair_too(tmp_path: Path) -> None:
    with dim.Ledger(tmp_path / "l.sqlite") as ledger:
        status = ledger.create("patients", (2, 1e-5))
        assert status.terms.budget == Budget(epsilon=2, delta=1e-5)
        with pytest.raises(dim.InputError, match="a Budget, or a pair"):
            ledger.create("others", 2)  # type: ignore[arg-type]
        assert [one.terms.name for one in ledger.budgets()] == ["patients"]

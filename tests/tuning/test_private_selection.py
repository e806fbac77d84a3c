"""Repeat and select: the bound holds where the truth can be integrated, and the budget holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import diminuendo as dim
from diminuendo.errors import InputError
from diminuendo.tuning import Shape, Space, TwoLayers, auxiliary, private_selection

DATA = auxiliary.gaussian(Shape(examples=50, features=5, classes=2))


def true_divergence(order: float, shift: float, m: float) -> float:
    """Of the best of Poisson(m) draws of N(0, 1) against N(shift, 1), larger or smaller."""

    def log_density(y: float, mean: float) -> float:
        z = y - mean
        return float(math.log(m) + stats.norm.logpdf(z) - m * stats.norm.sf(z))

    def term(y: float) -> float:
        return math.exp(order * log_density(y, 0.0) + (1 - order) * log_density(y, shift))

    moment, _ = integrate.quad(term, -30, 30, limit=400, points=[-shift, 0, shift, 3])
    return math.log(moment + math.exp(-m)) / (order - 1)


@pytest.mark.parametrize("order", [1.2, 2.0, 5.0, 12.0])
@pytest.mark.parametrize("shift", [-0.8, -0.3, 0.3, 0.8])
@pytest.mark.parametrize("m", [0.5, 3.0, 20.0])
def test_the_bound_is_above_the_truth(order: float, shift: float, m: float) -> None:
    """A trial that releases its score alone: N(0, 1) or N(shift, 1), so R = shift²."""
    bound = private_selection.divergence_of_best(order, shift**2, m, "add-remove")
    assert true_divergence(order, shift, m) <= bound * (1 + 1e-6) + 1e-9


def test_without_private_information_only_the_selection_s_own_slack_is_left() -> None:
    """R → 0: the divergence's bound tends to ln(m + e^−m)/(λ−1), never below zero."""
    for m in (0.01, 1.0, 50.0):
        found = private_selection.divergence_of_best(3.0, 1e-12, m, "add-remove")
        assert found >= 0
        assert found == pytest.approx(math.log(m + math.exp(-m)) / 2, abs=1e-4)


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize("m", [1.0, 10.0, 100.0])
def test_a_share_lands_on_the_budget(relation: Any, m: float) -> None:
    budget = dim.Budget(epsilon=4, delta=1e-8, relation=relation)
    each = private_selection.share(budget, m)
    spent = private_selection.epsilon_of_best(each, m, delta=1e-8, relation=relation)
    assert 0.999 * 4 < spent <= 4
    assert 0 < each < budget.R


def test_more_trials_leave_less_for_each_but_more_than_charging_them_all() -> None:
    budget = dim.Budget(epsilon=4, delta=1e-8)
    shares = [private_selection.share(budget, m) for m in (1.0, 3.0, 10.0, 30.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[2] > 2 * budget.R / 11


def test_the_best_is_returned_within_the_budget() -> None:
    budget = dim.Budget(epsilon=6, delta=1e-6)
    found = private_selection.select_on_private(
        budget, DATA, model=TwoLayers(5, 6, 2), space=Space(steps=(2, 4)), mean_trials=4.0
    )
    assert 0.99 * 6 < found.epsilon <= 6
    if found.plan is not None:
        assert found.candidate is not None
        score_cost = private_selection.SCORE_SHARE * private_selection.share(budget, 4.0)
        total = float(np.sum(found.plan.sigmas**-2.0)) + score_cost
        assert total <= private_selection.share(budget, 4.0) * (1 + 1e-9)


def test_candidates_are_drawn_from_the_whole_space() -> None:
    space = Space(steps=(3, 5), lr=(0.01, 1.0), momentum=(0.1, 0.9), clip=2.0)
    chance = np.random.default_rng(0)
    all_of = [private_selection.random_candidate("exponential", space, chance) for _ in range(300)]
    assert {c.steps for c in all_of} == {3, 4, 5}
    assert np.mean([c.lr < 0.1 for c in all_of]) == pytest.approx(0.5, abs=0.15)
    assert {c.clip for c in all_of} == {2.0}
    assert private_selection.random_candidate("uniform", space, chance).fall is None


def test_bad_input() -> None:
    budget = dim.Budget(epsilon=4, delta=1e-8)
    model = TwoLayers(5, 6, 2)
    with pytest.raises(InputError, match="mean_trials"):
        private_selection.select_on_private(budget, DATA, model=model, mean_trials=0.0)
    with pytest.raises(InputError, match="family"):
        private_selection.select_on_private(budget, DATA, model=model, family="optimal")
    tight = dim.Budget(epsilon=0.01, delta=1e-8)
    with pytest.raises(InputError, match="no share is left"):
        private_selection.share(tight, 1e6)

"""What is left can be planned with, whatever the terms; what was spent is never told too low."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ledgers import step

from diminuendo import Budget
from diminuendo.budget import CONVERSIONS, Conversion, Relation
from diminuendo.ledger import Terms

RELATIONS: tuple[Relation, ...] = ("add-remove", "replace-one")


@settings(max_examples=200, deadline=None)
@given(
    st.floats(-3, 1.5),
    st.floats(-14, -2),
    st.floats(-12, 0),
    st.sampled_from(RELATIONS),
    st.sampled_from(CONVERSIONS),
)
@example(math.log10(0.00825587316407399), math.log10(2.5469175935254388e-09), -9.793, "add-remove",
         "exact")  # fmt: skip
@example(math.log10(0.022913914683713173), math.log10(1.3278811659768433e-11), -9.0358,
         "add-remove", "exact")  # fmt: skip
def test_what_is_left_fits(
    epsilon: float, delta: float, room: float, relation: Relation, conversion: Conversion
) -> None:
    budget = Budget(epsilon=10**epsilon, delta=10**delta, relation=relation, conversion=conversion)
    terms = Terms(name="b", budget=budget)
    spent = terms.limit - int(terms.limit * Fraction(10**room))
    left = terms.left(spent)
    if left is not None:
        sigma = math.sqrt(7 / left.R) * (1 + 1e-14)
        assert spent + sum(terms.costs([step(sigma, count=7)])) <= terms.limit
        assert left.epsilon <= budget.epsilon
    assert terms.epsilon_spent(spent) <= budget.epsilon


@pytest.mark.parametrize("order", [2, 7, 40, 256])
def test_renyi_never_tells_more_than_the_filter_guarantees(order: int) -> None:
    terms = Terms(name="b", budget=Budget(epsilon=30, delta=1e-5), composition="renyi", order=order)
    told = [terms.epsilon_spent(int(terms.limit * Fraction(i, 64))) for i in range(65)]
    assert told == sorted(told)
    assert told[-1] <= 30
    assert terms.epsilon_spent(2 * terms.limit) > 30


def test_the_odometer_holds_at_a_moment_chosen_by_what_was_seen() -> None:
    """Full-batch steps; a rule that stops as soon as the loss exceeds what it is told.

    The loss exceeds "ε of what was charged" in far more than a share δ of 4,000 runs, and the
    odometer in at most δ of them: more than 134 where 80 are expected at most happens by chance
    with probability below 1e-8.
    """
    delta, runs, steps = 0.02, 4000, 300
    terms = Terms(name="b", budget=Budget(epsilon=2, delta=delta))
    whole = float(Fraction(terms.limit, 1 << 200))
    each = whole / steps
    noise = np.random.default_rng(5).standard_normal((runs, steps))
    loss = np.cumsum(each / 2 + math.sqrt(each) * noise, axis=1)
    spent = [int(terms.limit * Fraction(i, steps)) for i in range(1, steps + 1)]
    charged = np.array([terms.epsilon_spent(units) for units in spent])
    odometer = np.array([terms.odometer(units) for units in spent])
    assert (loss > charged).any(axis=1).sum() > 5 * delta * runs
    assert (loss > odometer).any(axis=1).sum() <= 134
    assert (np.diff(odometer) > 0).all()
    assert terms.odometer(0) == 0


def test_the_odometer_of_a_renyi_budget() -> None:
    terms = Terms(name="b", budget=Budget(epsilon=3, delta=1e-5), composition="renyi", order=9)
    half = terms.limit // 2
    divergence = float(Fraction(half, 1 << 200))
    assert terms.odometer(half) == pytest.approx(divergence + math.log(1e5) / 8, rel=1e-9)
    assert terms.epsilon_spent(half) < terms.odometer(half)

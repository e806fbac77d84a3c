"""What is left can be planned with, whatever the terms; what was spent is never told too low."""

from __future__ import annotations

import math
from fractions import Fraction

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

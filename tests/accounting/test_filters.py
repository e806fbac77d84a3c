# mypy: allow-untyped-defs, allow-incomplete-defs
"""Filters: yes or no before the step, state that survives, nothing changed by a no."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diminuendo as dim
from diminuendo import GaussianStep
from diminuendo.accounting import renyi
from diminuendo.accounting.filters import GaussianFilter, RenyiFilter, best_order

BUDGET = dim.Budget(epsilon=4, delta=1e-8)


def test_a_plan_that_spends_everything_runs_to_its_end_and_not_one_step_more() -> None:
    for steps in (1, 7, 163, 5000):
        plan = dim.plan(BUDGET, examples=10**6, parameters=10, kappa=20 + steps, steps=steps)
        gate = GaussianFilter(BUDGET)
        assert all(gate.request(event) for event in plan.events)
        assert gate.spent == pytest.approx(1, abs=1e-9)
        assert not gate.request(GaussianStep(noise_multiplier=1e4))


@given(
    sigmas=st.lists(st.floats(0.5, 50), max_size=60),
    counts=st.integers(1, 5),
    relation=st.sampled_from(["add-remove", "replace-one"]),
)
def test_granted_steps_never_exceed_the_budget(
    sigmas: list[float], counts: int, relation: str
) -> None:
    budget = dim.Budget(epsilon=2, delta=1e-6, relation=relation)  # type: ignore[arg-type]
    gate = GaussianFilter(budget)
    granted = [
        s for s in sigmas for _ in range(counts) if gate.request(GaussianStep(noise_multiplier=s))
    ]
    if granted:
        assert dim.epsilon(granted, 1e-6, relation=budget.relation) <= 2 * (1 + 1e-9)
    assert gate.spent <= 1


@given(
    steps=st.lists(st.tuples(st.floats(0.4, 20), st.floats(1e-4, 1)), min_size=1, max_size=25),
    order=st.integers(3, 40),
)
def test_renyi_filter_never_exceeds_the_budget(
    steps: list[tuple[float, float]], order: int
) -> None:
    budget = dim.Budget(epsilon=6, delta=1e-5)
    gate = RenyiFilter(budget, order=max(order, 4))
    granted = [
        (s, p) for s, p in steps if gate.request(GaussianStep(noise_multiplier=s, sampling_rate=p))
    ]
    if granted:
        sigmas, rates = np.array(granted).T
        assert renyi.epsilon(sigmas, rates, np.ones(len(granted)), 1e-5) <= 6 * (1 + 1e-9)


def test_a_no_changes_nothing() -> None:
    gate = GaussianFilter(BUDGET)
    gate.request(GaussianStep(noise_multiplier=5.0, count=10))
    before = gate.state()
    too_much = GaussianStep(noise_multiplier=0.5)
    assert not gate.fits(too_much)
    assert not gate.request(too_much)
    with pytest.raises(dim.InputError, match="RenyiFilter"):
        gate.request(GaussianStep(noise_multiplier=5.0, sampling_rate=0.1))
    assert gate.state() == before
    assert gate.request(GaussianStep(noise_multiplier=5.0, count=2))


def test_count_is_not_forgotten() -> None:
    once, many = RenyiFilter(BUDGET, order=8), RenyiFilter(BUDGET, order=8)
    step = GaussianStep(noise_multiplier=2.0, sampling_rate=0.1)
    for _ in range(7):
        assert once.request(step)
    assert many.request(GaussianStep(noise_multiplier=2.0, sampling_rate=0.1, count=7))
    assert once.state() == many.state()


@pytest.mark.parametrize("make", [GaussianFilter, lambda b: RenyiFilter(b, order=9)])
def test_saved_and_reloaded_it_answers_as_if_never_stopped(make) -> None:
    rng = np.random.default_rng(5)
    steps = [GaussianStep(noise_multiplier=float(s)) for s in rng.uniform(3, 30, 400)]
    straight = make(BUDGET)
    answers = [straight.request(step) for step in steps]
    broken = make(BUDGET)
    again = []
    for step in steps:
        broken = type(broken).from_state(json.loads(json.dumps(broken.state())))
        again.append(broken.request(step))
    assert answers == again
    assert straight.state() == broken.state()
    assert not all(answers)


def test_best_order_allows_the_most_steps() -> None:
    budget = dim.Budget(epsilon=2, delta=1e-5)
    typical = GaussianStep(noise_multiplier=1.0, sampling_rate=0.01)

    def allowed(order: int) -> int:
        gate = RenyiFilter(budget, order=order)
        low, high = 0, 10**6
        while high - low > 1:
            middle = (low + high) // 2
            step = GaussianStep(noise_multiplier=1.0, sampling_rate=0.01, count=middle)
            low, high = (middle, high) if gate.fits(step) else (low, middle)
        return low

    order = best_order(budget, typical)
    assert allowed(order) >= max(allowed(order - 1), allowed(order + 1)) > 100


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: RenyiFilter(BUDGET, order=1), "order"),
        (lambda: RenyiFilter(BUDGET, order=2), "leaves something"),
        (lambda: GaussianFilter.from_state({"filter": "renyi"}), "gaussian"),
        (
            lambda: GaussianFilter.from_state(
                {**GaussianFilter(BUDGET).state(), "spent": str(1 << 300)}
            ),
            "within the limit",
        ),
        (
            lambda: GaussianFilter.from_state({**GaussianFilter(BUDGET).state(), "spent": "-1"}),
            "within the limit",
        ),
        (lambda: GaussianStep(noise_multiplier=0.0), "infinite"),
        (lambda: GaussianStep(noise_multiplier=math.nan), "noise_multiplier"),
        (lambda: GaussianStep(noise_multiplier=1, sampling_rate=1.1), "sampling_rate"),
        (lambda: GaussianStep(noise_multiplier=1, count=0), "count"),
        (
            lambda: best_order(
                dim.Budget(epsilon=1e-4, delta=1e-12), GaussianStep(noise_multiplier=1.0)
            ),
            "no order fits",
        ),
    ],
)
def test_bad_input(call, said: str) -> None:
    with pytest.raises(dim.InputError, match=said):
        call()

"""Plans and events as dp-accounting's events, and back."""

from __future__ import annotations

from typing import Any

import dp_accounting
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as some

import diminuendo as dim
from diminuendo.adapters.dp_accounting import from_dp_event, to_dp_event
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep

steps = some.builds(
    GaussianStep,
    noise_multiplier=some.floats(0.3, 30),
    sampling_rate=some.sampled_from([1.0, 0.5, 0.01]),
    count=some.integers(1, 5),
)


def total(events: tuple[GaussianStep, ...]) -> dict[tuple[float, float], int]:
    counts: dict[tuple[float, float], int] = {}
    for event in events:
        key = (event.noise_multiplier, event.sampling_rate)
        counts[key] = counts.get(key, 0) + event.count
    return counts


@given(some.lists(steps, max_size=6))
def test_there_and_back(events: list[GaussianStep]) -> None:
    assert total(from_dp_event(to_dp_event(events))) == total(tuple(events))


def plan(relation: Any = "add-remove", rate: float = 0.1) -> dim.Plan:
    return dim.plan(
        dim.Budget(epsilon=2, delta=1e-6, relation=relation),
        examples=1000,
        parameters=20,
        steps=12,
        gamma=0.8,
        sampling_rate=rate,
    )


@pytest.mark.parametrize(("relation", "rate"), [("add-remove", 0.1), ("replace-one", 1.0)])
def test_another_accountant_agrees_on_a_plan(relation: str, rate: float) -> None:
    made = plan(relation, rate)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(to_dp_event(made))
    assert accountant.get_epsilon(1e-6) == pytest.approx(made.epsilon, rel=5e-3)


def test_a_plan_comes_back_as_its_events() -> None:
    made = plan()
    assert from_dp_event(to_dp_event(made)) == made.events
    assert dim.accounting.claim(from_dp_event(to_dp_event(made)), made.budget) == made.epsilon


def test_releases_of_one_sample_are_one_with_less_noise() -> None:
    """Two Gaussian releases of the same sample are no two samples, which would cost less."""
    inside = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(2.0), 4)
    (step,) = from_dp_event(dp_event.PoissonSampledDpEvent(0.1, inside))
    assert step.noise_multiplier == pytest.approx(1.0, rel=1e-11)
    assert step.noise_multiplier < 1.0
    assert (step.sampling_rate, step.count) == (0.1, 1)


def test_compositions_of_compositions() -> None:
    one = dp_event.GaussianDpEvent(1.0)
    two = dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(2.0))
    event = dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([one, two]), 3)
    assert total(from_dp_event(event)) == {(1.0, 1.0): 3, (2.0, 0.5): 3}
    assert from_dp_event(dp_event.NoOpDpEvent()) == ()
    assert from_dp_event(dp_event.SelfComposedDpEvent(dp_event.NoOpDpEvent(), 3)) == ()
    assert from_dp_event(dp_event.PoissonSampledDpEvent(0.0, one)) == ()


@pytest.mark.parametrize(
    "event",
    [
        dp_event.LaplaceDpEvent(1.0),
        dp_event.NonPrivateDpEvent(),
        dp_event.SampledWithoutReplacementDpEvent(10, 2, dp_event.GaussianDpEvent(1.0)),
        dp_event.PoissonSampledDpEvent(
            0.5, dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(1.0))
        ),
        dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(1.0), dp_event.LaplaceDpEvent(1.0)]),
        "no event",
    ],
)
def test_what_is_not_understood_is_not_left_out(event: Any) -> None:
    with pytest.raises(InputError, match="the event"):
        from_dp_event(event)


def test_bad_events() -> None:
    with pytest.raises(InputError, match="noise_multiplier"):
        from_dp_event(dp_event.GaussianDpEvent(0.0))
    with pytest.raises(InputError, match="relation"):
        to_dp_event([GaussianStep(noise_multiplier=1, sampling_rate=0.1)], relation="replace-one")

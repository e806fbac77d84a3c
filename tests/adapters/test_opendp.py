"""Plans as OpenDP measurements, and OpenDP's losses as charges of a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import diminuendo as dim
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger.mechanisms import PureEpsilon, ZeroConcentrated

dp: Any = pytest.importorskip("opendp.prelude", reason="OpenDP is not installed")

from diminuendo.adapters.opendp import (  # noqa: E402
    as_mechanism,
    to_measurement,
    to_privacy_profile,
)

dp.enable_features("contrib", "honest-but-curious")


def plan(rate: float = 1.0, relation: Any = "add-remove") -> dim.Plan:
    return dim.plan(
        dim.Budget(epsilon=2, delta=1e-6, relation=relation),
        examples=1000,
        parameters=20,
        clip=3.0,
        steps=9,
        gamma=0.8,
        sampling_rate=rate,
    )


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_a_measurement_costs_what_the_plan_costs(relation: str) -> None:
    made = plan(relation=relation)
    measurement = to_measurement(made)
    rho = measurement.map(made.clip * made.budget.sensitivity)
    assert rho == pytest.approx(made.budget.sensitivity**2 * (made.sigmas**-2).sum() / 2)
    assert len(measurement([0.0, 1.0])) == made.steps


def test_a_measurement_of_a_sampled_plan_is_refused() -> None:
    with pytest.raises(InputError, match="to_privacy_profile"):
        to_measurement(plan(0.1))


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_a_privacy_profile_holds_the_certified_curve(rate: float) -> None:
    made = plan(rate)
    profile = to_privacy_profile(made)
    assert profile.delta(made.epsilon) == pytest.approx(made.budget.delta, rel=1e-2)
    assert profile.epsilon(made.budget.delta) == pytest.approx(made.epsilon, rel=1e-3)
    assert to_privacy_profile([GaussianStep(noise_multiplier=4.0)]).delta(1.0) > 0


def test_measurements_and_odometers_are_charged_to_a_ledger(tmp_path: Path) -> None:
    scalar = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
    laplace = dp.m.make_laplace(*scalar, scale=2.0)
    assert as_mechanism(laplace, laplace.map(1.0)) == PureEpsilon(epsilon=0.5)
    gaussian = dp.m.make_gaussian(*scalar, scale=2.0)
    charge = as_mechanism(gaussian, gaussian.map(1.0))
    assert charge == ZeroConcentrated(rho=0.125)
    odometer = dp.c.make_fully_adaptive_composition(
        *scalar, output_measure=dp.zero_concentrated_divergence()
    )
    asked = odometer(3.0)
    asked(gaussian)
    asked(gaussian)
    assert as_mechanism(odometer, asked.privacy_loss(1.0)) == ZeroConcentrated(rho=0.25)
    with dim.Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.create("b", dim.Budget(epsilon=4, delta=1e-6), composition="renyi")
        ledger.charge("b", [charge])
        with pytest.raises(BudgetRefused):
            ledger.charge("b", [ZeroConcentrated(rho=10.0)])


def test_a_loss_with_a_delta_is_refused() -> None:
    scalar = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
    curve = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*scalar, scale=2.0))
    with pytest.raises(InputError, match="SmoothedMaxDivergence"):
        as_mechanism(curve, 1.0)
    with pytest.raises(InputError, match="loss"):
        as_mechanism(dp.m.make_gaussian(*scalar, scale=2.0), float("inf"))

"""Prices of releases other than training steps are upper bounds, and draw on the same budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledgers import step
from scipy.integrate import quad
from scipy.stats import norm

from diminuendo import Budget, BudgetRefused, InputError, Ledger
from diminuendo.accounting.filters import RenyiFilter
from diminuendo.cli import main
from diminuendo.ledger import granted_events, verify
from diminuendo.ledger.mechanisms import (
    DiscreteGaussian,
    Laplace,
    Mechanism,
    PureEpsilon,
    RenyiCurve,
    ZeroConcentrated,
    from_json,
    to_json,
)
from diminuendo.ledger.terms import Terms

EVERY: list[Mechanism] = [
    Laplace(scale=5.0),
    PureEpsilon(epsilon=0.1, count=3),
    DiscreteGaussian(noise_multiplier=20.0),
    ZeroConcentrated(rho=0.001, count=2),
    RenyiCurve(curve={2: 0.01, 16: 0.05, 64: 0.2}),
]
ORDERS = (2, 3, 8, 40)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0, 50.0])
def test_laplace_costs_its_divergence(order: int, scale: float) -> None:
    def ratio(x: float) -> float:
        log_p, log_q = -abs(x) / scale, -abs(x - 1) / scale
        return math.exp(order * log_p + (1 - order) * log_q) / (2 * scale)

    ends = (-math.inf, 0.0, 1.0, math.inf)
    total = sum(quad(ratio, ends[i], ends[i + 1], epsabs=0.0)[0] for i in range(3))
    exact = math.log(total) / (order - 1)
    told = Laplace(scale=scale).divergence(order)
    assert exact * (1 - 1e-7) <= told <= exact * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2.0, 8.0])
def test_pure_epsilon_covers_randomised_response(epsilon: float) -> None:
    p = 1 / (1 + math.exp(-epsilon))
    for order in ORDERS:
        both = p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)
        assert math.log(both) / (order - 1) <= PureEpsilon(epsilon=epsilon).divergence(order)
    mu = PureEpsilon(epsilon=epsilon).mu()
    for level in np.linspace(0, 1, 201):
        tradeoff = max(0.0, 1 - math.exp(epsilon) * level, math.exp(-epsilon) * (1 - level))
        assert norm.cdf(norm.isf(level) - mu) <= tradeoff + 1e-12


@pytest.mark.parametrize("sigma", [0.7, 1.0, 5.0])
def test_a_discrete_gaussian_costs_no_more_than_is_charged(sigma: float) -> None:
    x = np.arange(-400, 400)
    log = -(x**2) / (2 * sigma**2)
    p = np.exp(log - np.logaddexp.reduce(log))
    for order in (2, 3, 8):
        shifted = np.roll(log, 1)
        total = np.logaddexp.reduce((order * log + (1 - order) * shifted)[1:])
        exact = (total - np.logaddexp.reduce(log)) / (order - 1)
        told = DiscreteGaussian(noise_multiplier=sigma).divergence(order)
        assert exact <= told * (1 + 1e-9)
    assert p.sum() == pytest.approx(1)


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.1), (2.0, 0.3), (5.0, 0.01), (3.0, 1.0)])
def test_replacing_one_costs_no_more_than_is_charged(sigma: float, rate: float) -> None:
    budget = Budget(epsilon=50, delta=1e-5, relation="replace-one")

    def log_mixture(x: float, center: float) -> float:
        parts = np.atleast_1d(norm.logpdf(x, [0, center], sigma))
        rest = math.log1p(-rate) if rate < 1 else -math.inf
        return float(np.logaddexp(rest + parts[0], math.log(rate) + parts[1]))

    def ratio(x: float, a: int) -> float:
        return math.exp(a * log_mixture(x, 1) + (1 - a) * log_mixture(x, -1))

    for order in (2, 3, 6):
        wide = 12 * sigma + 2 * order
        total, _ = quad(ratio, -wide, wide, args=(order,), limit=500, epsabs=0)
        exact = math.log(total) / (order - 1)
        price = RenyiFilter(budget, order=order).costs([step(sigma, rate=rate)])[0] / 2**200
        assert exact * (1 - 1e-9) <= price
        if rate == 1:
            assert price == pytest.approx(exact, rel=1e-6)


def test_statistics_and_training_draw_on_one_budget(ledger: Ledger) -> None:
    ledger.create("b", Budget(epsilon=4, delta=1e-6), composition="renyi", order=12)
    ledger.charge("b", EVERY, label="statistics")
    ledger.charge("b", [step(2.0, rate=0.01, count=100)])
    order = ledger.status("b").terms.order
    assert order == 12
    both = sum(ledger.status("b").terms.costs([*EVERY, step(2.0, rate=0.01, count=100)]))
    assert ledger.status("b").spent_units == both
    assert granted_events(ledger, "b")[: len(EVERY)] == EVERY
    with pytest.raises(BudgetRefused, match="1000 steps were asked for"):
        ledger.charge("b", [PureEpsilon(epsilon=1.0, count=1000)])
    part = ledger.charge("b", [PureEpsilon(epsilon=0.5, count=1000)], partial=True)
    assert 0 < part.granted < 1000
    verify(ledger)


def test_a_gaussian_budget_takes_what_implies_a_mu(ledger: Ledger) -> None:
    ledger.create("b", Budget(epsilon=4, delta=1e-6))
    ledger.charge("b", [Laplace(scale=10.0), PureEpsilon(epsilon=0.1)])
    for mechanism in EVERY[2:]:
        with pytest.raises(InputError, match='composition="renyi"'):
            ledger.charge("b", [mechanism])
    run = ledger.open_run("b").id
    ledger.grant(run, [Laplace(scale=10.0, count=10)], start=False)
    ledger.start(run, 4)
    ledger.close_run(run, used=4)
    assert verify(ledger).steps == 6


@pytest.mark.parametrize("mechanism", EVERY)
def test_written_and_read(mechanism: Mechanism) -> None:
    assert from_json(*json.loads(json.dumps(to_json(mechanism)))) == mechanism


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Laplace(scale=0.0),
        lambda: PureEpsilon(epsilon=math.inf),
        lambda: ZeroConcentrated(rho=-1.0),
        lambda: RenyiCurve(curve={}),
        lambda: RenyiCurve(curve={1: 0.1}),
        lambda: RenyiCurve(curve={2: 0.1}).divergence(3),
        lambda: Laplace(scale=1.0, count=0),
        lambda: DiscreteGaussian(noise_multiplier=1e-200).cost(4),
        lambda: from_json("exec", {}, 1),
    ],
)
def test_bad_releases(bad: Any) -> None:
    with pytest.raises(InputError):
        bad()


def test_a_replace_one_renyi_budget(ledger: Ledger) -> None:
    budget = Budget(epsilon=4, delta=1e-6, relation="replace-one")
    ledger.create("b", budget, composition="renyi", typical=step(2.0, rate=0.01))
    ledger.charge("b", [step(2.0, rate=0.01, count=10**6)], partial=True)
    add_remove = Terms(name="x", budget=Budget(epsilon=4, delta=1e-6), composition="renyi",
                       order=ledger.status("b").terms.order)  # fmt: skip
    taken = ledger.runs("b")[0].granted
    assert 100 < taken < add_remove.limit // add_remove.costs([step(2.0, rate=0.01)])[0]
    verify(ledger)


def test_charged_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIMINUENDO_LEDGER", str(tmp_path / "l.sqlite"))
    (tmp_path / "curve.json").write_text('{"2": 0.01, "64": 0.1}')
    create = ["create", "p", "--epsilon", "4", "--delta", "1e-6", "--composition", "renyi"]
    assert main(["ledger", *create, "--order", "12"]) == 0
    for words in (["--laplace", "8"], ["--pure-epsilon", "0.1"], ["--rho", "0.001"],
                  ["--discrete-sigma", "30"], ["--renyi", str(tmp_path / "curve.json")],
                  ["--sigma", "30", "--steps", "2"]):  # fmt: skip
        assert main(["ledger", "charge", "p", *words]) == 0
    for words in ([], ["--laplace", "8", "--rho", "1"], ["--rho", "1", "--sampling-rate", "0.1"]):
        assert main(["ledger", "charge", "p", *words]) == 2
    capsys.readouterr()
    assert main(["ledger", "verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 7

"""The seam: four verbs, and what is left of them after a crash."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import diminuendo as dim
from diminuendo.accounting import GaussianFilter
from diminuendo.ledger import LedgerSpending
from diminuendo.spending import (
    AdaptiveSpending,
    Payer,
    PlanSpending,
    Spending,
    first_steps,
    from_ledger,
)

BUDGET = dim.Budget(epsilon=4, delta=1e-5)


@pytest.fixture
def plan() -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        return dim.plan(BUDGET, examples=30, parameters=15, steps=8)


@pytest.fixture
def ledger(tmp_path: Path) -> dim.Ledger:
    made = dim.Ledger(tmp_path / "ledger.sqlite")
    made.create("b", BUDGET)
    return made


def step(sigma: float, count: int = 1) -> dim.GaussianStep:
    return dim.GaussianStep(noise_multiplier=sigma, count=count)


def test_first_steps_splits_counts() -> None:
    events = [step(2.0, 3), step(3.0, 4)]
    assert list(first_steps(events, 5)) == [step(2.0, 3), step(3.0, 2)]
    assert list(first_steps(events, 99)) == events
    assert list(first_steps(events, 0)) == []
    assert list(first_steps(events, -1)) == []


def test_steps_that_may_have_been_released_stay_spent(plan: dim.Plan) -> None:
    before = PlanSpending(plan)
    for event in first_steps(plan.events, 3):
        before.request(event)
    after = PlanSpending(plan)
    coming = [step(float(sigma)) for sigma in plan.sigmas[3:]]
    assert after.resume(before.state(), seen=5, events=coming) == after.steps == 5
    assert after.epsilon() == pytest.approx(plan.epsilon_after(5), rel=1e-9)
    assert PlanSpending(plan).resume(before.state()) == 3
    with pytest.raises(dim.InputError, match="granted nothing yet"):
        after.resume(before.state())


def test_what_would_be_refused_was_not_released() -> None:
    spending = AdaptiveSpending(GaussianFilter(BUDGET))
    most = int(BUDGET.R * 4)
    assert spending.resume(seen=most + 5, events=[step(2.0)] * (most + 5)) == most
    assert spending.epsilon() == BUDGET.epsilon


def test_a_ledger_makes_its_own_spending(ledger: dim.Ledger, plan: dim.Plan) -> None:
    assert isinstance(ledger, Payer)
    assert ledger.runs("b") == []
    with ledger.pay("b", plan, label="a try") as spending:
        spending.request(step(float(plan.sigmas[0])))
    [run] = ledger.runs("b")
    assert (run.status, run.confirmed, run.opened["label"]) == ("closed", 1, "a try")
    for where in (ledger, ledger.url.database):
        assert isinstance(from_ledger(where, "b", plan), LedgerSpending)


def test_data_are_compared_where_the_budget_has_some(ledger: dim.Ledger, plan: dim.Plan) -> None:
    x = np.arange(6.0)
    ledger.create("tied", BUDGET, data=dim.ledger.identify(x))
    ledger.pay("tied", plan, data=x).resume()
    with pytest.raises(dim.InputError, match="the data of the budget"):
        ledger.pay("tied", plan, data=x + 1).resume()
    ledger.pay("b", plan, data=object()).resume()


def test_a_state_replaces_a_run_that_was_just_begun(ledger: dim.Ledger, plan: dim.Plan) -> None:
    first = ledger.pay("b", plan, ahead=2)
    first.request(step(float(plan.sigmas[0])))
    saved = first.state()
    second = ledger.pay("b", plan, ahead=2)
    second.resume()
    assert second.resume(saved, seen=1) == 1
    assert second.run == first.run
    assert [run.status for run in ledger.runs("b")] == ["open", "closed"]


def test_old_names_say_the_new_ones(ledger: dim.Ledger, plan: dim.Plan) -> None:
    spending = ledger.pay("b", plan)
    with pytest.warns(DeprecationWarning, match="resume"):
        spending.begin()
    with pytest.warns(DeprecationWarning, match="close"):
        spending.end("stopped")
    assert ledger.runs("b")[0].status == "closed"


def test_the_seam_is_small() -> None:
    """A verb more is a verb that every spending, wrapper and test has to know."""
    public = {name for name in vars(Spending) if not name.startswith("_")}
    verbs = {"fits", "request", "resume", "close"}
    values = {"granted", "epsilon", "state", "receipt", "cite", "adaptive", "durable", "unit"}
    assert public == verbs | values


ALONE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from diminuendo.planning import Plan
from diminuendo.training import fit
plan = Plan.from_json(open(sys.argv[2]).read())
x, y = torch.randn(30, 4), torch.randint(0, 3, (30,))
loss = torch.nn.CrossEntropyLoss(reduction="none")
assert not [name for name in sys.modules if name.startswith("diminuendo.ledger")]
result = fit(torch.nn.Linear(4, 3), (x, y), plan, loss=loss, lr=0.1, progress=False,
             ledger=sys.argv[1], budget="b")
print(result.status, result.steps)
"""


def test_fit_finds_the_ledger_by_its_path_alone(
    ledger: dim.Ledger, plan: dim.Plan, tmp_path: Path
) -> None:
    """Training imports no ledger: the package's front door has told it where to find one."""
    (tmp_path / "plan.json").write_text(plan.to_json())
    arguments = [str(ledger.url.database), str(tmp_path / "plan.json")]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["done", "8"], done.stderr
    assert ledger.runs("b")[0].confirmed == 8

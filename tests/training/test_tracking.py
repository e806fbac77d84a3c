"""A tracker is told what the plan fixed and what was paid for, and cannot end a paid run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger
from diminuendo.accounting.filters import GaussianFilter
from diminuendo.planning import Plan
from diminuendo.spending import AdaptiveSpending
from diminuendo.training import Fact, Progress, Result, fit


class Kept:
    """A logger that keeps everything, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[tuple[str, Any]] = []
        self.fails = fails

    def _tell(self, name: str, what: Any) -> None:
        if name == self.fails:
            raise ConnectionError("no tracker")
        self.told.append((name, what))

    def begin(self, facts: Mapping[str, Fact]) -> None:
        self._tell("begin", dict(facts))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._tell("step", (step, dict(values)))

    def end(self, facts: Mapping[str, Fact]) -> None:
        self._tell("end", dict(facts))

    @property
    def steps(self) -> list[dict[str, float]]:
        return [what[1] for name, what in self.told if name == "step"]


def planned(**more: Any) -> Plan:
    return dim.plan(
        Budget(epsilon=4, delta=1e-5), examples=20, parameters=6, steps=4, gamma=0.9, **more
    )


def trained(plan: Plan, progress: Progress, **more: Any) -> Result:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(20, 2, generator=generator), torch.arange(20) % 2)
    loss = nn.CrossEntropyLoss(reduction="none")
    return fit(nn.Linear(2, 2), data, plan, loss=loss, lr=0.5, progress=progress, **more)


def test_the_plans_numbers_and_nothing_else() -> None:
    plan = planned(lr=[1.0, 0.5, 0.25, 0.125])
    logger = Kept()
    result = trained(plan, Progress(shown=False, logger=logger))
    assert [name for name, _ in logger.told] == ["begin", *["step"] * 4, "end"]
    assert [what[0] for name, what in logger.told if name == "step"] == [1, 2, 3, 4]
    assert all(
        set(values) == {"noise_multiplier", "epsilon", "learning_rate"} for values in logger.steps
    )
    assert [values["noise_multiplier"] for values in logger.steps] == plan.sigmas.tolist()
    assert [values["learning_rate"] for values in logger.steps] == [0.5, 0.25, 0.125, 0.0625]
    epsilons = [values["epsilon"] for values in logger.steps]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == plan.epsilon
    assert all(plan.epsilon_after(t) <= epsilons[t - 1] for t in range(1, 5))
    begun, ended = logger.told[0][1], logger.told[-1][1]
    assert begun["plan"] == plan.digest
    assert begun["private"] is True
    assert (ended["status"], ended["steps"], ended["epsilon"]) == ("done", 4, result.epsilon)
    assert ended["delta"] >= plan.budget.delta


def test_a_loss_only_where_it_was_asked_for_and_no_epsilon_with_a_seed() -> None:
    logger = Kept()
    trained(planned(), Progress(shown=False, logger=logger, reveal_training_loss=True), seed=1)
    assert all(
        set(values) == {"noise_multiplier", "learning_rate", "training_loss_not_private"}
        for values in logger.steps
    )


def test_a_policys_own_noise() -> None:
    logger = Kept()
    budget = Budget(epsilon=4, delta=1e-5)
    plan = planned()
    trained(
        plan,
        Progress(shown=False, logger=logger),
        policy=lambda released: 2.0 + released.step % 3,
        spending=AdaptiveSpending(GaussianFilter(budget)),
    )
    assert [values["noise_multiplier"] for values in logger.steps[:3]] == [2.0, 3.0, 4.0]
    assert {values["epsilon"] for values in logger.steps} == {4.0}


def test_a_tracker_that_cannot_be_reached_ends_the_run_before_it_is_paid(tmp_path: Path) -> None:
    plan = planned()
    with Ledger(str(tmp_path / "l.sqlite")) as ledger:
        ledger.create("b", plan.budget)
        progress = Progress(shown=False, logger=Kept("begin"))
        with pytest.raises(ConnectionError):
            trained(plan, progress, ledger=ledger, budget="b")
        assert ledger.status("b").spent == 0


@pytest.mark.parametrize("fails", ["step", "end"])
def test_a_tracker_that_fails_later_does_not(fails: str) -> None:
    logger = Kept(fails)
    with pytest.warns(UserWarning, match="no tracker.*goes on"):
        result = trained(planned(), Progress(shown=False, logger=logger))
    assert (result.status, result.steps) == ("done", 4)


def test_it_is_told_of_errors_and_refusals(tmp_path: Path) -> None:
    logger = Kept()

    def stop(step: int, _: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(planned(), Progress(shown=False, logger=logger, after_step=stop))
    assert logger.told[-1] == ("end", {"status": "KeyboardInterrupt", "steps": 2})
    with Ledger(str(tmp_path / "l.sqlite")) as ledger:
        ledger.create("b", Budget(epsilon=1, delta=1e-5))
        refused = Kept()
        with pytest.raises(BudgetRefused):
            trained(planned(), Progress(shown=False, logger=refused), ledger=ledger, budget="b")
    assert [name for name, _ in refused.told] == ["begin", "end"]
    assert refused.told[-1][1]["status"] == "BudgetRefused"


def test_what_is_no_logger() -> None:
    with pytest.raises(InputError, match="begin, step and end"):
        Progress(logger=print)  # type: ignore[arg-type]

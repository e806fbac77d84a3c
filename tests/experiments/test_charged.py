"""Tuning on private data: everything is charged, nothing is above the budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diminuendo as dim
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.experiments import auxiliary, charged
from diminuendo.experiments.auxiliary import Shape
from diminuendo.experiments.networks import TwoLayers
from diminuendo.experiments.tuning import Space

BUDGET = dim.Budget(epsilon=4, delta=1e-6)
DATA = auxiliary.gaussian(Shape(examples=50, features=5, classes=2))


def tune(**changes: Any) -> charged.Charged:
    given: dict[str, Any] = {
        "model": TwoLayers(5, 6, 2),
        "space": Space(steps=(2, 5)),
        "trials": 3,
        "progress": False,
    }
    return charged.tune_on_private(BUDGET, DATA, **{**given, **changes})


def test_everything_together_is_on_the_budget_and_not_above() -> None:
    found = tune()
    final = float(np.sum(found.plan.sigmas**-2.0))
    together = 4 * final + 3 / found.score_noise**2
    assert found.spent == pytest.approx(together, rel=1e-6)
    assert together <= BUDGET.R
    assert dim.Budget.from_R(together, delta=1e-6).epsilon <= BUDGET.epsilon
    assert 0.999 * BUDGET.epsilon < found.epsilon <= BUDGET.epsilon
    assert found.plan.epsilon < 0.6 * BUDGET.epsilon
    assert len(found.scores) == 3


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize("trials", [1, 7, 100])
def test_shares(relation: Any, trials: int) -> None:
    budget = dim.Budget(epsilon=1, delta=1e-5, relation=relation)
    noise = math.sqrt(trials / (0.1 * budget.R))
    each = charged.share(budget, trials, noise)
    total = (trials + 1) * each + trials / noise**2
    assert 0.99999 * budget.R < total <= budget.R


def test_scores_that_cost_too_much_are_refused() -> None:
    with pytest.raises(BudgetRefused, match="more noise"):
        tune(score_noise=0.5)


def test_machines_that_share_a_study_train_no_more_than_was_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees the number of trials before the others' last ones are in."""
    trained = []
    original = charged.trained_by
    monkeypatch.setattr(charged, "trained_by", lambda *a: (trained.append(1), original(*a))[1])
    monkeypatch.setattr(charged.Search, "asked", lambda _: 0)
    storage = f"sqlite:///{tmp_path}/s.db"
    first, second = tune(storage=storage), tune(storage=storage)
    assert len(trained) == 3
    assert first.plan == second.plan
    assert len(second.scores) == 3


def test_a_trial_cut_short_stays_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three trials dies; taken up again, one more is run and not two."""
    storage, runs, real = f"{tmp_path}/s.journal", [], charged.fit

    def dying(*arguments: Any, **named: Any) -> Any:
        runs.append(1)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(charged, "fit", dying)
    with pytest.raises(KeyboardInterrupt):
        tune(storage=storage)
    found = tune(storage=storage)
    assert len(runs) == 3
    assert len(found.scores) == 2


def test_bad_input() -> None:
    with pytest.raises(InputError, match="something to tune"):
        tune(space=Space(steps=3, fall=0.5))
    with pytest.raises(InputError, match="family"):
        tune(family="optimal")
    with pytest.raises(InputError, match="trials"):
        tune(trials=0)

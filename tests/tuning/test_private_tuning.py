"""Tuning on private data: everything is private_tuning, nothing is above the budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.storages.journal import JournalFileBackend, JournalStorage
from torch import nn

import diminuendo as dim
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.training import fit
from diminuendo.tuning import (
    PrivateTuningResult,
    Shape,
    Space,
    TwoLayers,
    auxiliary,
    private_tuning,
)
from diminuendo.tuning.search import Search

BUDGET = dim.Budget(epsilon=4, delta=1e-6)
DATA = auxiliary.gaussian(Shape(examples=50, features=5, classes=2))


def tune(**changes: Any) -> PrivateTuningResult:
    given: dict[str, Any] = {
        "data": DATA,
        "model": TwoLayers(5, 6, 2),
        "space": Space(steps=(2, 5)),
        "trials": 3,
        "progress": False,
    }
    return private_tuning.tune_on_private(BUDGET, **{**given, **changes})


def test_everything_together_is_on_the_budget_and_not_above() -> None:
    result = tune()
    final = float(np.sum(result.plan.sigmas**-2.0))
    together = 4 * final + 3 / result.score_noise**2
    assert result.spent == pytest.approx(together, rel=1e-6)
    assert together <= BUDGET.R
    assert dim.Budget.from_R(together, delta=1e-6).epsilon <= BUDGET.epsilon
    assert 0.999 * BUDGET.epsilon < result.epsilon <= BUDGET.epsilon
    assert result.plan.epsilon < 0.6 * BUDGET.epsilon
    assert len(result.scores) == 3


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize("trials", [1, 7, 100])
def test_shares(relation: Any, trials: int) -> None:
    budget = dim.Budget(epsilon=1, delta=1e-5, relation=relation)
    noise = math.sqrt(trials / (0.1 * budget.R))
    each = private_tuning.share(budget, trials, noise)
    total = (trials + 1) * each + trials / noise**2
    assert 0.99999 * budget.R < total <= budget.R


def test_scores_that_cost_too_much_are_refused() -> None:
    with pytest.raises(BudgetRefused, match="more noise"):
        tune(score_noise=0.5)


def test_machines_that_share_a_study_train_no_more_than_was_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees the number of trials before the others' last ones are in."""
    trained: list[int] = []
    original = private_tuning.train_privately

    def counted(*arguments: Any) -> nn.Module:
        trained.append(1)
        return original(*arguments)

    monkeypatch.setattr(private_tuning, "train_privately", counted)
    monkeypatch.setattr(Search, "proposed", lambda _: 0)
    storage = f"sqlite:///{tmp_path}/s.db"
    first, second = tune(storage=storage), tune(storage=storage)
    assert len(trained) == 3
    assert first.plan == second.plan
    assert len(second.scores) == 3


def test_a_trial_cut_short_stays_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three trials dies; taken up again, one more is run and not two."""
    storage = f"{tmp_path}/s.journal"
    runs: list[int] = []

    def dying(*arguments: Any, **named: Any) -> Any:
        runs.append(1)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return fit(*arguments, **named)

    monkeypatch.setattr(private_tuning, "fit", dying)
    with pytest.raises(KeyboardInterrupt):
        tune(storage=storage)
    result = tune(storage=storage)
    assert len(runs) == 3
    assert len(result.scores) == 2


@pytest.mark.parametrize("patience", [3600.0, 0.0])
def test_no_plan_while_trials_are_under_way_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Another process comes by during the second of three trials: there is one plan in the end."""
    storage = f"{tmp_path}/s.journal"
    runs: list[int] = []
    others: list[PrivateTuningResult] = []

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        runs.append(1)
        if len(runs) == 2 and patience == 0:
            others.append(tune(storage=storage, patience=0))
        elif len(runs) == 2:
            with pytest.raises(InputError, match="1 running"):
                tune(storage=storage)
        return fit(*arguments, **named)

    monkeypatch.setattr(private_tuning, "fit", meanwhile)
    result = tune(storage=storage)
    others.append(tune(storage=storage))
    assert len(runs) == 3
    assert len(result.scores) == (3 if patience else 2)
    assert all(other.plan == result.plan for other in others)
    assert all(other.scores == result.scores for other in others)


def test_no_trial_waits_where_two_could_take_it(tmp_path: Path) -> None:
    tune(storage=f"{tmp_path}/s.journal", trials=1)
    storage = JournalStorage(JournalFileBackend(f"{tmp_path}/s.journal"))
    (study,) = storage.get_all_studies()
    assert [t.state.name for t in storage.get_all_trials(study._study_id)] == ["COMPLETE"]


def test_ties_go_to_the_earlier_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_tuning, "noisy_correct", lambda *_: 25.0)
    result = tune(storage=f"{tmp_path}/s.journal")
    assert result.candidate == result.scores[0][0]


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    def smooth() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))

    tune(storage=f"{tmp_path}/s.journal", trials=1)
    with pytest.raises(InputError, match="others: model"):
        tune(storage=f"{tmp_path}/s.journal", trials=1, model=smooth)


def test_arrays_are_taken() -> None:
    data = (DATA[0].double().numpy(), DATA[1].int().numpy())
    assert len(tune(data=data, trials=1).scores) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"family": "exponentail"}, "family"),
        ({"data": (DATA[0].double(), DATA[1])}, "precision"),
        ({"data": (DATA[0][:, :4], DATA[1])}, "inputs"),
        ({"data": (DATA[0], DATA[1] + 1)}, "labels from 0 to 1"),
        ({"data": (DATA[0], DATA[1].float())}, "int64"),
        ({"data": DATA[0]}, "a pair"),
        ({"patience": -1}, "patience"),
        ({"device": "gpu"}, "device"),
    ],
)
def test_nothing_is_asked_for_before_the_input_is_checked(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        tune(**changes, storage=f"{tmp_path}/s.journal")
    assert list(tmp_path.iterdir()) == []


def test_bad_input() -> None:
    with pytest.raises(InputError, match="a setting to search"):
        tune(space=Space(steps=3, fall=0.5))
    with pytest.raises(InputError, match="family"):
        tune(family="optimal")
    with pytest.raises(InputError, match="trials"):
        tune(trials=0)

"""Tuning: the same effort for all, resumable, refused where it makes no sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import diminuendo as dim
from diminuendo.errors import InputError
from diminuendo.measuring import MeasuredInfluence
from diminuendo.replicas import Replica, train
from diminuendo.tuning import (
    Shape,
    Space,
    TuningResult,
    TwoLayers,
    auxiliary,
    auxiliary_tuning,
    search,
)

BUDGET = dim.Budget(epsilon=4, delta=1e-8)
SHAPE = Shape(examples=40, features=5, classes=2)
SMALL: dict[str, Any] = {
    "model": TwoLayers(5, 6, 2),
    "space": Space(steps=(3, 9)),
    "trials": 5,
    "repeats": 2,
    "batch": 3,
    "progress": False,
}


def tune(**changes: Any) -> TuningResult:
    return dim.tune(BUDGET, SHAPE, **{**SMALL, **changes})


def test_every_family_gets_the_same_effort_and_a_plan_on_the_budget() -> None:
    tuned = tune(
        families=("uniform", "exponential", "step", "optimal"),
        influence=lambda T: dim.influence.gradient_descent(gamma=0.9, steps=T),
    )
    for family, chosen in tuned.families.items():
        assert len(chosen.trials) == 5
        assert chosen.plan.schedule == family
        assert BUDGET.epsilon * (1 - 1e-6) < chosen.plan.epsilon <= BUDGET.epsilon
        assert 3 <= chosen.plan.steps <= 9
        scores = [trial.score for trial in chosen.trials if trial.score is not None]
        assert chosen.score == min(scores)
    assert tuned.best.score == min(c.score for c in tuned.families.values())
    assert json.loads(json.dumps(tuned.to_dict()))["best"] == tuned.best.family
    assert len(tuned.points()) == 20


def smooth() -> nn.Module:
    """Of the parameters of SMALL's network."""
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def privately_measured(source: Any = "private") -> MeasuredInfluence:
    estimates = np.array([[0.4, 0.6, 1.0], [0.5, 0.7, 1.1]])
    return MeasuredInfluence(np.array([1, 3, 5]), estimates, 5, 0.95, source)


@pytest.mark.parametrize("source", ["private", "auxiliary"])
@pytest.mark.parametrize("fixed", [True, False])
def test_an_influence_that_is_not_private_is_said_wherever_it_went(
    source: str, fixed: bool
) -> None:
    measured = privately_measured(source)
    tuned = tune(
        families=("optimal",),
        influence=measured.curve() if fixed else measured.curve,
        space=Space(steps=5, lr=(0.1, 0.2)) if fixed else Space(steps=(3, 9)),
        trials=2,
    )
    marked = "NOT private" in " ".join(tuned.best.plan.assumptions)
    told = tuned.to_dict()
    assert marked == (source == "private")
    assert ("NOT private" in (told["warning"] or "")) == marked
    assert ("NOT private" in " ".join(told["families"]["optimal"]["assumptions"])) == marked


def test_one_marked_curve_among_those_tried_is_enough() -> None:
    measured, clean = privately_measured(), privately_measured("auxiliary")
    tuned = tune(
        families=("optimal",), influence=lambda T: (measured if T == 3 else clean).curve(T)
    )
    assert 3 in {trial.candidate.steps for trial in tuned.best.trials}
    assert "NOT private" in (tuned.warning or "")


def test_the_plan_s_noise_is_what_was_trained_with() -> None:
    space = Space(steps=(3, 9), lr=(0.05, 0.5), clip=(1.0, 4.0), momentum=(0.1, 0.8))
    chosen = tune(families=("exponential",), space=space).best
    np.testing.assert_allclose(chosen.plan.sigmas, chosen.candidate.sigmas(BUDGET), rtol=1e-12)
    assert chosen.plan.clip == chosen.candidate.clip
    assert chosen.plan.momentum == chosen.candidate.momentum
    assert chosen.lr == chosen.candidate.lr
    assert set(chosen.searched) == {"steps", "lr", "clip", "momentum", "fall"}


def test_a_score_is_the_mean_loss_of_the_ordinary_repeats() -> None:
    chosen = tune(families=("exponential",)).best
    sets = auxiliary.synthetic_sets(SHAPE, 2)
    runs = [
        Replica(sigmas=chosen.plan.sigmas, lr=chosen.lr, clip=chosen.plan.clip, seed=i, data=i)
        for i in range(2)
    ]
    outcomes = train(SMALL["model"], sets, runs, progress=False)
    assert chosen.score == pytest.approx(np.mean([o.train_loss for o in outcomes]), rel=1e-5)


def test_without_a_storage_the_same_seed_finds_the_same() -> None:
    one, other = tune(), tune()
    assert one.to_dict() == other.to_dict()


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_study_goes_on_where_it_stopped(tmp_path: Path, kind: str) -> None:
    storage = f"sqlite:///{tmp_path}/s.db" if kind == "sqlite" else f"{tmp_path}/s.journal"
    first = tune(storage=storage, families=("exponential",), trials=3)
    more = tune(storage=storage, families=("exponential",), trials=5)
    done = [trial.candidate for trial in more.best.trials]
    assert [trial.candidate for trial in first.best.trials] == done[:3]
    assert len(done) == 5
    assert tune(storage=storage, families=("exponential",), trials=5).best.plan == more.best.plan


MACHINE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_auxiliary_tuning import tune
Path(sys.argv[3]).touch()
while not Path(sys.argv[4]).exists():
    time.sleep(0.01)
found = tune(storage=sys.argv[2], trials=9, batch=2).to_dict()
print(found["best"], [len(f["trials"]) for f in found["families"].values()])
"""


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("journal", marks=pytest.mark.slow)])
def test_machines_share_a_study(tmp_path: Path, kind: str) -> None:
    """At the same time, and every family has the same effort all the same."""
    storage = f"sqlite:///{tmp_path}/s.db" if kind == "sqlite" else f"{tmp_path}/s.journal"
    here, flags = str(Path(__file__).parent), [str(tmp_path / f"ready{i}") for i in range(2)]
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", MACHINE, here, storage, flags[i], flags[1 - i]],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    said = [machine.communicate(timeout=600)[0].strip() for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0]
    assert all(line.endswith("[9, 9]") for line in said)
    after = tune(storage=storage, trials=9, batch=2)
    assert said[-1].startswith(after.best.family)
    assert len(after.points()) == 18


def test_a_candidate_that_two_have_trained_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*arguments: Any, **named: Any) -> Any:
        study = optuna.load_study(study_name="tuning: uniform", storage=storage)
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, 0.25)
        return train(*arguments, **named)

    storage = f"sqlite:///{tmp_path}/s.db"
    monkeypatch.setattr(auxiliary_tuning, "train", overtaken)
    result = tune(storage=storage, families=("uniform",), trials=2)
    assert [trial.score for trial in result.best.trials] == [0.25, 0.25]


def test_two_that_make_the_same_study_at_once_both_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's tables and names are there just before one's own."""
    real, refusals = optuna.create_study, iter(["table studies already exists", "UNIQUE failed"])

    def colliding(**given: Any) -> optuna.Study:
        if (message := next(refusals, None)) is not None:
            raise RuntimeError(message)
        return real(**given)

    monkeypatch.setattr(optuna, "create_study", colliding)
    monkeypatch.setattr(search, "_PAUSES", (0.0, 0.0, 0.0))
    result = tune(storage=f"sqlite:///{tmp_path}/s.db", families=("uniform",), trials=1)
    assert len(result.best.trials) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"space": Space(steps=(3, 8))}, "space"),
        ({"repeats": 3}, "repeats"),
        ({"model": TwoLayers(5, 7, 2)}, "parameters"),
        ({"model": smooth}, "others: model"),
        ({"auxiliary": "random"}, "labels"),
    ],
)
def test_a_study_is_not_resumed_with_other_settings(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    storage = f"{tmp_path}/s.journal"
    before = tune(storage=storage, families=("uniform",))
    with pytest.raises(InputError, match=told):
        tune(storage=storage, families=("uniform",), **changes)
    after = tune(storage=storage, families=("uniform",))
    assert after.to_dict() == before.to_dict()


def test_a_candidate_that_diverges_is_reported_and_the_others_go_on() -> None:
    space = Space(steps=(3, 9), lr=(1e-2, 1e30))
    tuned = tune(families=("uniform",), space=space, trials=12)
    scores = [trial.score for trial in tuned.best.trials]
    assert None in scores
    assert len(scores) == 12
    assert np.isfinite(tuned.best.score)


def test_nothing_finite_is_an_error() -> None:
    with pytest.raises(InputError, match="Lower the learning rate"):
        tune(families=("uniform",), space=Space(steps=(3, 9), lr=1e35))


def test_own_public_data_and_a_held_out_loss() -> None:
    sets = auxiliary.synthetic_sets(SHAPE, 2, labels="clusters")
    by_train = tune(auxiliary=sets, families=("uniform",))
    by_test = tune(auxiliary=sets, held_out=sets[::-1], families=("uniform",), minimise="test-loss")
    assert by_train.best.score != by_test.best.score
    assert tune(minimise="test-loss", families=("uniform",)).best.score > 0


def other_shape() -> tuple[torch.Tensor, torch.Tensor]:
    return auxiliary.gaussian(Shape(examples=40, features=6, classes=2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"families": ()}, "families"),
        ({"families": ("uniform", "uniform")}, "families"),
        ({"families": ("wavy",)}, "families"),
        ({"families": ("uniform",), "space": Space(steps=5)}, "a setting to search"),
        ({"families": ("optimal",)}, "influence"),
        ({"families": ("optimal",), "influence": np.ones(4)}, "steps"),
        ({"influence": np.ones(9)}, "influence"),
        ({"auxiliary": other_shape()}, "5 features"),
        ({"auxiliary": "wishes"}, "labels"),
        ({"minimise": "regret"}, "minimise"),
        ({"trials": 0}, "trials"),
        ({"storage": "nonsense://x"}, "storage"),
        ({"storage": "no/such/folder/x.journal"}, "a folder that exists"),
        ({"storage": "postgresql://me:secret@nowhere.invalid/x"}, r"//\*\*\*@nowhere"),
    ],
)
def test_bad_input(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        tune(**changes)


@pytest.mark.parametrize(
    "values",
    [
        {"steps": (0, 10)},
        {"steps": (5, 10_001)},
        {"steps": (10, 5)},
        {"steps": 2.5},
        {"lr": 0.0},
        {"lr": (0.1, 0.2, 0.3)},
        {"clip": -1.0},
        {"momentum": 1.0},
        {"fall": (0.0, 1.0)},
        {"fall": 1.5},
    ],
)
def test_bad_spaces(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        Space(**values)

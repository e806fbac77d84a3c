"""The estimators: what they learn, spend, refuse, and how they go with the rest of scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate
from sklearn.preprocessing import StandardScaler

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger
from diminuendo.adapters.sklearn import (
    NotCovered,
    PrivateClassifier,
    PrivateRegressor,
    PrivateScaler,
    PublicScaler,
    SearchCost,
    estimators,
)
from diminuendo.training import fit
from diminuendo.tuning import ChosenSettings, Shape, Space

pytestmark = pytest.mark.filterwarnings("ignore::diminuendo.PlanWarning")


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 4))
    return x, np.where(x[:, 0] + 0.3 * rng.standard_normal(300) > 0, "yes", "no")


def test_it_learns_and_says_what_it_spent() -> None:
    x, y = data()
    model = PrivateClassifier(epsilon=8, steps=40, lr=1.0, clip=1.0, hidden=0).fit(x, y)
    assert model.score(x, y) > 0.8
    assert list(model.classes_) == ["no", "yes"]
    assert np.allclose(model.predict_proba(x).sum(1), 1)
    assert 0 < model.result_.epsilon <= 8
    with pytest.raises(InputError, match="among classes"):
        PrivateClassifier(classes=["no", "maybe"]).fit(x, y)


def test_a_grid_search_is_charged_fit_by_fit(tmp_path: Path) -> None:
    x, y = data()
    url = str(tmp_path / "ledger.sqlite")
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=8, delta=1e-5))
        model = PrivateClassifier(epsilon=1, steps=10, clip=1.0, ledger=url, budget="b", hidden=3)
        search = GridSearchCV(model, {"lr": [0.1, 1.0]}, cv=2, error_score="raise")
        with pytest.warns(SearchCost, match=r"5 private models \(2 candidates × 2 folds, and"):
            search.fit(x, y)
        runs = ledger.runs("b")
        assert [run.status for run in runs] == ["closed"] * 5
        each = dim.Budget(epsilon=1, delta=1e-5).R
        whole = dim.Budget(epsilon=8, delta=1e-5).R
        assert ledger.status("b").spent == pytest.approx(5 * each / whole, rel=1e-6)
        assert search.best_estimator_.result_.ledger["run"] == runs[-1].id
        with pytest.raises(BudgetRefused, match="left"):
            PrivateClassifier(epsilon=8, steps=10, lr=1.0, clip=1.0, ledger=url, budget="b").fit(
                x, y
            )
        spent = ledger.status("b").spent
        many = GridSearchCV(model, {"lr": np.linspace(0.1, 1, 30)}, cv=2, refit=False)
        with pytest.raises(BudgetRefused, match=r"60 private models.*Nothing was fitted"):
            many.fit(x, y)
        assert ledger.status("b").spent == spent


def test_before_it_was_fitted() -> None:
    with pytest.raises(NotFittedError):
        PrivateClassifier(epsilon=1, delta=1e-5).predict(np.zeros((2, 3)))


def test_two_classes_have_one_decision_and_scorers_work() -> None:
    x, y = data()
    model = PrivateClassifier(epsilon=8, steps=20, lr=1.0, clip=1.0).fit(x, y)
    decision = model.decision_function(x)
    assert decision.shape == (300,)
    assert np.array_equal(model.predict(x) == "yes", decision > 0)
    assert roc_auc_score(y, decision) > 0.9
    assert average_precision_score(y == "yes", decision) > 0.9
    chance = model.predict_proba(x)[:, 1]
    assert np.allclose(chance, 1 / (1 + np.exp(-decision.astype(float))), atol=1e-6)
    scores = cross_validate(model, x, y == "yes", cv=2, scoring=["roc_auc", "average_precision"])
    assert scores["test_roc_auc"].min() > 0.8
    calibrated = CalibratedClassifierCV(model, cv=2).fit(x, y)
    assert calibrated.score(x, y) > 0.8
    three = np.arange(300) % 3
    model.fit(x, three)
    assert model.decision_function(x).shape == (300, 3)


@pytest.mark.parametrize(
    ("changed", "y", "words"),
    [
        ({}, np.linspace(0, 1, 300), "continuous"),
        ({}, np.zeros(300), "1 class"),
        ({"plan": "soon"}, None, "a Plan"),
        ({"hidden": -1}, None, "hidden"),
        ({"lr": 0.0}, None, "lr"),
        ({"random_state": -1}, None, "random_state"),
        ({"ledger": "x.sqlite"}, None, "given with a ledger"),
        ({"epsilon": 0.1, "scaler": PrivateScaler(-5, 5, epsilon=0.2)}, None, "whole budget"),
        ({"scaler": PublicScaler(100, 101)}, None, "most values of column"),
        ({"scaler": PublicScaler(1, 0)}, None, "above low"),
        ({"scaler": StandardScaler()}, None, "PublicScaler or a PrivateScaler"),
        ({"scaler": 3}, None, "PublicScaler or a PrivateScaler"),
    ],
)
def test_what_is_refused_before_anything_is_released(
    changed: dict[str, Any], y: np.ndarray | None, words: str
) -> None:
    x, labels = data()
    model = PrivateClassifier(**{"steps": 5, "lr": 1.0, "clip": 1.0, **changed})
    with pytest.raises(ValueError, match=words):
        model.fit(x, labels if y is None else y)
    assert not hasattr(model, "result_")


def test_a_plan_of_ones_own() -> None:
    x, y = data()
    plan = dim.plan((4, 1e-5), examples=300, parameters=10, clip=2.0, steps=7)
    model = PrivateClassifier(plan=plan, lr=1.0).fit(x, y)
    assert model.plan_ is plan
    assert model.n_iter_ == 7
    assert model.epsilon_ == model.result_.epsilon <= 4
    with pytest.raises(InputError, match="for the 299 examples"):
        model.fit(x[1:], y[1:])


def test_the_regressor_learns_within_its_bounds() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 3))
    y = 100 + 20 * x[:, 0] + rng.standard_normal(500)
    model = PrivateRegressor(epsilon=8, steps=40, lr=1.0, clip=1.0, target_bounds=(0, 200))
    assert model.fit(x, y).score(x, y) > 0.8
    far = model.predict(1000 * x)
    assert far.min() >= 0
    assert far.max() <= 200
    for bounds in (None, (1, 1), (1,), "ab"):
        with pytest.raises(InputError, match="target_bounds"):
            PrivateRegressor(target_bounds=bounds).fit(x, y)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="most values of y"):
        PrivateRegressor(target_bounds=(0, 1)).fit(x, y)


def test_a_fixed_random_state_repeats_itself_and_is_not_private() -> None:
    x, y = data()
    fixed = PrivateClassifier(steps=5, lr=1.0, clip=1.0, hidden=3, random_state=3)
    with pytest.warns(NotCovered, match="NOT private"):
        one = fixed.fit(x, y).decision_function(x)
    assert not fixed.result_.private
    with pytest.warns(NotCovered, match="NOT private"):
        assert np.array_equal(fixed.fit(x, y).decision_function(x), one)
    free = PrivateClassifier(steps=5, lr=1.0, clip=1.0)
    assert not np.array_equal(
        free.fit(x, y).decision_function(x), free.fit(x, y).decision_function(x)
    )
    assert free.result_.private


def test_groups_reach_the_fit_by_metadata_routing() -> None:
    import sklearn

    x, y = data()
    persons = np.arange(300) // 3
    model = PrivateClassifier(epsilon=8, steps=5, lr=1.0, clip=1.0)
    assert model.fit(x, y, groups=persons).plan_.examples == 100
    assert model.result_.unit == "group"
    with sklearn.config_context(enable_metadata_routing=True):
        asked = PrivateClassifier(epsilon=8, steps=5, lr=1.0, clip=1.0)
        asked.set_fit_request(groups=True)
        found = cross_validate(
            asked,
            x,
            y,
            cv=GroupKFold(2),
            params={"groups": persons},
            return_estimator=True,
        )
        assert [one.plan_.examples for one in found["estimator"]] == [50, 50]


def test_scaling_is_accounted_together_with_training(tmp_path: Path) -> None:
    x, y = data()
    scaler = PrivateScaler(-5, 5, epsilon=0.5)
    for rate in (1.0, 0.2):
        model = PrivateClassifier(
            epsilon=2, steps=20, lr=1.0, clip=1.0, scaler=scaler, sampling_rate=rate
        ).fit(x, y)
        own = model.scaler_.result_
        both = dim.accounting.claim(
            (*own.events, *model.result_.events), dim.Budget(epsilon=2, delta=1e-5)
        )
        assert model.epsilon_ == both <= 2
        assert both > 1.95
        assert own.epsilon <= 0.5
        assert model.result_.epsilon < 2
        assert model.score(x, y) > 0.7
    url = str(tmp_path / "ledger.sqlite")
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=2, delta=1e-5))
        paying = PrivateClassifier(
            epsilon=2, steps=20, lr=1.0, clip=1.0, scaler=scaler, ledger=url, budget="b"
        )
        paying.fit(x, y)
        assert len(ledger.runs("b")) == 2
        assert 0.99 < ledger.status("b").spent <= 1
        with pytest.raises(BudgetRefused, match="scaling and training together"):
            paying.fit(x, y)
        assert len(ledger.runs("b")) == 2


def test_data_that_cannot_work_are_refused_before_anything_is_spent() -> None:
    x, y = data()
    for factor, words in ((1e6, "longer"), (1e-6, "shorter")):
        with pytest.raises(InputError, match=f"(?s)scaled.*{words}.*PublicScaler"):
            PrivateClassifier(steps=5).fit(factor * x, y)
        own_risk = PrivateClassifier(steps=5, lr=1.0, clip=1.0)
        assert own_risk.fit(factor * x, y).result_.status == "done"
        low, high = -5 * factor, 5 * factor
        scaled = PrivateClassifier(
            epsilon=8, steps=20, lr=2.0, clip=1.0, scaler=PublicScaler(low, high)
        )
        assert scaled.fit(factor * x, y).score(factor * x, y) > 0.8
    x[:, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        PrivateClassifier().fit(x, y)


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_cache")
def test_whoever_gives_nothing_gets_good_settings_and_is_told() -> None:
    x, y = data()
    with pytest.warns(ChosenSettings, match=r"steps, lr, clip not given.*linear|T = \d+"):
        model = PrivateClassifier(epsilon=8).fit(x, y)
    assert model.score(x, y) > 0.85
    assert 0 < model.epsilon_ <= 8
    with pytest.warns(ChosenSettings, match="^clip not given"):
        model = PrivateClassifier(epsilon=8, steps=11, lr=0.5, schedule="uniform").fit(x, y)
    assert model.plan_.steps == 11
    assert len(set(model.plan_.sigmas)) == 1
    with pytest.warns(ChosenSettings):
        model = PrivateClassifier(epsilon=8, epochs=2, sampling_rate=0.2).fit(x, y)
    assert model.plan_.steps == 10
    assert model.plan_.sampling_rate == 0.2
    values = x[:, 0].clip(-2, 2)
    with pytest.warns(ChosenSettings):
        numbers = PrivateRegressor(epsilon=8, target_bounds=(-2, 2)).fit(x, values)
    assert numbers.score(x, values) > 0.5
    with pytest.raises(InputError, match="all given for a network"):
        PrivateRegressor(epsilon=8, target_bounds=(-2, 2), hidden=3).fit(x, values)


def test_what_tune_found_goes_straight_in() -> None:
    x, y = data()
    shape = Shape(examples=300, features=4, classes=2, largest_norm=2)
    settings: dict[str, Any] = {"rounds": 0, "repeats": 1, "progress": False}
    tuned = dim.tune((4, 1e-5), shape, models=["linear"], space=Space(clipping="flat"), **settings)
    for given in (tuned, tuned.best):
        model = PrivateClassifier(plan=given).fit(x, y)
        assert model.plan_ is tuned.best.plan
        assert clone(model).fit(x, y).plan_ == tuned.best.plan
    with pytest.raises(InputError, match="hidden"):
        PrivateClassifier(plan=tuned, hidden=5).fit(x, y)
    with pytest.raises(InputError, match="lr"):
        PrivateClassifier(plan=tuned.best.plan).fit(x, y)
    automatic = dim.tune(
        (4, 1e-5), shape, models=["linear"], space=Space(clipping="automatic"), **settings
    )
    with pytest.raises(InputError, match="flat clipping"):
        PrivateClassifier(plan=automatic).fit(x, y)


def test_a_fit_that_is_stopped_leaves_the_last_one_and_stops_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = data()
    model = PrivateClassifier(steps=3, lr=1.0, clip=1.0).fit(x, y)
    before = model.model_

    def stopped(*given: Any, **more: Any) -> Any:
        return replace(fit(*given, **more), status="interrupted")

    monkeypatch.setattr(estimators, "fit", stopped)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, np.arange(300) % 3)
    assert model.model_ is before
    assert list(model.classes_) == ["no", "yes"]
    search = GridSearchCV(model, {"lr": [0.1, 1.0]}, cv=2)
    with pytest.warns(SearchCost), pytest.raises(KeyboardInterrupt):
        search.fit(x, y)


@pytest.mark.filterwarnings("error:classes is not given")
def test_labels_that_are_read_from_the_data_are_said_to_be() -> None:
    x, y = np.zeros((20, 2)), np.arange(20) % 2
    settings: dict[str, Any] = {"steps": 2, "lr": 0.1, "clip": 1.0}
    with pytest.raises(NotCovered, match=r"classes=\[0, 1\]"):
        PrivateClassifier(**settings).fit(x, y)
    assert list(PrivateClassifier(classes=[1, 0], **settings).fit(x, y).classes_) == [0, 1]

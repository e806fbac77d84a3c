"""What is said about a Pipeline's other steps, and about a search before it begins."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, RandomizedSearchCV
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, OneHotEncoder, StandardScaler

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, Ledger
from diminuendo.adapters.sklearn import (
    NotCovered,
    PrivateClassifier,
    PrivateScaler,
    PublicEncoder,
    PublicScaler,
    SearchCost,
)
from diminuendo.budget import epsilon_of

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 3))
Y = (X[:, 0] > 0).astype(int)


def model(**more: Any) -> PrivateClassifier:
    return PrivateClassifier(
        **{"epsilon": 1.0, "classes": [0, 1], "steps": 3, "lr": 1.0, "clip": 1.0, **more}
    )


@pytest.mark.parametrize(
    ("step", "uncovered"),
    [
        (StandardScaler(), True),
        (PCA(2), True),
        (Pipeline([("a", PublicScaler(-9, 9)), ("b", StandardScaler())]), True),
        (FeatureUnion([("a", PublicScaler(-9, 9)), ("b", PCA(1))]), True),
        (ColumnTransformer([("a", StandardScaler(), [0])]), True),
        (ColumnTransformer([("a", PublicScaler(-9, 9), [0])], remainder=PCA(1)), True),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), True),
        (PublicScaler(-9, 9), False),
        (PrivateScaler(-9, 9), False),
        (Normalizer(), False),
        (FunctionTransformer(np.tanh), False),
        pytest.param(
            FunctionTransformer(lambda table: table - table.mean(0)), True, id="centred by hand"
        ),
        ("passthrough", False),
        (ColumnTransformer([("a", PublicScaler(-9, 9), [0])], remainder="passthrough"), False),
        (ColumnTransformer([("a", PublicEncoder([[0.0, 1.0]]), [0])]), False),
        (OneHotEncoder(categories=[[0]] * 3, handle_unknown="ignore", sparse_output=False), False),
    ],
    ids=repr,
)
def test_a_step_that_learns_for_nothing_is_warned_about(step: Any, uncovered: bool) -> None:
    pipeline = Pipeline([("before", step), ("last", model())])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pipeline.fit(X, Y)
    said = [str(one.message) for one in seen if one.category is NotCovered]
    assert len(said) == uncovered
    assert all("'before'" in one for one in said)


def test_a_pipeline_without_us_and_a_fit_without_a_pipeline_are_left_alone() -> None:
    make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)
    model().fit(X, Y)


def stated(search: Any) -> tuple[int, float]:
    with pytest.warns(SearchCost) as seen:
        search.fit(X, Y)
    (message,) = [str(one.message) for one in seen if one.category is SearchCost]
    number = re.search(r"fits (\d+) private models", message)
    epsilon = re.search(r"ε ≤ ([\d.]+) at", message)
    assert number is not None
    assert epsilon is not None
    return int(number[1]), float(epsilon[1])


def together(*budgets: Budget) -> float:
    return epsilon_of(sum(budget.R for budget in budgets), delta=1e-5)


def test_a_search_states_its_cost_before_its_first_fit() -> None:
    one = Budget(epsilon=1, delta=1e-5)
    number, epsilon = stated(GridSearchCV(model(), {"lr": [0.1, 1.0]}, cv=KFold(3)))
    assert number == 7
    assert epsilon == pytest.approx(together(*[one] * 7), rel=1e-3)
    grid = GridSearchCV(model(), {"epsilon": [0.5, 2.0]}, cv=2, refit=False)
    half, two = Budget(epsilon=0.5, delta=1e-5), Budget(epsilon=2, delta=1e-5)
    number, epsilon = stated(grid)
    assert number == 4
    assert epsilon == pytest.approx(together(half, half, two, two), rel=1e-3)
    drawn = RandomizedSearchCV(model(), {"lr": [0.1, 0.5, 1.0]}, n_iter=2, cv=2, random_state=0)
    assert stated(drawn)[0] == 5


def test_a_search_over_a_pipeline_counts_scaler_and_classifier() -> None:
    pipeline = Pipeline([("scale", PrivateScaler(-5, 5, epsilon=0.5)), ("learn", model())])
    number, epsilon = stated(GridSearchCV(pipeline, {"learn__lr": [0.1, 1.0]}, cv=2))
    assert number == 5
    half, one = Budget(epsilon=0.5, delta=1e-5), Budget(epsilon=1, delta=1e-5)
    assert epsilon == pytest.approx(together(*[half, one] * 5), rel=1e-3)


def test_mini_batches_are_accounted_as_such() -> None:
    search = GridSearchCV(model(sampling_rate=0.2), {"lr": [0.1, 1.0]}, cv=2)
    _, epsilon = stated(search)
    events = search.best_estimator_.plan_.events * 5
    whole = dim.accounting.claim(events, Budget(epsilon=1, delta=1e-5))
    assert epsilon == pytest.approx(whole, rel=1e-2)


def test_the_statement_comes_before_anything_is_spent(tmp_path: Path) -> None:
    url = str(tmp_path / "ledger.sqlite")
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=1, delta=1e-5))
        search = GridSearchCV(model(ledger=url, budget="b", epsilon=0.5), {"lr": [0.1]}, cv=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", SearchCost)
            with pytest.raises(SearchCost):
                search.fit(X, Y)
        assert ledger.runs("b") == []
        pipeline = Pipeline([("learn", search.estimator)])
        with pytest.raises(BudgetRefused, match="9 private models"):
            GridSearchCV(pipeline, {"learn__lr": [0.1, 1.0]}, cv=4).fit(X, Y)
        assert ledger.runs("b") == []


def test_searches_without_us_say_nothing() -> None:
    GridSearchCV(LogisticRegression(), {"C": [0.1, 1.0]}, cv=2).fit(X, Y)


@pytest.mark.parametrize(
    ("estimator", "grid"),
    [
        (CalibratedClassifierCV(model(), cv=2), {"estimator__lr": [0.1]}),
        (Pipeline([("learn", model())]), {"learn": [model(epsilon=5.0)]}),
    ],
)
def test_what_cannot_be_counted_is_not_given_a_number(estimator: Any, grid: Any) -> None:
    with pytest.warns(SearchCost, match="cannot be told here"):
        GridSearchCV(estimator, grid, cv=2).fit(X, Y)

"""A grid search pays for every fit."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import FitFailedWarning, NotFittedError
from sklearn.model_selection import GridSearchCV

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger
from diminuendo.adapters.sklearn import PrivateClassifier

pytestmark = pytest.mark.filterwarnings("ignore::diminuendo.PlanWarning")


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 4))
    return x, np.where(x[:, 0] + 0.3 * rng.standard_normal(300) > 0, "yes", "no")


def test_it_learns_and_says_what_it_spent() -> None:
    x, y = data()
    model = PrivateClassifier(epsilon=8, steps=40, lr=1.0, hidden=0).fit(x, y)
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
        model = PrivateClassifier(epsilon=1, steps=10, ledger=url, budget="b", hidden=3)
        search = GridSearchCV(model, {"lr": [0.1, 1.0]}, cv=2, error_score="raise").fit(x, y)
        runs = ledger.runs("b")
        assert [run.status for run in runs] == ["closed"] * 5
        each = dim.Budget(epsilon=1, delta=1e-5).R
        whole = dim.Budget(epsilon=8, delta=1e-5).R
        assert ledger.status("b").spent == pytest.approx(5 * each / whole, rel=1e-6)
        assert search.best_estimator_.result_.ledger["run"] == runs[-1].id
        with pytest.raises(BudgetRefused, match="left"):
            PrivateClassifier(epsilon=8, steps=10, ledger=url, budget="b").fit(x, y)
        many = GridSearchCV(model, {"lr": np.linspace(0.1, 1, 30)}, cv=2, refit=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FitFailedWarning)
            warnings.simplefilter("ignore", UserWarning)
            many.fit(x, y)
        assert np.isnan(many.cv_results_["mean_test_score"]).any()
        assert 0.95 < ledger.status("b").spent <= 1


def test_before_it_was_fitted() -> None:
    with pytest.raises(NotFittedError):
        PrivateClassifier(epsilon=1, delta=1e-5).predict(np.zeros((2, 3)))

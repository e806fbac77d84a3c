"""scikit-learn's own checks of its conventions."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from diminuendo.adapters.sklearn import (
    PrivateClassifier,
    PrivateRegressor,
    PrivateScaler,
    PublicScaler,
)

# Loose budgets: what is checked are conventions, and noise would hide them.
LOOSE: dict[str, Any] = {"epsilon": 50.0, "delta": 1e-3}
STEPS: dict[str, Any] = {"steps": 20, "lr": 1.0, "clip": 1.0}


def expected_to_fail(estimator: Any) -> dict[str, str]:
    """Checks that ask for something else than these estimators promise, with the reason."""
    if isinstance(estimator, PrivateRegressor):
        return {
            "check_regressor_data_not_an_array": "its y lies outside of the stated bounds, which "
            "is refused; other checks need bounds as narrow as these to learn anything"
        }
    return {}


@pytest.mark.filterwarnings("ignore::diminuendo.PlanWarning")
@pytest.mark.filterwarnings("ignore::diminuendo.adapters.sklearn.NotCovered")
@pytest.mark.filterwarnings("ignore:.*column-vector y was passed")
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [
        PrivateClassifier(**LOOSE, **STEPS),
        PrivateRegressor(**LOOSE, **STEPS, target_bounds=(-5, 5)),
        PublicScaler(-1000, 1000),
        PrivateScaler(-1000, 1000, **LOOSE),
    ],
    expected_failed_checks=expected_to_fail,
)
def test_conventions(estimator: Any, check: Any) -> None:
    check(estimator)

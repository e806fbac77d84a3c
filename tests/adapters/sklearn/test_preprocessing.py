"""Scaling and encoding: by public facts, or paid for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from hypothesis import given
from hypothesis import strategies as st
from sklearn.pipeline import Pipeline, make_pipeline

from diminuendo import Budget, BudgetRefused, InputError, Ledger
from diminuendo.adapters.sklearn import (
    NotCovered,
    PrivateClassifier,
    PrivateScaler,
    PublicEncoder,
    PublicScaler,
)


def test_the_public_scaler_depends_on_the_bounds_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (50, 2))
    one = PublicScaler([0, 0], [10, 20]).fit(x)
    other = PublicScaler([0, 0], [10, 20]).fit(x[:7])
    new = np.array([[5.0, 5.0], [-3.0, 40.0]])
    assert one.transform(new).tolist() == [[0, -0.5], [-1, 1]]
    assert np.array_equal(one.transform(new), other.transform(new))
    assert list(one.get_feature_names_out()) == ["x0", "x1"]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (None, 1, "low"),
        (0, None, "high"),
        ([0, 1, 2], 3, "each of the 2 columns"),
        (0, math.inf, "high"),
        ("a", 1, "low"),
        ([0, 2], [1, 2], "above low"),
        (5, 6, "most values of column 0"),
    ],
)
def test_bounds_that_are_refused(low: Any, high: Any, words: str) -> None:
    for kind in (PublicScaler, PrivateScaler):
        with pytest.raises(InputError, match=words):
            kind(low, high).fit(np.zeros((4, 2)))


def test_the_private_scaler_finds_means_and_deviations() -> None:
    """At ε = 8 the noise on a scale is about 2% of it: 0.3 is far outside."""
    rng = np.random.default_rng(0)
    x = rng.normal([3.0, -40.0], [1.0, 10.0], (4000, 2))
    scaler = PrivateScaler([-10, -100], [10, 100], epsilon=8.0).fit(x)
    assert scaler.mean_ == pytest.approx([3, -40], abs=1)
    assert scaler.scale_ == pytest.approx([1, 10], rel=0.3)
    assert 0 < scaler.result_.epsilon <= 8
    assert scaler.result_.steps == 1
    assert scaler.transform(x).std(0) == pytest.approx([1, 1], rel=0.3)
    again = PrivateScaler([-10, -100], [10, 100], epsilon=8.0).fit(x)
    assert not np.array_equal(again.mean_, scaler.mean_)


def test_little_budget_gives_no_wild_scales() -> None:
    x = np.full((10, 3), 0.5)
    scaler = PrivateScaler(-1, 1, epsilon=0.01).fit(x)
    assert (np.abs(scaler.mean_) <= 1).all()
    assert (scaler.scale_ >= 0.01).all()
    assert (np.abs(scaler.transform(x)) <= 200).all()


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_a_row_moves_the_moments_by_no_more_than_the_clip_norm(row: list[float]) -> None:
    u = np.array(row)
    assert np.linalg.norm(np.concatenate([u, u**2 - 0.5])) <= math.sqrt(5 * len(u) / 4) + 1e-12


def test_the_noise_of_the_means_is_what_the_event_says() -> None:
    """Variance of 400 draws within 5 standard errors and more: false alarm below 1e-6."""
    x = np.zeros((100, 40))
    draws = [PrivateScaler(-1, 1, epsilon=1.0).fit(x).mean_ for _ in range(10)]
    step = PrivateScaler(-1, 1, epsilon=1.0).plan_for(100, 40)
    expected = float(step.sigmas[0]) * math.sqrt(5 * 40 / 4) / 100
    assert np.std(draws) == pytest.approx(expected, rel=5.5 / math.sqrt(2 * 400))


def test_a_ledger_pays_for_the_scaler(tmp_path: Path) -> None:
    url = str(tmp_path / "ledger.sqlite")
    x = np.zeros((20, 2))
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=0.5, delta=1e-5))
        scaler = PrivateScaler(-1, 1, epsilon=0.4, ledger=url, budget="b").fit(x)
        assert 0.5 < ledger.status("b").spent < 1
        mean = scaler.mean_
        with pytest.raises(BudgetRefused):
            scaler.fit(x)
        assert np.array_equal(scaler.mean_, mean)


def test_a_ledger_that_would_not_be_charged_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "ledger.sqlite")
    with Ledger(url) as ledger:
        ledger.create("rows", Budget(epsilon=3, delta=1e-5))
    x = np.random.default_rng(0).normal(size=(50, 2))
    paid: dict[str, Any] = {"ledger": url, "budget": "rows"}
    given: dict[str, Any] = {"steps": 2, "lr": 0.1, "clip": 1.0, "classes": [0, 1]}
    scaler = PrivateScaler(-4, 4, epsilon=0.2, **paid)
    with pytest.raises(InputError, match="of the scaler"):
        PrivateClassifier(scaler=scaler, **given).fit(x, x[:, 0] > 0)
    PrivateClassifier(scaler=scaler, **paid, **given).fit(x, x[:, 0] > 0)
    with Ledger(url) as ledger:
        assert ledger.status("rows").spent > 0


def test_a_scaler_before_a_claim_for_persons_is_for_persons_too() -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    persons = np.repeat(np.arange(20), 3)
    given: dict[str, Any] = {"steps": 2, "lr": 0.1, "clip": 1.0, "classes": [0, 1]}
    both = make_pipeline(PrivateScaler(-4, 4), PrivateClassifier(**given))
    with pytest.warns(NotCovered, match="privatescaler"):
        both.fit(x, x[:, 0] > 0, privateclassifier__groups=persons)
    both.fit(x, x[:, 0] > 0, privateclassifier__groups=persons, privatescaler__groups=persons)
    assert (both[0].result_.unit, both[1].result_.unit) == ("group", "group")


def test_the_encoder_depends_on_the_categories_alone() -> None:
    x = np.array([["no", "A"], ["yes", "B"], ["maybe", "A"]], dtype=object)
    encoder = PublicEncoder([["no", "yes"], ["A", "B", "C"]]).fit(x)
    assert encoder.transform(x).tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0]]
    names = ["x0_no", "x0_yes", "x1_A", "x1_B", "x1_C"]
    assert list(encoder.get_feature_names_out()) == names
    with pytest.raises(ValueError, match="unknown categories"):
        PublicEncoder([["no", "yes"], ["A", "B", "C"]], unknown="error").fit(x)
    with pytest.raises(InputError, match="a list of values for each column"):
        PublicEncoder().fit(x)
    with pytest.raises(InputError, match="unknown"):
        PublicEncoder([["no"], ["A"]], unknown="drop").fit(x)


def test_the_scaler_protects_persons_where_it_is_told_who_they_are() -> None:
    x = np.zeros((60, 2))
    persons = np.arange(60) // 3
    scaler = PrivateScaler(-1, 1, epsilon=1.0).fit(x, groups=persons)
    assert scaler.result_.unit == "group"
    assert PrivateScaler(-1, 1, epsilon=1.0).fit(x).result_.unit == "example"
    with sklearn.config_context(enable_metadata_routing=True):
        steps = [
            ("scale", PrivateScaler(-1, 1).set_fit_request(groups=True)),
            (
                "learn",
                PrivateClassifier(steps=2, lr=1.0, clip=1.0).set_fit_request(groups=True),
            ),
        ]
        fitted = Pipeline(steps).fit(x, np.arange(60) % 2, groups=persons)
    assert [step.result_.unit for _, step in fitted.steps] == ["group", "group"]
    assert fitted.steps[1][1].plan_.examples == 20

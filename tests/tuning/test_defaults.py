"""Settings for whoever gives none: chosen on synthetic tables, kept on disk, never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diminuendo import Budget, InputError
from diminuendo.tuning import (
    ChosenSettings,
    Shape,
    Space,
    defaults,
    settings_for,
    settings_for_regression,
    tabular,
)

BUDGET = Budget(epsilon=2, delta=1e-5)
SHAPE = Shape(examples=120, features=4, classes=2, largest_norm=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "diminuendo" / "settings"


def test_what_was_chosen_is_known_the_next_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settings_for(BUDGET, SHAPE)
    assert not first.from_cache
    assert len(list(cache.iterdir())) == 1

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is trained again")

    monkeypatch.setattr(defaults, "_chosen", never)
    again = settings_for(BUDGET, SHAPE)
    assert again.from_cache
    assert again.candidate == first.candidate
    with pytest.raises(AssertionError, match="trained again"):
        settings_for(Budget(epsilon=2.1, delta=1e-5), SHAPE)
    with pytest.raises(AssertionError, match="trained again"):
        settings_for(BUDGET, SHAPE, fixed=Space(lr=1.0))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: text.replace('"steps": ', '"steps": -'),
        lambda text: text.replace('"examples": 100', '"examples": 101'),
        lambda text: json.dumps({"key": json.loads(text)["key"], "candidate": {"steps": 1}}),
        lambda text: text.replace('"lr": ', '"lr": 1e999, "x": '),
    ],
)
def test_a_file_that_was_damaged_is_made_anew(
    cache: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settings_for_regression(BUDGET, examples=100, features=3)
    (path,) = cache.iterdir()
    path.write_text(damage(path.read_text()))
    again = settings_for_regression(BUDGET, examples=100, features=3)
    assert not again.from_cache
    assert again.candidate == first.candidate
    blocked = cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert not settings_for_regression(BUDGET, examples=100, features=3).from_cache


def test_what_is_fixed_stays_and_the_rest_is_said() -> None:
    fixed = Space(steps=7, clip=0.5, momentum=0.0, fall=1.0, lr_shape="constant")
    found = settings_for(BUDGET, SHAPE, fixed=fixed)
    own = found.candidate
    assert (own.steps, own.clip, own.momentum, own.family) == (7, 0.5, 0.0, "uniform")
    assert (own.lr_shape, own.clipping, own.sampling_rate) == ("constant", "flat", 1.0)
    with pytest.warns(ChosenSettings, match=r"^lr not given: .* no cost in privacy: T = 7, lr"):
        found.say("lr")


def test_many_examples_are_stood_for_by_few() -> None:
    share = 0.01
    small = defaults.equivalent(BUDGET, share)
    assert pytest.approx(BUDGET.R / share**2, rel=1e-6) == small.R
    assert defaults.equivalent(BUDGET, 1) is BUDGET
    assert pytest.approx(1e6, rel=1e-6) == defaults.equivalent(BUDGET, 1e-9).R


def test_tables_keep_their_shape_and_differ() -> None:
    shape = Shape(examples=50, features=6, classes=3, largest_norm=2.5)
    sets = [tabular.tabular(shape, number) for number in range(6)]
    for x, y in sets:
        assert x.shape == (50, 6)
        assert set(y.tolist()) <= {0, 1, 2}
        assert float(x.norm(dim=1).max()) <= 2.5 * (1 + 1e-6)
    assert not any(torch.equal(sets[0][0], x) for x, _ in sets[1:])
    assert torch.equal(sets[3][0], tabular.tabular(shape, 3)[0])
    train, test = next(tabular.pairs(shape, 20, 1))
    assert (len(train[0]), len(test[0])) == (50, 20)


def test_regression_settings() -> None:
    found = settings_for_regression(BUDGET, examples=1000, features=5).candidate
    assert found.steps in (8, 20, 50)
    assert 0 < found.clip < 5**0.5
    given = Space(lr=0.5, clip=0.25, steps=12)
    own = settings_for_regression(BUDGET, examples=1000, features=5, fixed=given).candidate
    assert (own.lr, own.clip, own.steps) == (0.5, 0.25, 12)
    with pytest.raises(InputError, match="small enough"):
        settings_for_regression(BUDGET, examples=99, features=5, fixed=Space(lr=1e200, clip=1e200))

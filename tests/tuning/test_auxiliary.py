"""Auxiliary data has the public shape and nothing else of the private set."""

from __future__ import annotations

import pytest
import torch

from diminuendo.errors import InputError
from diminuendo.tuning import Shape, auxiliary

SHAPE = Shape(examples=200, features=8, classes=4)


@pytest.mark.parametrize("labels", auxiliary.LABELS)
def test_made_data_has_its_shape(labels: str) -> None:
    x, y = auxiliary.check_auxiliary(auxiliary.gaussian(SHAPE, labels=labels, seed=1), SHAPE)
    assert float(x.norm(dim=1).max()) == pytest.approx(10, rel=1e-5)
    torch.testing.assert_close(x.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
    assert set(y.tolist()) == set(range(4))
    again = auxiliary.gaussian(SHAPE, labels=labels, seed=1)
    assert torch.equal(again[0], x)
    assert not torch.equal(auxiliary.gaussian(SHAPE, labels=labels, seed=2)[0], x)


def test_labels_of_a_teacher_follow_the_features_and_random_ones_do_not() -> None:
    """Least squares onto the classes: right far above 1/4 of the time, or about 1/4."""
    big = Shape(examples=4000, features=8, classes=4)
    right = {}
    for labels in auxiliary.LABELS:
        x, y = auxiliary.gaussian(big, labels=labels)
        one_hot = torch.nn.functional.one_hot(y, 4).float()
        weights = torch.linalg.lstsq(x, one_hot).solution
        right[labels] = float(((x @ weights).argmax(1) == y).float().mean())
    assert right["teacher"] > 0.6
    assert right["clusters"] > 0.6
    assert right["random"] < 0.35


def test_several_sets_differ() -> None:
    one, other = auxiliary.synthetic_sets(SHAPE, 2)
    assert not torch.equal(one[0], other[0])


def bad_sets() -> list[tuple[object, str]]:
    x, y = auxiliary.gaussian(SHAPE)
    wide = torch.cat([x, x], 1)
    nan = x.clone()
    nan[0, 0] = torch.nan
    return [
        ((wide, y), "200 rows of 8 features"),
        ((x[:50], y[:50]), "200 rows of 8 features"),
        ((x, y[:50]), "one label"),
        ((x, y.float()), "one label"),
        ((x, y + 1), "labels from 0 to 3"),
        ((2 * x, y), "norms of at most 10"),
        ((nan, y), "finite"),
        ("teacher", "a pair of tensors"),
    ]


@pytest.mark.parametrize(("given", "expected"), bad_sets())
def test_data_of_another_shape_is_refused(given: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        auxiliary.check_auxiliary(given, SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values", [{"examples": 1}, {"features": 0}, {"classes": 1}, {"largest_norm": 0.0}]
)
def test_impossible_shapes(values: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Shape(**{"examples": 10, "features": 2, "classes": 2, **values})  # type: ignore[arg-type]

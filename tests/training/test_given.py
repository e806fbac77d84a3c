"""What people give to fit: arrays of all kinds are understood, and the rest is told."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import LINEAR, LOSS, run, weights
from torch import nn

from diminuendo.errors import InputError
from diminuendo.training import PrivateGradients
from diminuendo.training.sampling import Source

N, D = LINEAR.examples, LINEAR.features
make_plan, make_model, make_data = LINEAR.plan, LINEAR.model, LINEAR.data


X, Y = (part.numpy() for part in make_data())


def pandas_frames() -> tuple[Any, Any]:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(X.astype(np.float64)), pandas.Series(Y)


@pytest.mark.parametrize(
    "given",
    [
        lambda: (X.astype(np.float64), Y.astype(np.int32)),
        lambda: (X.astype(np.float16).astype(np.float64), Y.astype(np.uint8)),
        lambda: [X.astype(np.float64), torch.from_numpy(Y)],
        lambda: (X.tolist(), Y.tolist()),
        lambda: list(zip(*make_data(), strict=True)),
        pandas_frames,
    ],
)
def test_arrays_take_the_model_s_precision(given: Any) -> None:
    model = make_model()
    assert run(model, make_plan(steps=3), data=given(), seed=1).status == "done"
    expected = make_model()
    run(expected, make_plan(steps=3), seed=1)
    torch.testing.assert_close(weights(model), weights(expected), rtol=1e-2, atol=1e-2)


def test_a_model_in_double_precision_gets_doubles() -> None:
    model = make_model().double()
    assert run(model, make_plan(steps=3), data=(X, Y)).status == "done"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": (X, np.array(list("abc"))[Y])}, "numbers.*Encode"),
        ({"data": (X, Y.astype(np.float32))}, "first examples.*float32.*Long"),
        ({"data": (X, Y[:, None])}, r"y of shape \(1,\)"),
        ({"data": (X, Y + 5)}, "out of bounds"),
        ({"data": (X[:, :2], Y)}, r"x of shape \(2,\).*multiplied"),
        ({"data": tuple(part.double() for part in make_data())}, "float64.*model torch.float32"),
        ({"loss": "cross-entropy"}, 'reduction="none"'),
        ({"optimizer": torch.optim.Adam}, r"Adam\(model.parameters\(\)"),
    ],
)
def test_what_cannot_be_trained_on_is_told_before_anything_is_paid(
    options: dict[str, Any], told: str
) -> None:
    model = make_model()
    before = weights(model)
    with pytest.raises(InputError, match=re.compile(told, re.DOTALL)):
        run(model, make_plan(steps=3), **options)
    assert torch.equal(weights(model), before)
    assert "forward" not in model.__dict__


def test_one_s_own_loop_takes_arrays_too() -> None:
    model = nn.Linear(D, 3)
    private = PrivateGradients(model, make_plan(steps=2))
    shapes = []
    for x, y in private.batches((X.astype(np.float64), Y)):
        shapes.append((x.dtype, len(x)))
        private.backward(LOSS(model(x), y))
    assert shapes == [(torch.float32, N)] * 2


def test_pictures_in_bytes_stay_bytes() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (N, D), dtype=np.uint8)
    source = Source((pictures, Y.astype(np.uint8)), torch.float32)
    x, y = next(source.batches(iter([torch.arange(N)])))
    assert (x.dtype, y.dtype) == (torch.uint8, torch.int64)

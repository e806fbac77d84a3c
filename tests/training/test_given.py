"""What people give to fit: arrays of all kinds are understood, and the rest is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import LINEAR, LOSS, run, weights
from torch import nn

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training import Checkpoints, Journal, PrivateGradients, Progress, follow_plan
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


WRONG: list[Any] = [0, 1.5, float("nan"), "", [], {}, ..., np.array([1, 2]), b"x"]


@pytest.mark.parametrize("value", [*WRONG, None, True], ids=repr)
@pytest.mark.parametrize("name", ["model", "plan", "losses", "captured optimizer", "journal path"])
def test_what_a_loop_of_one_s_own_cannot_do_without(name: str, value: Any) -> None:
    def attached() -> PrivateGradients:
        return PrivateGradients(make_model(), make_plan())

    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        "model": lambda: PrivateGradients(value, make_plan()),
        "plan": lambda: PrivateGradients(make_model(), value),
        "losses": lambda: attached().captured(value, optimizer),
        "captured optimizer": lambda: attached().captured(LOSS, value),
        "journal path": lambda: Journal(value, make_plan()),
    }
    with pytest.raises(DiminuendoError, match=name.split()[-1]):
        calls[name]()


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["folder", "optimizer", "noise", "strict", "progress", "spending"])
def test_what_fit_may_be_given(name: str, value: Any) -> None:
    with pytest.raises(InputError):
        run(make_model(), make_plan(steps=3), **{name: value})


@pytest.mark.parametrize("value", [*WRONG[1:], 10**400, torch.ones(2)])
def test_where_fit_may_run(value: Any) -> None:
    with pytest.raises(InputError, match="device"):
        run(make_model(), make_plan(steps=3), device=value)


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["shown", "after_step", "logger", "reveal_training_loss"])
def test_what_is_shown_is_checked_before_a_step(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Progress(**{name: value})


@pytest.mark.parametrize("value", [0, "no", "False", None])
def test_nobody_states_by_a_word_that_a_folder_has_no_copies(value: Any) -> None:
    for make in (
        lambda: Checkpoints("run", moved=value),
        lambda: Journal("journal.json", make_plan(), moved=value),
    ):
        with pytest.raises(InputError, match="moved"):
            make()


@pytest.mark.parametrize(
    ("name", "value"), [("workers", -1), ("workers", "a"), ("pin_memory", 1), ("collate", 3)]
)
def test_how_batches_are_loaded(name: str, value: Any) -> None:
    private = PrivateGradients(make_model(), make_plan())
    with pytest.raises(InputError, match=name):
        next(private.batches(list(zip(*make_data(), strict=True)), **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", None), ("plan", None), ("strict", "yes")]
)
def test_what_follow_plan_is_given(name: str, value: Any) -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    given: dict[str, Any] = {"optimizer": optimizer, "plan": make_plan(), name: value}
    with pytest.raises(InputError, match=name):
        follow_plan(**given)


def test_a_model_with_nothing_to_train() -> None:
    with pytest.raises(DiminuendoError, match="no parameter"):
        run(nn.Identity(), make_plan())


@pytest.mark.parametrize("given", [None, 1.0, [1.0], np.ones(3)])
def test_a_loss_that_gives_no_tensor(given: Any) -> None:
    with pytest.raises(InputError, match="what loss gives"):
        run(make_model(), make_plan(), loss=lambda *_: given)

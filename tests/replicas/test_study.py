"""Data, model, loss and test sets are checked before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from toys import LOSS, Normed, Recurrent, make_data, mlp, replica

import diminuendo as dim
from diminuendo.replicas import train
from diminuendo.replicas.study import Study


def test_arrays_are_data_too() -> None:
    x, y = make_data()
    arrays: Any = (x.float().numpy(), y.int().numpy())
    (outcome,) = train(mlp, arrays, [replica()], evaluate={"test": arrays}, progress=False)
    (same,) = train(mlp, (x.float().double(), y), [replica()], progress=False)
    assert outcome.train_loss == same.train_loss


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": nn.CrossEntropyLoss()}, "one number for each example"),
        ({"y": lambda y: y + 1}, "labels from 0 to 2"),
        ({"y": lambda y: y - 1}, "labels from 0 to 2"),
        ({"y": lambda y: y.double()}, "int64"),
        ({"y": lambda y: y.int()}, "int64"),
        ({"y": lambda y: y.int(), "loss": LOSS}, "that the loss accepts"),
        ({"x": lambda x: x.float()}, "precision"),
        ({"x": lambda x: x[:, 1:]}, "that the model accepts|training inputs' shape"),
        ({"x": lambda x: x.numpy().astype(str)}, "numbers"),
        ({"x": lambda _: None}, "a pair"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_trained(
    changes: dict[str, Any], told: str
) -> None:
    x, y = make_data()
    data = changes.get("x", lambda x: x)(x), changes.get("y", lambda y: y)(y)
    loss = changes.get("loss", "cross-entropy")
    with pytest.raises(dim.InputError, match=told):
        train(mlp, data, [replica()], loss=loss, progress=False)
    with pytest.raises(dim.InputError, match=told):
        train(mlp, (x, y), [replica()], loss=loss, evaluate={"test": data}, progress=False)


def test_bad_input() -> None:
    with pytest.raises(dim.InputError, match="sigmas"):
        replica(sigmas=[1.0, -1.0])
    with pytest.raises(dim.InputError, match="lr"):
        replica(lr=[0.1])
    with pytest.raises(dim.InputError, match="at least one replica"):
        train(mlp, make_data(), [], progress=False)
    with pytest.raises(dim.InputError, match=r"Replica\.data"):
        train(mlp, make_data(), [replica(data=1)], progress=False)
    x, y = make_data()
    with pytest.raises(dim.InputError, match="of one shape"):
        train(mlp, [(x, y), (x[1:], y[1:])], [replica()], progress=False)
    with pytest.raises(dim.InputError, match="evaluate"):
        train(mlp, (x, y), [replica()], evaluate={"test": (x[:, 1:], y)}, progress=False)


def test_frozen_parameters_are_refused() -> None:
    def partly() -> nn.Module:
        model = mlp()
        model.get_parameter("0.weight").requires_grad_(False)
        return model

    with pytest.raises(dim.InputError, match="all its parameters"):
        train(partly, make_data(), [replica()], progress=False)


def test_the_kind_of_batch_follows_the_model() -> None:
    kinds = [
        Study.of(model, make_data(), [replica()], "cross-entropy", {}, None, None).kind
        for model in (mlp, lambda: Normed().double(), lambda: Recurrent().double())
    ]
    assert [kind.__name__ for kind in kinds] == ["Perceptrons", "Vmapped", "OneByOne"]

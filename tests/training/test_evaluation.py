"""Scores on test rows: the right ones, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diminuendo.errors import InputError
from diminuendo.training.evaluation import evaluate


def test_loss_and_accuracy_over_many_batches() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2500, 4), torch.randint(0, 3, (2500,))
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    model.train()
    before = torch.random.get_rng_state()
    found = evaluate(model, (x, y), nn.CrossEntropyLoss(reduction="none"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training
    with torch.no_grad():
        outputs = model[0](x)
    assert found.examples == 2500
    assert found.loss == pytest.approx(float(nn.CrossEntropyLoss()(outputs, y)), rel=1e-5)
    assert found.accuracy == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    first = evaluate(model, (x, y), nn.CrossEntropyLoss(reduction="none"), at_most=2)
    assert first.examples == 2


def test_what_has_no_classes_has_no_accuracy() -> None:
    x, y = torch.randn(10, 2), torch.randn(10, 1)

    def squared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b) ** 2).mean(dim=1)

    found = evaluate(nn.Linear(2, 1), torch.utils.data.TensorDataset(x, y), squared)
    assert found.accuracy is None
    pairs = [(x[i], y[i]) for i in range(10)]
    model = nn.Linear(2, 1)
    same = evaluate(model, pairs, squared).loss
    assert same == pytest.approx(evaluate(model, (x, y), squared).loss, rel=1e-6)


def test_a_mean_is_no_loss_of_rows() -> None:
    data = (torch.randn(5, 2), torch.randint(0, 2, (5,)))
    with pytest.raises(InputError, match="one for each of the 5 rows"):
        evaluate(nn.Linear(2, 2), data, nn.CrossEntropyLoss())
    with pytest.raises(InputError, match="pairs"):
        evaluate(nn.Linear(2, 2), (data[0],), nn.CrossEntropyLoss(reduction="none"))

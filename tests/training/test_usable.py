"""Data that cannot be trained on stop a run before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import LINEAR
from torch.utils.data import TensorDataset

from diminuendo import Budget, InputError, Ledger
from diminuendo.training import fit

LOSS = torch.nn.CrossEntropyLoss(reduction="none")


def with_entry(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = LINEAR.data()
    x = x.clone()
    x[7, 2] = value
    return x, y


def as_arrays(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.double().numpy(), y.numpy()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("given", [lambda *both: both, TensorDataset, as_arrays])
def test_values_that_are_not_finite_stop_the_run(value: float, given: Any, tmp_path: Path) -> None:
    url, plan = str(tmp_path / "ledger.sqlite"), LINEAR.plan()
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=9, delta=1e-5))
        with pytest.raises(InputError, match=r"in 1 of \d+ rows \(columns 2\)"):
            fit(
                LINEAR.model(),
                given(*with_entry(value)),
                plan,
                loss=LOSS,
                lr=1.0,
                ledger=url,
                budget="b",
                folder=tmp_path / "run",
            )
        assert ledger.runs("b") == []
    assert not (tmp_path / "run").exists()


def test_numbers_beyond_the_precision_count_as_infinite() -> None:
    x, y = as_arrays(*LINEAR.data())
    x[3] = 1e300
    with pytest.raises(InputError, match=r"columns 0, 1, 2"):
        fit(LINEAR.model(), (x, y), LINEAR.plan(), loss=LOSS, lr=1.0)


def test_a_map_style_dataset_is_not_read_in_advance() -> None:
    examples = list(zip(*with_entry(float("nan")), strict=True))
    result = fit(LINEAR.model(), examples, LINEAR.plan(), loss=LOSS, lr=1.0, progress=False)
    assert result.status == "done", "its gradient is left out, step by step"


def test_whole_numbers_are_finite() -> None:
    x, y = LINEAR.data()
    whole = np.round(x.numpy()).astype(np.int64)
    model = torch.nn.Sequential(torch.nn.Embedding(1, 1))
    with pytest.raises(Exception, match=r".") as refusal:
        fit(model, (whole, y), LINEAR.plan(), loss=LOSS, lr=1.0, progress=False)
    assert "finite numbers" not in str(refusal.value)

"""Whoever gives no learning rate gets one from synthetic data, where that stands for the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import diminuendo as dim
from diminuendo.training import fit
from diminuendo.tuning import ChosenSettings

LOSS = nn.CrossEntropyLoss(reduction="none")


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def table() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


@pytest.mark.filterwarnings("ignore::diminuendo.PlanWarning")
@pytest.mark.parametrize("hidden", [0, 6])
def test_a_table_s_learning_rate_is_chosen_and_said(hidden: int) -> None:
    x, y = table()
    torch.manual_seed(0)
    layers = (
        [nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2)] if hidden else [nn.Linear(4, 2)]
    )
    model = nn.Sequential(*layers)
    before = [p.clone() for p in model.parameters()]
    plan = dim.plan((8, 1e-5), examples=300, parameters=50, clip=1.0, steps=20)
    with pytest.warns(ChosenSettings, match=r"lr not given.*T = 20, lr .*, clip 1"):
        result = fit(model, (x, y), plan, loss=LOSS, progress=False)
    assert result.status == "done"
    assert not any(map(torch.equal, before, model.parameters()))
    assert float((model(x).argmax(1) == y).float().mean()) > 0.8


def test_other_data_need_one() -> None:
    x, y = table()
    plan = dim.plan((8, 1e-5), examples=300, parameters=10, clip=1.0, steps=3)
    weighted = nn.CrossEntropyLoss(reduction="none", weight=torch.ones(2))
    for data, loss in (
        ((x, y), weighted),
        ((x, y), lambda out, labels: LOSS(out, labels)),
        (list(zip(x, y, strict=True)), LOSS),
    ):
        with pytest.raises(dim.InputError, match="lr to be a finite number"):
            fit(nn.Linear(4, 2), data, plan, loss=loss, progress=False)
    with pytest.raises(dim.InputError, match="could not be tried on synthetic data"):
        fit(nn.Linear(5, 2), (x, y), plan, loss=LOSS, progress=False)

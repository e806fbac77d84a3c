"""A small run that a ledger pays for."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from small_runs import grouped
from torch import nn

import diminuendo as dim
from diminuendo import Budget
from diminuendo.training import fit

N, STEPS = 30, 24
BUDGET = Budget(epsilon=4, delta=1e-5)


def plan(budget: Budget = BUDGET, steps: int = STEPS) -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        return dim.plan(budget, examples=N, parameters=15, steps=steps)


def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def train(url: str, made: dim.Plan, **options: Any) -> Any:
    loss = nn.CrossEntropyLoss(reduction="none")
    settings = grouped({"loss": loss, "lr": 0.5, "budget": "b", **options})
    return fit(nn.Linear(4, 3), data(), made, ledger=url, **settings)

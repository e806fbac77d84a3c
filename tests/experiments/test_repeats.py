"""A replica equals the ordinary trainer's run; studies go on where they stopped."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import diminuendo as dim
from diminuendo.experiments import Outcome, Replica, initialise, repeats, train
from diminuendo.training import PrivateDescent, fit

N, D, CLASSES = 40, 6, 3
LOSS = nn.CrossEntropyLoss(reduction="none")


def logistic() -> nn.Module:
    return nn.Linear(D, CLASSES).double()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 9), nn.ReLU(), nn.Linear(9, CLASSES)).double()


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(D, 7, bias=False), nn.Tanh()),
        nn.Linear(7, 12),
        nn.Sigmoid(),
        nn.Linear(12, 5),
        nn.ReLU(),
        nn.Linear(5, CLASSES, bias=False),
    ).double()


class Normed(nn.Module):
    """No plain perceptron: goes through torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.nn.functional.gelu(self.norm(self.first(x))))
        return out


class Recurrent(nn.Module):
    """What torch.func cannot map: goes through the engine, one replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(2, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x.view(len(x), -1, 2))[0][:, -1])
        return out


def make_data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (N,), generator=generator)


@cache
def make_plan(steps: int, clip: float, rate: float) -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        return dim.plan(
            dim.Budget(epsilon=4, delta=1e-5),
            examples=N,
            parameters=10,
            steps=steps,
            clip=clip,
            sampling_rate=rate,
            schedule="uniform" if rate < 1 else "optimal",
        )


def trained(model: Callable[[], nn.Module], data: tuple[Tensor, Tensor], replica: Replica):
    """The same run by `fit`: a plan with the replica's σ_t."""
    plan = make_plan(replica.steps, replica.clip, replica.sampling_rate)
    np.testing.assert_array_equal(plan.sigmas, replica.sigmas)
    module = initialise(model, replica.seed)
    optimizer = PrivateDescent(module.parameters(), lr=replica.lr, beta=replica.beta)
    result = fit(
        module, data, plan, loss=LOSS, optimizer=optimizer, seed=replica.seed, progress=False
    )
    assert result.steps == replica.steps
    return module


def some_replicas(rate: float = 1.0) -> list[Replica]:
    rows = [(7, 0.5, 1.0, 0.0, 3), (12, 0.1, 0.3, 0.9, 4), (12, 0.2, 30.0, 0.5, 5)]
    return [
        Replica(
            sigmas=make_plan(steps, clip, rate).sigmas,
            lr=lr,
            clip=clip,
            beta=beta,
            seed=seed,
            sampling_rate=rate,
        )
        for steps, lr, clip, beta, seed in rows
    ]


def check(model: Callable[[], nn.Module], replicas: list[Replica], **options: object) -> None:
    data = make_data()
    outcomes = train(model, data, replicas, progress=False, keep_parameters=True, **options)
    for replica, outcome in zip(replicas, outcomes, strict=True):
        module = trained(model, data, replica)
        assert outcome.status == "done"
        assert outcome.parameters is not None
        for name, value in module.named_parameters():
            torch.testing.assert_close(
                outcome.parameters[name], value.detach(), rtol=1e-8, atol=1e-9
            )
        logits = module(data[0]).detach()
        assert outcome.train_loss == pytest.approx(float(LOSS(logits, data[1]).mean()), rel=1e-8)
        right = float((logits.argmax(1) == data[1]).double().mean())
        assert outcome.train_accuracy == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("model", [logistic, mlp, deep, lambda: Normed().double()])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_replicas_equal_the_trainer(model: Callable[[], nn.Module], rate: float) -> None:
    check(model, some_replicas(rate))


def test_models_beyond_batching_equal_the_trainer_too() -> None:
    check(lambda: Recurrent().double(), some_replicas())

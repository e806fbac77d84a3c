"""Replicas on a CUDA device end where the trainer ends there, with and without the kernels."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diminuendo as dim
from diminuendo.replicas import Outcome, Replica, initialise, kernels, train
from diminuendo.replicas.batch import Update
from diminuendo.replicas.cuda_graph import CapturedSteps
from diminuendo.training import PrivateDescent, fit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

N, D, CLASSES = 70, 6, 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 40), nn.ReLU(), nn.Linear(40, CLASSES))


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator)
    return x, torch.randint(0, CLASSES, (N,), generator=generator)


@cache
def make_plan(steps: int) -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        budget = dim.Budget(epsilon=4, delta=1e-5)
        return dim.plan(budget, examples=N, parameters=10, steps=steps, clip=0.5)


def replicas(sets: int) -> list[Replica]:
    rows = [(16, 0.0), (30, 0.9), (30, 0.5), (4, 0.0)]
    return [
        Replica(
            sigmas=make_plan(steps).sigmas,
            lr=0.3,
            clip=0.5,
            beta=beta,
            seed=seed,
            data=seed % sets,
        )
        for seed, (steps, beta) in enumerate(rows)
    ]


def run(sets: int) -> list[Outcome]:
    data = [make_data(i) for i in range(sets)]
    return train(network, data, replicas(sets), device="cuda", progress=False, keep_parameters=True)


@pytest.mark.parametrize("sets", [1, 2])
def test_replicas_equal_the_trainer(sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[slice] = []
    capture = CapturedSteps._capture

    def counted(self: CapturedSteps, rows: slice, update: Update) -> None:
        captured.append(rows)
        capture(self, rows, update)

    monkeypatch.setattr(CapturedSteps, "_capture", counted)
    outcomes = run(sets)
    assert captured == [slice(0, 3), slice(0, 2)]
    for replica, outcome in zip(replicas(sets), outcomes, strict=True):
        module = initialise(network, replica.seed).cuda()
        result = fit(
            module,
            make_data(replica.data),
            make_plan(replica.steps),
            loss=nn.CrossEntropyLoss(reduction="none"),
            optimizer=PrivateDescent(module.parameters(), lr=0.3, beta=replica.beta),
            noise="fast",
            seed=replica.seed,
            progress=False,
        )
        assert result.steps == replica.steps
        assert outcome.parameters is not None
        for name, value in module.named_parameters():
            torch.testing.assert_close(
                outcome.parameters[name], value.detach().cpu(), rtol=1e-4, atol=1e-5
            )


def test_a_loss_of_one_s_own_is_never_captured() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        assert float(outputs.detach().abs().sum()) >= 0  # the host waits: not during a capture
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    options: dict[str, Any] = {"device": "cuda", "progress": False}
    own = train(network, make_data(0), replicas(1), loss=loss, **options)
    for one, other in zip(own, train(network, make_data(0), replicas(1), **options), strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)


@pytest.mark.skipif(not kernels.available, reason="no Triton")
@pytest.mark.parametrize("sets", [1, 2])
def test_kernels_change_nothing(sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels = run(sets)
    monkeypatch.setattr(kernels, "available", False)
    kernels.philox.cache_clear()
    without = run(sets)
    kernels.philox.cache_clear()
    for one, other in zip(with_kernels, without, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)


def test_the_kernels_noise_is_what_the_generators_draw() -> None:
    generator = kernels.philox(5000, torch.device("cuda"))
    assert (generator is not None) == kernels.available

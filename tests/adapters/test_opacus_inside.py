"""This library's accountant and schedules inside Opacus' own training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diminuendo as dim
from diminuendo.adapters.opacus import CertifiedAccountant, PlannedNoise
from diminuendo.errors import InputError, UsageError


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def private(**options: Any) -> Any:
    from opacus import PrivacyEngine

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    engine = PrivacyEngine(accountant="diminuendo")
    make: Any = engine.make_private
    given: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    if "target_epsilon" in given:
        del given["noise_multiplier"]
        make = engine.make_private_with_epsilon
    data = TensorDataset(torch.randn(60, 4), torch.randint(0, 2, (60,)))
    return engine, *make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        **given,
    )


def train(model: Any, optimizer: Any, loader: Any, scheduler: Any = None) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_the_accountant_is_registered_and_counts() -> None:
    from opacus.accountants import create_accountant

    assert isinstance(create_accountant("diminuendo"), CertifiedAccountant)
    engine, model, optimizer, loader = private()
    assert engine.get_epsilon(1e-5) == 0
    train(model, optimizer, loader)
    assert len(engine.accountant) == 6
    assert engine.accountant.history == [(1.0, 1 / 6, 6)]
    assert engine.get_epsilon(1e-5) == dim.epsilon(np.ones(6), 1e-5, 1 / 6)
    state = engine.accountant.state_dict()
    again = CertifiedAccountant()
    again.load_state_dict(state)
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)


def test_opacus_calibrates_by_it() -> None:
    engine, model, optimizer, loader = private(target_epsilon=2.0, target_delta=1e-5, epochs=2)
    train(model, optimizer, loader)
    train(model, optimizer, loader)
    assert 1.98 < engine.get_epsilon(1e-5) <= 2.0


def planned(steps: int = 6) -> dim.Plan:
    return dim.plan(
        (2.0, 1e-5), examples=60, parameters=10, steps=steps, sampling_rate=1 / 6, gamma=0.7
    )


def test_the_schedule_sets_the_noise_of_every_step() -> None:
    engine, model, optimizer, loader = private()
    plan = planned()
    scheduler = PlannedNoise(optimizer, plan)
    train(model, optimizer, loader, scheduler)
    assert [sigma for sigma, _, _ in engine.accountant.history] == plan.sigmas.tolist()
    assert engine.get_epsilon(1e-5) == pytest.approx(plan.epsilon, rel=1e-9)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match="6 steps"):
        train(model, optimizer, loader, scheduler)
    assert all(map(torch.equal, before, model.parameters()))
    assert len(engine.accountant) == 6


def test_a_reloaded_scheduler_goes_on_where_it_was() -> None:
    *_, optimizer, _ = private()
    plan = planned()
    scheduler = PlannedNoise(optimizer, plan)
    for _ in range(3):
        scheduler.step()
    *_, other, _ = private()
    again = PlannedNoise(other, plan)
    again.load_state_dict(scheduler.state_dict())
    assert other.noise_multiplier == optimizer.noise_multiplier == plan.sigmas[3]
    with pytest.raises(InputError, match="of this plan"):
        PlannedNoise(other, planned(5)).load_state_dict(scheduler.state_dict())


def test_bad_input() -> None:
    *_, optimizer, _ = private()
    with pytest.raises(InputError, match="plan"):
        PlannedNoise(optimizer, [1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="delta"):
        CertifiedAccountant().get_epsilon(2.0)

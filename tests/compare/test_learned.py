"""What is learnt on auxiliary data: that it is learnt, from those data alone, and paid for."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diminuendo.budget import Budget
from diminuendo.compare import Bench, Cell, Effort, table
from diminuendo.compare.data import TASKS, Pool
from diminuendo.compare.lesson import Lesson
from diminuendo.compare.methods import METHODS, adaptive_rates, learned, stochastic
from diminuendo.compare.models import Linear, Network
from diminuendo.compare.private import Private
from diminuendo.compare.scaled import scaled_gradient

BUDGET = Budget(epsilon=3.0, delta=1e-5)
SETTINGS = {"lr": 3.0, "clip": 0.3, "steps": 12}
KEYS = ("learned-schedule", "learned-policy")


def data(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, examples, 5, generator=generator)
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    return x / x.norm(dim=2, keepdim=True), (x @ weights).argmax(2)


def lesson(rounds: int, model: Linear | Network | None = None, budget: Budget = BUDGET) -> Lesson:
    (x, y), (test_x, test_y) = data(100, 2), data(100, 3)
    return Lesson(
        model=model or Linear(5, 3),
        x=x,
        y=y,
        test_x=test_x,
        test_y=test_y,
        budget=budget,
        examples=100,
        rounds=rounds,
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("model", [Linear(5, 3), Network(5, 3, hidden=4)], ids=["linear", "net"])
def test_learning_lowers_the_loss_of_new_runs(key: str, model: Linear | Network) -> None:
    """Of 20 runs on other data, with noise that was not learnt on. Seeded."""
    method = METHODS[key]
    assert method.learn is not None
    assert method.run is not None
    settings = {"lr": 20.0, "clip": 0.3, "steps": 30}
    learnt = method.learn(lesson(12, model), settings)
    assert set(learnt) == set(method.learned)
    assert all(math.isfinite(value) for value in learnt.values())
    assert any(abs(value) > 0.05 for value in learnt.values())
    x, y = (part[:1].expand(20, *part.shape[1:]) for part in data(100, 4))
    losses = []
    for own in (dict.fromkeys(learnt, 0.0), learnt):
        theta = method.run(Private(model, x, y, BUDGET, seeds=range(20)), {**settings, **own})
        losses.append(float(model.losses(theta, x, y).mean()))
    assert losses[1] < losses[0] - 0.005


def test_a_lesson_is_what_the_private_training_will_be() -> None:
    """The same steps as `Private` takes, with hardly any noise."""
    silent = Budget(epsilon=1e6, delta=1e-5)
    own = lesson(1, budget=silent)
    private = Private(own.model, own.x, own.y, silent, seeds=[0, 1])
    method = METHODS["learned-schedule"]
    assert method.run is not None
    expected = method.run(private, {**SETTINGS, **dict.fromkeys(method.learned, 0.0)})
    theta = own.start()
    sigma = torch.tensor(math.sqrt(12 / silent.R))
    for _ in range(12):
        noise = torch.zeros_like(theta)
        theta = theta - 3.0 * own.gradient(theta, torch.tensor(0.3), sigma, noise)
    torch.testing.assert_close(theta, expected, atol=1e-2, rtol=0)


@pytest.mark.parametrize("numbers", [0.0, 5.0, -5.0, 1e9])
@pytest.mark.parametrize("key", KEYS)
def test_the_claim_holds_whatever_was_learnt(key: str, numbers: float) -> None:
    method = METHODS[key]
    assert method.run is not None
    x, y = data(100, 4)
    private = Private(Linear(5, 3), x, y, BUDGET, seeds=[1, 2])
    theta = method.run(private, {**SETTINGS, **dict.fromkeys(method.learned, numbers)})
    assert bool(theta.isfinite().all())
    for events in private.granted():
        spent = math.fsum(event.count / event.noise_multiplier**2 for event in events)
        assert BUDGET.R * (1 - 1e-6) <= spent <= BUDGET.R
        assert sum(event.count for event in events) == 12


def _as_is(pool: Pool, folder: Path | None) -> Pool:
    del folder
    return pool


def test_nothing_private_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other private data of the same size: the same numbers. And half of the effort is learning."""
    effort = Effort(trials=4, tuning_repeats=1, repeats=2)
    cell = Cell("mnist", "linear", 60, 3.0, "learned-schedule")
    taught: list[Lesson] = []
    real = table._lesson

    def watched(*arguments: object) -> Lesson:
        taught.append(real(*arguments))  # type: ignore[arg-type]
        return taught[-1]

    monkeypatch.setattr(table, "_lesson", watched)
    task = TASKS["mnist"]
    own = task.load(None)
    flipped = dataclasses.replace(own, x=-own.x, y=own.y.flip(0))
    found = []
    for pool in (own, flipped):
        changed = dataclasses.replace(task, load=partial(_as_is, pool))
        monkeypatch.setitem(TASKS, "mnist", changed)
        found.append(Bench(effort).run(cell))
    assert found[0].settings == found[1].settings
    assert found[0].accuracy != found[1].accuracy
    assert [one.rounds for one in taught] == [2, 2]
    assert taught[0].examples == 60


# Coordinates, phases, averages


def test_large_coordinates_get_more_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that live in one feature: its noise grows beyond that of the others."""
    scales: list[Tensor] = []
    real = scaled_gradient

    def watched(
        private: Private, theta: Tensor, shift: Tensor, scale: Tensor, sigma: float
    ) -> Tensor:
        scales.append(scale)
        return real(private, theta, shift, scale, sigma)

    monkeypatch.setattr(adaptive_rates, "scaled_gradient", watched)
    x = torch.zeros(1, 400, 5)
    x[:, :, 0] = 1.0
    y = torch.arange(400).remainder(4).clamp(max=1).unsqueeze(0)
    loud = Budget(epsilon=1e4, delta=1e-5)
    run = METHODS["adadp"].run
    assert run is not None
    run(Private(Linear(5, 2), x, y, loud, seeds=[1]), {**SETTINGS, "lr": 0.1, "floor": 0.1})
    first, last = (own.view(5, 2).mean(1) for own in (scales[0], scales[-1]))
    np.testing.assert_allclose(first, float(first[0]))
    assert float(last[0]) > 2 * float(last[1:].max())


def test_phases_share_no_example() -> None:
    for examples, batches in ((60, 5), (100, 20), (7, 2), (41, 20)):
        rows = [list(range(examples))[part] for part in stochastic.phases(examples, batches)]
        together = [row for part in rows for row in part]
        assert rows
        assert len(together) == len(set(together)) <= examples
        assert all(len(part) % batches == 0 for part in rows)


@pytest.mark.parametrize("row", [0, 7, 19, 20, 27])
def test_an_example_moves_no_phase_further_than_claimed(
    row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest steps that are allowed, without noise; only the example's own phase moves."""
    bounds: list[list[tuple[Tensor, float]]] = []

    def silent(self: Private, sums: Tensor, bound: float, sigma: float, **more: Any) -> Tensor:
        del self, sigma, more
        bounds[-1].append((sums, bound))
        return torch.zeros_like(sums)  # what follows is then the same on both data sets

    monkeypatch.setattr(Private, "noised", silent)
    run = METHODS["phased-sgd"].run
    assert run is not None
    x, y = data(40, 5)
    changed = x.clone()
    changed[:, row] = 0.0
    for rows in (x, changed):
        bounds.append([])
        run(Private(Linear(5, 3), rows, y, BUDGET, seeds=[1, 2]), {"step": 1.0, "batches": 5})
    moved = 0
    for (one, bound), (other, _) in zip(*bounds, strict=True):
        distance = float((one - other).norm(dim=1).max())
        assert distance <= bound
        moved += distance > 0
    assert moved == 1


def test_noisy_sgd_averages_within_its_ball() -> None:
    run = METHODS["stochastic-convex"].run
    assert run is not None
    x, y = data(100, 6)
    loud = Budget(epsilon=1e3, delta=1e-5)
    settings = {"lr": 50.0, "radius": 2.0, "steps": 40, "rate": 0.6}
    theta = run(Private(Linear(5, 3), x, y, loud, seeds=[1, 2]), settings)
    assert float(theta.norm(dim=1).max()) <= 2.0
    assert float(Linear(5, 3).accuracy(theta, x, y).min()) > 0.6
    assert learned._knots(12).sum(axis=1).tolist() == pytest.approx([1.0] * 12)

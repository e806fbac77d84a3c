"""The mechanism: noise once, on the whole sum, of the stated deviation; then the division."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import COUNTED, LOSS, PERCEPTRON, gradient
from torch import Tensor

from diminuendo.training import Flat, PrivateGradients
from diminuendo.training.clipping import Engine
from diminuendo.training.mechanism import FastNoise, Mechanism, NoisySum
from diminuendo.training.seeds import Seeds


class Told:
    """Adds a number that everybody knows, and keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def add_noise(self, total: Tensor, **told: Any) -> Tensor:
        self.calls.append({"total": total.clone(), **told})
        return total + 7.0


def one_step(noise: Any, micro_batch: int | None = None) -> tuple[Tensor, PrivateGradients]:
    model, (x, y) = PERCEPTRON.model(), PERCEPTRON.data()
    private = PrivateGradients(model, PERCEPTRON.plan(), micro_batch=micro_batch, seed=5)
    private.mechanism.noise = noise
    for bx, by in private.batches((x, y)):
        private.backward(LOSS(model(bx), by))
        if private.step:
            break
    return gradient(model), private


@pytest.mark.parametrize("micro_batch", [None, 13])
def test_a_source_gets_the_whole_sum_once_and_undivided(micro_batch: int | None) -> None:
    model, (x, y) = PERCEPTRON.model(), PERCEPTRON.data()
    with Engine(model) as engine:
        sums = engine.clipped_sum(LOSS(model(x), y), Flat(0.7)).sums
    expected = torch.cat([part.flatten() for part in sums])
    told = Told()
    released, private = one_step(told, micro_batch)
    [call] = told.calls
    assert call["step"] == 0
    assert call["sensitivity"] == 0.7 * COUNTED
    assert call["noise_std"] == private.plan.sigmas[0] * (0.7 * COUNTED)
    torch.testing.assert_close(call["total"], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(released, (expected + 7) / 40, rtol=1e-12, atol=1e-12)


def test_the_sum_may_start_from_the_noise() -> None:
    early, _ = one_step(FastNoise(Seeds.make(5)))
    fast = FastNoise(Seeds.make(5))

    def late(total: Tensor, *, noise_std: float, **told: Any) -> Tensor:
        return fast.add_noise(total, noise_std=noise_std / COUNTED, **told)

    after, _ = one_step(SimpleNamespace(add_noise=late))
    torch.testing.assert_close(early, after, rtol=1e-12, atol=1e-12)


def test_nothing_is_drawn_before_the_sum_starts() -> None:
    drawn = []

    class Counts(FastNoise):
        def draw(self, *given: Any) -> Tensor:
            drawn.append(given)
            return super().draw(*given)

    model = PERCEPTRON.model()
    private = PrivateGradients(model, PERCEPTRON.plan())
    mechanism = Mechanism(private.engine.parameters, Counts(private.seeds), private.group)
    total = mechanism.begin(noise_std=1.0, sensitivity=1.0, divisor=10.0, step=0)
    assert isinstance(total, NoisySum)
    assert not drawn
    assert [part.shape for part in total.start()] == [p.shape for p in model.parameters()]
    assert len(drawn) == 1

"""Algorithm 1 on a CUDA device: steps, sampling, noise, whole runs and their checkpoints."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import LOSS, gradient, noisy, weights
from torch import nn

import diminuendo as dim
from diminuendo.training import Checkpoints, Compute, PrivateGradients, Progress, Result, fit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

N, D, STEPS = 40, 5, 12


def make_plan(**changes: Any) -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        settings = {"examples": N, "parameters": 60, "steps": STEPS, "clip": 0.7, **changes}
        return dim.plan(dim.Budget(epsilon=4, delta=1e-5), **settings)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, 3)).to("cuda", dtype)


def make_data(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (N,), generator=generator)


def clipped_sum(x: torch.Tensor, y: torch.Tensor, clip: float = 0.7) -> torch.Tensor:
    """One example at a time, on the device."""
    model = make_model()
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device="cuda")
    for i in range(len(x)):
        loss = LOSS(model(x[i : i + 1].cuda()), y[i : i + 1].cuda()).sum()
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("micro_batch", [None, 7])
@pytest.mark.parametrize("broken", [(), (3, 8)])
def test_a_step_is_the_clipped_sum_plus_noise_over_n(
    micro_batch: int | None, broken: tuple[int, ...]
) -> None:
    plan, (x, y) = make_plan(), make_data()
    kept = [i for i in range(N) if i not in broken]
    expected = clipped_sum(x[kept], y[kept])
    for i in broken:
        x[i] = float("nan") if i % 2 else float("inf")
    model = make_model()
    private = PrivateGradients(model, plan, seed=3, micro_batch=micro_batch)
    for bx, by in private.batches((x, y)):
        private.backward(LOSS(model(bx.cuda()), by.cuda()))
        if private.step == 1:
            break
        assert all(p.grad is None for p in model.parameters())
    expected = noisy(expected, plan.sigmas[0] * 0.7, 3)
    torch.testing.assert_close(gradient(model), expected / N, rtol=1e-10, atol=1e-12)


def test_poisson_batches_and_empty_draws() -> None:
    plan, (x, y) = make_plan(sampling_rate=0.03, steps=30), make_data()
    model = make_model()
    private = PrivateGradients(model, plan, seed=5)
    sizes = []
    for bx, by in private.batches((x, y)):
        step = private.step
        private.backward(LOSS(model(bx.cuda()), by.cuda()))
        total = noisy(clipped_sum(bx, by), plan.sigmas[step] * 0.7, 5, step)
        expected = total / (0.03 * N)
        torch.testing.assert_close(gradient(model), expected, rtol=1e-9, atol=1e-12)
        sizes.append(len(bx))
        model.zero_grad()
    assert len(sizes) == 30
    assert 0 in sizes


def test_noise_has_its_deviation_and_is_fresh() -> None:
    """60,000 unseeded draws; each bound is 5 deviations wide (false alarms below 1e-6)."""
    plan = make_plan(parameters=60_000)
    model = nn.Linear(299, 200).cuda()
    seen = []
    for _ in range(2):
        private = PrivateGradients(model, plan)
        assert private.private
        private.backward((model(torch.zeros(N, 299).cuda()) * 0).sum(1))
        seen.append(gradient(model) * N / (plan.sigmas[0] * 0.7))
        private.engine.close()
    assert not torch.equal(seen[0], seen[1])
    for values in seen:
        count = values.numel()
        assert count == 60_000
        assert abs(float(values.mean())) < 5 / math.sqrt(count)
        assert abs(float(values.square().mean()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float((seen[0] * seen[1]).mean())) < 5 / math.sqrt(count)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    rate: float, micro_batch: int | None, tmp_path: Path
) -> None:
    plan = make_plan(sampling_rate=rate, gamma=0.95)

    def run(model: nn.Module, crash: int | None = None, folder: Path | None = None) -> Result:
        def after(step: int, _: object) -> None:
            if step == crash:
                raise Stopped

        return fit(
            model,
            make_data(torch.float32),
            plan,
            loss=LOSS,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
            seed=7,
            folder=None if folder is None else Checkpoints(folder, every=3),
            device=Compute(micro_batch=micro_batch),
            progress=Progress(shown=False, after_step=after),
        )

    straight = make_model(torch.float32)
    result = run(straight)
    assert (result.status, result.steps) == ("done", STEPS)
    for crash in (2, 8):
        with pytest.raises(Stopped):
            run(make_model(torch.float32), crash, tmp_path)
    model = make_model(torch.float32)
    result = run(model, folder=tmp_path)
    assert (result.status, result.steps) == ("done", STEPS)
    torch.testing.assert_close(weights(model), weights(straight), rtol=0, atol=0)


def test_bfloat16_autocast_and_learning() -> None:
    x, y = make_data(torch.float32)
    y = (x[:, 0] > 0).long()
    model = make_model(torch.float32)
    plan = dim.plan(dim.Budget(epsilon=500, delta=1e-5), examples=N, parameters=60, steps=60)
    before = float(LOSS(model(x.cuda()), y.cuda()).mean().detach())
    private = PrivateGradients(model, plan, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for bx, by in private.batches((x, y)):
        with torch.autocast("cuda", torch.bfloat16):
            losses = LOSS(model(bx.cuda()), by.cuda())
        private.backward(losses)
        assert gradient(model).dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    assert float(LOSS(model(x.cuda()), y.cuda()).mean().detach()) < 0.7 * before
    assert private.step == 60

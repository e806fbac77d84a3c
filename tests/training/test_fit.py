"""fit(...): ends cleanly, resumes exactly, and never takes a paid step twice for free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import diminuendo as dim
from diminuendo.accounting import GaussianFilter
from diminuendo.spending import AdaptiveSpending
from diminuendo.training import PrivateDescent, fit

N, D, STEPS = 30, 4, 20
LOSS = nn.CrossEntropyLoss(reduction="none")


def make_plan(**changes: object) -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        return dim.plan(
            dim.Budget(epsilon=4, delta=1e-5),
            **{"examples": N, "parameters": 15, "steps": STEPS, **changes},
        )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(D, 3)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(N, D, generator=generator), torch.randint(0, 3, (N,), generator=generator))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(model: nn.Module, plan: dim.Plan, **options: object):
    return fit(model, make_data(), plan, **{"loss": LOSS, "lr": 0.5, "progress": False, **options})


def test_a_run_ends_with_what_it_spent() -> None:
    plan, model = make_plan(), make_model()
    result = run(model, plan)
    assert (result.status, result.steps, result.private) == ("done", STEPS, True)
    assert result.events == plan.events
    assert result.epsilon == pytest.approx(plan.epsilon)
    assert result.epsilon <= 4
    assert run(make_model(), plan, seed=1).private is False


def test_learning_happens() -> None:
    x, y = make_data()
    model = make_model()
    plan = dim.plan(dim.Budget(epsilon=500, delta=1e-5), examples=N, parameters=15, steps=60)
    before = float(LOSS(model(x), y).mean().detach())
    run(model, plan, seed=3)
    assert float(LOSS(model(x), y).mean().detach()) < before


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_paper_projections(beta: float) -> None:
    """m_t = [β(1−β^{t−1})m_{t−1} + (1−β)g_t]/(1−β^t)."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = PrivateDescent([parameter], lr=0.1, beta=beta)
    average, expected = torch.zeros(3), torch.zeros(3)
    for t in range(1, 8):
        gradient = torch.randn(3)
        parameter.grad = gradient.clone()
        optimizer.step()
        average = (beta * (1 - beta ** (t - 1)) * average + (1 - beta) * gradient) / (1 - beta**t)
        expected = expected - 0.1 * average
    torch.testing.assert_close(parameter.detach(), expected)


def test_refusal_ends_the_run_at_the_last_paid_step() -> None:
    small = dim.Budget(epsilon=1, delta=1e-5)
    plan, model = make_plan(), make_model()
    result = run(model, plan, spending=AdaptiveSpending(GaussianFilter(small)), seed=2)
    assert result.status == "refused"
    assert 0 < result.steps < STEPS
    other = make_model()
    run(other, plan, seed=2, after_step=_stop_at(result.steps))
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=0)


class Stopped(Exception):
    pass


def _stop_at(step: int):
    def after(done: int, _: object) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return after


def _crash_at(step: int):
    def after(done: int, _: object) -> None:
        if done == step:
            raise Stopped

    return after


OPTIMIZERS = {
    "descent": lambda m: PrivateDescent(m.parameters(), lr=0.5, beta=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("stop", [_stop_at, _crash_at])
def test_resumed_runs_equal_uninterrupted_ones_bit_for_bit(
    name: str, rate: float, stop, tmp_path: Path
) -> None:
    plan = make_plan(sampling_rate=rate, gamma=0.95)
    straight = make_model()
    scheduler = torch.optim.lr_scheduler.StepLR
    optimizer = OPTIMIZERS[name](straight)
    run(straight, plan, optimizer=optimizer, seed=7, lr_scheduler=scheduler(optimizer, 5, 0.5))
    for at in (3, 11, 17):
        model = make_model()
        optimizer = OPTIMIZERS[name](model)
        options = {
            "seed": 7,
            "folder": tmp_path,
            "checkpoint_every": 4,
            "lr_scheduler": scheduler(optimizer, 5, 0.5),
        }
        try:
            result = run(model, plan, optimizer=optimizer, after_step=stop(at), **options)
            assert (result.status, result.steps) == ("interrupted", at)
        except Stopped:
            pass
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    options["lr_scheduler"] = scheduler(optimizer, 5, 0.5)
    result = run(model, plan, optimizer=optimizer, **options)
    assert (result.status, result.steps) == ("done", STEPS)
    torch.testing.assert_close(weights(model), weights(straight), rtol=0, atol=0)


def test_with_fresh_noise_reserved_steps_stay_spent(tmp_path: Path) -> None:
    plan = make_plan()
    model = make_model()
    with pytest.raises(Stopped):
        run(model, plan, folder=tmp_path, checkpoint_every=5, after_step=_crash_at(7))
    assert json.loads((tmp_path / "journal.json").read_text())["reserved"] == 10
    taken = []
    result = run(
        make_model(),
        plan,
        folder=tmp_path,
        checkpoint_every=5,
        after_step=lambda step, private: taken.append(step),
    )
    assert taken == list(range(11, STEPS + 1))
    assert result.steps == STEPS
    assert sum(event.count for event in result.events) == STEPS
    assert result.epsilon <= 4


def test_a_clean_stop_loses_nothing(tmp_path: Path) -> None:
    plan = make_plan()
    result = run(make_model(), plan, folder=tmp_path, after_step=_stop_at(7))
    assert (result.status, result.steps) == ("interrupted", 7)
    taken = []
    run(make_model(), plan, folder=tmp_path, after_step=lambda step, private: taken.append(step))
    assert taken == list(range(8, STEPS + 1))


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import test_fit, torch
torch.set_num_threads(1)
model = test_fit.make_model()
seed = None if sys.argv[2] == "none" else int(sys.argv[2])
result = test_fit.run(model, test_fit.make_plan(steps=400), seed=seed, folder=sys.argv[1],
                      checkpoint_every=3)
torch.save(test_fit.weights(model), sys.argv[1] + "/weights.pt")
print(result.steps, sum(e.count for e in result.events), result.epsilon)
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL, again and again; the seeded run ends as if nothing had happened."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent))))
    straight = make_model()
    run(straight, make_plan(steps=400), seed=11)
    for seed in ("11", "none"):
        folder = tmp_path / seed
        folder.mkdir()
        command = [sys.executable, str(script), str(folder), seed]
        for pause in (0.02, 0.15, 0.3):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            while not (folder / "journal.json").exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(pause)
            process.kill()
            process.wait()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        steps, granted, epsilon = done.stdout.split()
        assert (int(steps), int(granted)) == (400, 400)
        assert float(epsilon) <= 4
        if seed != "none":
            final = torch.load(folder / "weights.pt", weights_only=True)
            torch.testing.assert_close(final, weights(straight), rtol=0, atol=0)


def test_checkpoints_of_something_else_are_refused(tmp_path: Path) -> None:
    run(make_model(), make_plan(), folder=tmp_path, seed=1)
    with pytest.raises(dim.InputError, match="plan"):
        run(make_model(), make_plan(steps=21), folder=tmp_path, seed=1)
    with pytest.raises(dim.InputError, match="seed"):
        run(make_model(), make_plan(), folder=tmp_path, seed=2)
    torch.manual_seed(0)
    with pytest.raises(dim.InputError, match="model"):
        run(nn.Linear(D, 3, bias=False), make_plan(), folder=tmp_path, seed=1)
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(dim.InputError, match="readable checkpoint"):
        run(make_model(), make_plan(), folder=tmp_path, seed=1)


def test_loading_runs_no_code(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'pwned'}",))

    run(make_model(), make_plan(), folder=tmp_path, seed=1)
    (tmp_path / "checkpoint.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(dim.InputError, match="readable checkpoint"):
        run(make_model(), make_plan(), folder=tmp_path, seed=1)
    assert not (tmp_path / "pwned").exists()


def test_lr_or_optimizer_is_needed() -> None:
    with pytest.raises(dim.InputError, match="lr"):
        fit(make_model(), make_data(), make_plan(), loss=LOSS, progress=False)


def test_a_policy_cannot_be_resumed(tmp_path: Path) -> None:
    spending = AdaptiveSpending(GaussianFilter(dim.Budget(epsilon=4, delta=1e-5)))
    with pytest.raises(dim.InputError, match="folder"):
        run(make_model(), make_plan(), spending=spending, policy=lambda r: 9.0, folder=tmp_path)

"""fit(...): ends cleanly, resumes exactly, and never takes a paid step twice for free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import LINEAR, LOSS, run, weights
from torch import nn

import diminuendo as dim
from diminuendo.accounting import GaussianFilter
from diminuendo.spending import AdaptiveSpending
from diminuendo.training import Checkpoints, PrivateDescent, PrivateGradients, Released, fit
from diminuendo.training.progress import EpsilonSoFar

N, D, STEPS = LINEAR.examples, LINEAR.features, LINEAR.steps
make_plan, make_model, make_data = LINEAR.plan, LINEAR.model, LINEAR.data


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


def _stop_at(step: int) -> Any:
    def after(done: int, _: object) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return after


def _crash_at(step: int) -> Any:
    def after(done: int, _: object) -> None:
        if done == step:
            raise Stopped

    return after


OPTIMIZERS: dict[str, Any] = {
    "descent": lambda m: PrivateDescent(m.parameters(), lr=0.5, beta=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("stop", [_stop_at, _crash_at])
def test_resumed_runs_equal_uninterrupted_ones_bit_for_bit(
    name: str, rate: float, stop: Any, tmp_path: Path
) -> None:
    falling = dim.influence.step_decay(STEPS, every=5, factor=0.5)
    plan = make_plan(sampling_rate=rate, gamma=0.95, lr=falling)
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
            "every": 4,
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


KILL = """
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import test_fit, torch
torch.set_num_threads(1)
def after(step, private):
    if step == {at}:
        os._exit(9)
options = test_fit.{options}()
plan = options.pop("plan") if "plan" in options else test_fit.make_plan()
test_fit.run(test_fit.{model}(), plan, folder={folder!r}, after_step=after,
             **{{"every": 5, **options}})
"""


def nothing() -> dict[str, Any]:
    return {}


def kill_at(at: int, folder: Path, model: str = "make_model", options: str = "nothing") -> None:
    """A run that dies after a step, at once and without a word."""
    tests = str(Path(__file__).parent)
    script = KILL.format(tests=tests, at=at, folder=str(folder), model=model, options=options)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9


def test_with_fresh_noise_reserved_steps_stay_spent(tmp_path: Path) -> None:
    plan = make_plan()
    kill_at(7, tmp_path)
    assert json.loads((tmp_path / "journal.json").read_text())["reserved"] == 8
    taken = []
    result = run(
        make_model(),
        plan,
        folder=tmp_path,
        every=5,
        after_step=lambda step, private: taken.append(step),
    )
    assert taken == list(range(9, STEPS + 1))
    assert (result.steps, result.lost) == (STEPS, 4), "the checkpoint is of step 4"
    assert result.reason.startswith("16 steps of the plan's 20 were taken; 4 steps were lost")
    assert sum(event.count for event in result.events) == STEPS
    assert result.epsilon <= 4


def test_an_error_costs_no_step_that_was_not_asked_for(tmp_path: Path) -> None:
    """A wrong dtype, mended: the plan's steps are all still there."""
    x, y = make_data()
    for _ in range(3):
        with pytest.raises(dim.InputError, match="float64"):
            fit(make_model(), (x.double(), y), make_plan(), loss=LOSS, lr=1, folder=tmp_path)
    with pytest.raises(dim.InputError, match="size of the dataset"):
        fit(make_model(), (x[:5], y[:5]), make_plan(), loss=LOSS, lr=1, folder=tmp_path)
    with pytest.raises(Stopped):
        run(make_model(), make_plan(), folder=tmp_path, after_step=_crash_at(7))
    taken = []
    result = run(
        make_model(),
        make_plan(),
        folder=tmp_path,
        after_step=lambda step, private: taken.append(step),
    )
    assert taken == list(range(8, STEPS + 1))
    assert result.lost == 3, "the checkpoint is of step 4"


@pytest.mark.parametrize(("at", "spent"), [(0, 1), (1, 1), (3, 4), (13, 16)])
def test_a_crash_costs_few_steps_at_the_start(tmp_path: Path, at: int, spent: int) -> None:
    """By default: the first step alone is reserved before it is visible, then as many as taken."""
    kill_at(at, tmp_path, options="default_checkpoints" if at else "dying_at_once")
    result = run(make_model(), make_plan(), folder=tmp_path)
    saved = spent // 2 if at > 1 else 0
    assert result.lost == spent - saved
    again = run(make_model(), make_plan(), folder=tmp_path)
    assert again.lost == result.lost, "lost once"
    assert f"{result.lost} step" in again.reason


def default_checkpoints() -> dict[str, Any]:
    return {"every": Checkpoints.every}


def dying_at_once() -> dict[str, Any]:
    """The first gradient is released, and nobody has seen the step come to its end."""
    PrivateDescent.step = lambda *_: os._exit(9)  # type: ignore[method-assign]
    return default_checkpoints()


def test_a_second_signal_stops_at_once_and_nothing_is_forgotten(tmp_path: Path) -> None:
    def twice(step: int, _: object) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(make_model(), make_plan(), folder=tmp_path, after_step=twice)
    assert json.loads((tmp_path / "journal.json").read_text())["reserved"] == 4


class Noisy(nn.Sequential):
    """Dropout draws from PyTorch's own generator."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def make_noisy() -> nn.Module:
    torch.manual_seed(0)
    return Noisy()


def seeded() -> dict[str, Any]:
    return {"seed": 3, "data": list(zip(*make_data(), strict=True))}


def test_dropout_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight, resumed = make_noisy(), make_noisy()
    run(straight, make_plan(), **seeded())
    kill_at(8, tmp_path, "make_noisy", "seeded")
    torch.manual_seed(99)
    run(resumed, make_plan(), folder=tmp_path, **seeded())
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


def by_gradient(released: Released) -> float:
    """A policy that looks at everything it may."""
    size = sum(float(g.abs().sum()) for g in released.gradients)
    return 5.0 + (size * 1e3) % 3 + 0.1 * (released.step % 7) + 0.01 * (len(released.granted) % 5)


def adaptive(seed: int | None = None) -> dict[str, Any]:
    spending = AdaptiveSpending(GaussianFilter(dim.Budget(epsilon=4, delta=1e-5)))
    return {"policy": by_gradient, "spending": spending, "seed": seed}


def adaptive_seeded() -> dict[str, Any]:
    return adaptive(5)


def test_a_policy_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight, resumed = make_model(), make_model()
    expected = run(straight, make_plan(), **adaptive_seeded())
    kill_at(8, tmp_path, options="adaptive_seeded")
    with pytest.raises(Stopped):
        run(
            make_model(),
            make_plan(),
            folder=tmp_path,
            every=3,
            after_step=_crash_at(11),
            **adaptive_seeded(),
        )
    result = run(resumed, make_plan(), folder=tmp_path, **adaptive_seeded())
    assert result == expected
    assert result.status == "refused"
    assert result.steps > 12
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


def test_what_a_policy_was_granted_before_a_crash_stays_spent(tmp_path: Path) -> None:
    kill_at(8, tmp_path, options="adaptive")
    journal = json.loads((tmp_path / "journal.json").read_text())
    assert (journal["since"], journal["reserved"], len(journal["events"])) == (4, 8, 4)
    taken = []
    result = run(
        make_model(),
        make_plan(),
        folder=tmp_path,
        after_step=lambda step, private: taken.append(step),
        **adaptive(),
    )
    assert taken[0] == 9
    assert result.lost == 4
    sigmas = [e.noise_multiplier for e in result.events for _ in range(e.count)]
    assert sigmas[4:8] == [event["noise_multiplier"] for event in journal["events"]]
    assert len(sigmas) == result.steps
    assert sum(sigma**-2 for sigma in sigmas) <= dim.Budget(epsilon=4, delta=1e-5).R


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    def second(step: int, _: object) -> None:
        if step == 3:
            with pytest.raises(dim.InputError, match="Another run"):
                run(make_model(), make_plan(), folder=tmp_path)

    assert run(make_model(), make_plan(), folder=tmp_path, after_step=second).status == "done"
    assert run(make_model(), make_plan(), folder=tmp_path).steps == STEPS


def test_a_checkpoint_without_its_journal_is_refused(tmp_path: Path) -> None:
    run(make_model(), make_plan(), folder=tmp_path, after_step=_stop_at(7))
    (tmp_path / "journal.json").write_text("[]")
    with pytest.raises(dim.InputError, match="journal"):
        run(make_model(), make_plan(), folder=tmp_path)
    (tmp_path / "journal.json").unlink()
    with pytest.raises(dim.InputError, match="journal"):
        run(make_model(), make_plan(), folder=tmp_path)


@pytest.mark.filterwarnings("ignore::diminuendo.PlanWarning")
def test_another_optimiser_or_schedule_is_refused(tmp_path: Path) -> None:
    run(make_model(), make_plan(), folder=tmp_path, after_step=_stop_at(7))
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dim.InputError, match=r"optimizer.*PrivateDescent"):
        run(model, make_plan(), folder=tmp_path, optimizer=sgd)
    descent = PrivateDescent(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(descent, 5)
    with pytest.raises(dim.InputError, match="lr_scheduler"):
        run(model, make_plan(), folder=tmp_path, optimizer=descent, lr_scheduler=schedule)


def test_a_reserve_beyond_the_budget_does_not_block_resuming(tmp_path: Path) -> None:
    kill_at(1, tmp_path, options="little")
    result = run(make_model(), make_plan(), folder=tmp_path, **little())
    assert result.status == "refused"
    assert 0 < result.steps < STEPS


def little() -> dict[str, Any]:
    return {"spending": AdaptiveSpending(GaussianFilter(dim.Budget(epsilon=1, delta=1e-5)))}


def test_each_step_has_its_own_rate() -> None:
    rates = np.linspace(0.1, 0.9, STEPS)
    plan, sizes, divisors = make_plan(sampling_rate=rates, gamma=0.95), [], []
    model = make_model()
    private = PrivateGradients(model, plan, seed=1)
    for x, y in private.batches(make_data()):
        sizes.append(len(x))
        divisors.append(private.divisor)
        private.backward(LOSS(model(x), y))
    assert divisors == pytest.approx(N * rates)
    assert np.abs(np.array(sizes) - N * rates).max() < 5 * np.sqrt(N / 4)
    assert sizes[0] < N / 2 < sizes[-1]
    assert private.spending.granted == plan.events
    assert private.spending.epsilon() == pytest.approx(plan.epsilon)
    result = run(make_model(), plan, after_step=_stop_at(9))
    assert result.epsilon == plan.epsilon_after(9) < plan.epsilon


def test_resuming_with_a_rate_for_each_step(tmp_path: Path) -> None:
    kill_at(8, tmp_path, options="varied")
    plan = varied()["plan"]
    result = run(make_model(), plan, folder=tmp_path)
    assert (result.steps, result.lost) == (STEPS, 4)
    assert result.events == plan.events


def varied() -> dict[str, Any]:
    return {"plan": make_plan(sampling_rate=np.linspace(0.1, 0.9, STEPS), gamma=0.95)}


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_epsilon_so_far_is_never_below(rate: float) -> None:
    plan = make_plan(sampling_rate=rate, gamma=0.95, steps=6)
    fine, coarse = EpsilonSoFar(plan, seconds=600), EpsilonSoFar(plan, seconds=0)
    for so_far in (fine, coarse):
        values = [so_far(step) for step in range(7)]
        assert values[0] == 0
        assert values[-1] == plan.epsilon
        assert values == sorted(values)
        for step in (1, 2, 5):
            assert values[step] >= plan.epsilon_after(step) * (1 - 1e-9)
    assert len({fine(step) for step in range(7)}) > 4


def test_the_bar_shows_epsilon_and_a_loss_only_on_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = run(make_model(), make_plan(), progress=True)
    shown = capsys.readouterr().err
    assert "ε ≤ " in shown
    assert "loss" not in shown
    assert result.training_loss is None
    result = run(make_model(), make_plan(), progress=True, reveal_training_loss=True)
    assert (result.training_loss or 0) > 0
    assert "loss" in capsys.readouterr().err
    run(make_model(), make_plan(), progress=True, seed=1)
    assert "not private" in capsys.readouterr().err


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
                      every=3)
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
        def __reduce__(self) -> Any:
            return (os.system, (f"touch {tmp_path / 'pwned'}",))

    run(make_model(), make_plan(), folder=tmp_path, seed=1)
    (tmp_path / "checkpoint.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(dim.InputError, match="readable checkpoint"):
        run(make_model(), make_plan(), folder=tmp_path, seed=1)
    assert not (tmp_path / "pwned").exists()


def test_lr_or_optimizer_is_needed() -> None:
    """Where it cannot be chosen on synthetic data (tests/training/test_default_rate.py)."""
    losses = lambda outputs, labels: LOSS(outputs, labels)  # noqa: E731
    with pytest.raises(dim.InputError, match="lr"):
        fit(make_model(), make_data(), make_plan(), loss=losses, progress=False)


def test_old_arguments_work_and_say_what_to_write(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"Checkpoints\(folder, every\)"):
        fit(
            make_model(),
            make_data(),
            make_plan(),
            loss=LOSS,
            lr=0.5,
            progress=False,
            folder=tmp_path / "run",
            checkpoint_every=5,
        )
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    seen: list[int] = []
    old: dict[str, tuple[Any, str]] = {
        "workers": (0, r"Compute\(workers"),
        "micro_batch": (7, r"Compute\(micro_batch"),
        "after_step": (lambda step, private: seen.append(step), r"Progress\(after_step"),
        "reveal_training_loss": (True, r"Progress\(reveal_training_loss"),
    }
    for name, (value, instead) in old.items():
        options: dict[str, Any] = {"loss": LOSS, "lr": 0.5, "progress": False, name: value}
        with pytest.warns(DeprecationWarning, match=instead):
            result = fit(make_model(), make_data(), make_plan(), **options)
        assert result.revealed is (name == "reveal_training_loss")
    assert seen == list(range(1, STEPS + 1))
    ledger = dim.Ledger(tmp_path / "ledger.sqlite")
    (tmp_path / "data").write_text("1 2 3")
    tied_to = dim.ledger.identify(tmp_path / "data")
    ledger.create("b", dim.Budget(epsilon=4, delta=1e-5), data=tied_to)
    paid = {"ledger": ledger, "budget": "b"}
    with pytest.raises(dim.InputError, match="the data of the budget"):
        run(make_model(), make_plan(), **paid)
    with pytest.warns(DeprecationWarning, match=r"ledger\.pay"):
        assert run(make_model(), make_plan(), source=tmp_path / "data", **paid).status == "done"
    with pytest.raises(TypeError, match="colour"):
        run(make_model(), make_plan(), colour="red")


def test_what_pays_may_be_made_by_the_ledger(tmp_path: Path) -> None:
    ledger = dim.Ledger(tmp_path / "ledger.sqlite")
    ledger.create("b", dim.Budget(epsilon=4, delta=1e-5), data=dim.ledger.identify(make_data()))
    spending = ledger.pay("b", make_plan(), data=make_data())
    result = run(make_model(), make_plan(), spending=spending)
    assert (result.status, result.ledger["run"]) == ("done", ledger.runs("b")[0].id)
    with pytest.raises(dim.InputError, match="seed"):
        run(make_model(), make_plan(), spending=ledger.pay("b", make_plan()), seed=1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_without_gradients_is_refused_first(mode: Any, tmp_path: Path) -> None:
    with mode(), pytest.raises(dim.UsageError, match=r"leave torch\.no_grad\(\)"):
        run(LINEAR.model(), LINEAR.plan(sampling_rate=0.3), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""Which noise a run has: exact unless asked for, told in the result, the state and the report."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import COUNTED, LINEAR, LOSS, PERCEPTRON, gradient, in_a_fork, run, weights
from torch import Tensor

import diminuendo as dim
from diminuendo.errors import DiminuendoError, InputError
from diminuendo.report import run as run_report
from diminuendo.report.text import rounded_up
from diminuendo.training import PrivateGradients
from diminuendo.training.clipping import sums
from diminuendo.training.mechanism import ExactNoise, NoiseName, NoiseSource, NoisySum
from diminuendo.training.mechanism.grid import Grid
from diminuendo.training.mechanism.keys import Keys
from diminuendo.training.sampling import draw
from diminuendo.training.seeds import Seeds


class Told:
    """A source of noise that remembers one call."""

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def add_noise(self, total: Tensor, **told: Any) -> Tensor:
        self.total, self.noise_std = total.clone(), told["noise_std"]
        self.noisy = self.source.add_noise(total, **told).clone()
        return self.noisy.clone()

    def add_beside(self, number: float, **told: Any) -> float:
        return self.source.add_beside(number, **told)


def test_noise_is_exact_unless_asked_for() -> None:
    plan = LINEAR.plan(steps=2)
    assert run(LINEAR.model(), plan).noise == "exact"
    assert run(LINEAR.model(), plan, noise="fast").noise == "fast"
    assert PrivateGradients(PERCEPTRON.model(), PERCEPTRON.plan()).noise == "exact"


def test_another_noise_is_refused_before_anything_happens() -> None:
    model = LINEAR.model()
    before = weights(model)
    with pytest.raises(InputError, match="exact, fast"):
        run(model, LINEAR.plan(), noise="quick")
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("size", [1, 8, 71_010])
def test_noise_that_is_drawn_ahead_is_the_same_noise(size: int) -> None:
    """Bit for bit, undecided coordinates included, and never twice."""
    total = torch.linspace(-3.0, 3.0, size, dtype=torch.float64)
    total[-1] = 2.0**60
    told: dict[str, Any] = {"noise_std": 0.7, "sensitivity": 1.0}
    later = ExactNoise(Keys.make(3)).add_noise(total.clone(), **told, step=4)
    source = ExactNoise(Keys.make(3))
    drawn = source.ahead(size, 4)
    assert torch.equal(drawn.add_noise(total.clone(), **told, step=4), later)
    with pytest.raises(DiminuendoError, match="step 5 was added before"):
        drawn.add_noise(total.clone(), **told, step=4)
    for again in (4, 3):
        with pytest.raises(DiminuendoError, match="never given out twice"):
            source.ahead(size, again)
        with pytest.raises(DiminuendoError, match="never given out twice"):
            source.add_noise(total.clone(), **told, step=again)


def test_a_parameter_without_entries_does_no_harm() -> None:
    model = LINEAR.model()
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0)))
    private = PrivateGradients(model, LINEAR.plan())
    x, y = LINEAR.data()
    private.backward(LOSS(model(x), y))
    assert [p.grad is not None and p.grad.shape == p.shape for p in model.parameters()] == [
        True
    ] * 3
    assert model.weight.grad.abs().min() > 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_noise_that_is_drawn_ahead_belongs_to_one_process_and_one_sum() -> None:
    """A fork, or a copy, between drawing and adding would have the same noise twice."""
    drawn = ExactNoise(Keys.make()).ahead(8, 0)
    told: dict[str, Any] = {"noise_std": 0.7, "sensitivity": 1.0, "step": 0}

    def add() -> list[float]:
        return drawn.add_noise(torch.zeros(8, dtype=torch.float64), **told).tolist()

    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(DiminuendoError, match="neither copied nor written"):
            act(drawn)
    assert in_a_fork(add).startswith("refused: This process was forked")
    assert len(add()) == 8


@pytest.mark.parametrize("micro_batch", [None, 600])
def test_a_step_draws_its_noise_beside_the_products(
    micro_batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for a step, and what is released is what a step without it releases."""
    torch.manual_seed(0)
    x, y = torch.randn(1000, 60), torch.randint(0, 3, (1000,))
    plan = dim.plan(
        dim.Budget(epsilon=1, delta=1e-5), examples=1000, parameters=10, steps=2, schedule="uniform"
    )
    drawn: list[int] = []
    ahead = ExactNoise.ahead

    def counted(self: ExactNoise, size: int, step: int) -> Any:
        drawn.append(step)
        return ahead(self, size, step)

    def released() -> list[Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(60, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3)
        )
        private = PrivateGradients(model, plan, seed=2, micro_batch=micro_batch)
        found = []
        for bx, by in private.batches((x, y)):
            private.backward(LOSS(model(bx), by))
            if model[0].weight.grad is not None:
                found.append(gradient(model).clone())
                model.zero_grad()
        return found

    monkeypatch.setattr(ExactNoise, "ahead", counted)
    monkeypatch.setattr(sums, "_DIVIDED", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        beside = released()
        assert drawn == [0, 1]
        monkeypatch.setattr(NoisySum, "beside", lambda _: None)
        after = released()
    finally:
        torch.set_num_threads(threads)
    assert drawn == [0, 1]
    assert len(beside) == len(after) == 2
    for one, other in zip(beside, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_released_is_on_the_grid(dtype: torch.dtype) -> None:
    """The sum of float32 gradients is kept in float64, and conversion comes last."""
    model = LINEAR.model().to(dtype)
    private = PrivateGradients(model, LINEAR.plan(), seed=4)
    source = Told(private.mechanism.noise)
    private.mechanism.noise = source
    private.backward(LOSS(model(LINEAR.data()[0].to(dtype)).float(), LINEAR.data()[1]))
    assert source.total.dtype == torch.float64
    grid = Grid.of(source.noise_std)
    assert torch.equal(source.noisy, torch.round(source.noisy / grid.spacing) * grid.spacing)
    assert torch.equal(gradient(model), (source.noisy / LINEAR.examples).float().to(dtype))
    again = ExactNoise(Keys.make(4)).add_noise(
        source.total, noise_std=source.noise_std, sensitivity=1.0, step=0
    )
    assert torch.equal(source.noisy, again)


@pytest.mark.parametrize("noise", ["exact", "fast"])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_a_seeded_run_goes_on_bit_for_bit(noise: NoiseName, rate: float, tmp_path: Path) -> None:
    plan = LINEAR.plan(steps=8, sampling_rate=rate)
    whole, parts = LINEAR.model(), LINEAR.model()
    run(whole, plan, seed=3, noise=noise)

    class Stopped(Exception):
        pass

    def stop(step: int, _: object) -> None:
        if step == 5:
            raise Stopped

    settings = {"seed": 3, "noise": noise, "folder": tmp_path, "every": 2}
    with pytest.raises(Stopped):
        run(parts, plan, after_step=stop, **settings)
    run(parts, plan, **settings)
    assert torch.equal(weights(whole), weights(parts))


def test_a_checkpoint_keeps_its_noise(tmp_path: Path) -> None:
    plan = LINEAR.plan(steps=2)
    run(LINEAR.model(), plan, folder=tmp_path, every=1)
    with pytest.raises(InputError, match="noise"):
        run(LINEAR.model(), plan, folder=tmp_path, every=1, noise="fast")
    private = PrivateGradients(PERCEPTRON.model(), PERCEPTRON.plan(), seed=1)
    other = PrivateGradients(PERCEPTRON.model(), PERCEPTRON.plan(), seed=1, noise="fast")
    with pytest.raises(InputError, match="noise"):
        other.load_state_dict(private.state_dict())


def test_reports_say_what_fast_noise_leaves_open() -> None:
    plan = LINEAR.plan(steps=2)
    exact, fast = (
        run_report.facts(plan, asdict(run(LINEAR.model(), plan, noise=noise)))
        for noise in ("exact", "fast")
    )
    assert "real arithmetic" not in run_report.page(plan, exact)
    assert "real arithmetic" in run_report.claim(fast)
    assert any("last bits" in words for words in fast["not_covered"])
    assert "real arithmetic" in str(run_report.document(plan, fast))
    tones = [str(run_report.document(plan, facts)).count("warning") for facts in (exact, fast)]
    assert tones[1] > tones[0]


@pytest.mark.parametrize(("micro_batch", "calls"), [(None, 2), (7, 6)])
def test_what_rounding_may_cost_is_added_to_delta(
    micro_batch: int | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a public number: as many micro-batches as the whole dataset makes."""
    monkeypatch.setattr(sums, "_NARROW", 1)  # every product is checked by random vectors
    plan = LINEAR.plan(steps=3, sampling_rate=0.5)
    result = run(LINEAR.model(), plan, micro_batch=micro_batch)
    assert result.delta_added == 2 * 2.0**-50 * 3 * calls
    claim = run_report.claim(run_report.facts(plan, asdict(result)))
    assert f"1e-05 + {rounded_up(result.delta_added)})" in claim
    assert run(LINEAR.model(), plan, noise="fast").delta_added == 0


def test_sums_that_cannot_fail_add_nothing_to_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product of this model needs random vectors; a run that goes on remembers if some did."""
    plan = LINEAR.plan(steps=3)
    for folder in (tmp_path / "none", tmp_path / "some"):
        result = run(LINEAR.model(), plan, folder=folder, every=1)
        assert (result.delta_added == 0) == (folder.name == "none")
        claim = run_report.claim(run_report.facts(plan, asdict(result)))
        assert (" + " in claim) == (folder.name == "some")
        again = run(LINEAR.model(), plan, folder=folder, every=1)
        assert again.delta_added == result.delta_added
        monkeypatch.setattr(sums, "_NARROW", 1)


@pytest.mark.parametrize(("noise", "factor"), [("exact", COUNTED), ("fast", 1.0)])
def test_exact_noise_counts_the_rounding_of_sums(noise: NoiseName, factor: float) -> None:
    model, (x, y) = LINEAR.model(), LINEAR.data()
    private = PrivateGradients(model, LINEAR.plan(), noise=noise)
    seen: list[float] = []
    begin = private.mechanism.begin

    def spied(**told: Any) -> NoisySum:
        seen.extend((told["sensitivity"], told["noise_std"]))
        total = begin(**told)
        assert isinstance(total, NoisySum)
        return total

    private.mechanism.begin = spied  # type: ignore[method-assign]
    private.backward(LOSS(model(x), y))
    assert seen == [LINEAR.clip * factor, private.plan.sigmas[0] * (LINEAR.clip * factor)]


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps])
def test_private_gradients_are_not_copied(act: Callable[[object], object]) -> None:
    """A copy would add the same noise to another sum."""
    private = PrivateGradients(PERCEPTRON.model(), PERCEPTRON.plan())
    with pytest.raises(DiminuendoError, match="neither copied nor written"):
        act(private)


def test_no_step_gets_its_noise_twice() -> None:
    model, (x, y) = PERCEPTRON.model(), PERCEPTRON.data()
    private = PrivateGradients(model, PERCEPTRON.plan(schedule="uniform"))
    private.backward(LOSS(model(x), y))
    private.step = 0
    model.zero_grad()
    with pytest.raises(DiminuendoError, match="drawn before"):
        private.backward(LOSS(model(x), y))
    assert all(p.grad is None for p in model.parameters())


def test_samples_are_exact_and_a_function_of_key_and_step() -> None:
    one, other = Seeds.make(1), Seeds.make(1)
    assert torch.equal(draw(1000, 0.1, one, 4), draw(1000, 0.1, other, 4))
    assert not torch.equal(draw(1000, 0.1, one, 4), draw(1000, 0.1, one, 5))
    assert draw(10, 1.0, one, 0).tolist() == list(range(10))
    assert draw(10, 5e-324, one, 0).numel() == 0

"""Steps that are recorded and replayed: the same results, whatever changes from step to step."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import LOSS, weights
from torch import Tensor, nn

import diminuendo as dim
from diminuendo.errors import InputError
from diminuendo.training import (
    Checkpoints,
    Compute,
    Flat,
    PerLayer,
    PrivateGradients,
    Progress,
    fit,
)
from diminuendo.training.captured import Captured, EagerStep, as_recorded
from diminuendo.training.mechanism import NoiseName, kernels
from diminuendo.training.optim import PrivateDescent

cuda = pytest.mark.skipif(
    not (kernels.available and torch.cuda.is_available()), reason="no CUDA device with Triton"
)
N, D, STEPS = 60, 6, 40


def make_plan(**changes: Any) -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        settings = {"examples": N, "parameters": 99, "steps": STEPS, "gamma": 0.95, "clip": 0.7}
        return dim.plan(dim.Budget(epsilon=8, delta=1e-5), **(settings | changes))


def make_model(dropout: float = 0.0, device: str = "cuda") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(D, 9),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(9, 9),
        nn.LayerNorm(9),
        nn.Linear(9, 3),
    ).to(device)


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator)
    return x, torch.randint(0, 3, (N,), generator=generator)


def overwrite_free_memory() -> None:
    """What was freed holds no number any more: a replay that reads it gives itself away."""
    held = [torch.full((size,), float("nan"), device="cuda") for size in (*range(1, 200), 5000)]
    held += [torch.full((1 << power,), float("nan"), device="cuda") for power in range(8, 21)]
    del held


Optimizers = dict[str, Callable[[nn.Module], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "descent": lambda m: torch.optim.SGD(m.parameters(), lr=0.3),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "averaged": lambda m: PrivateDescent(m.parameters(), lr=0.3, beta=0.8),
    "adam": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.02),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.02),
}


def trained(
    recorded: bool,
    *,
    optimizer: str = "momentum",
    noise: NoiseName = "exact",
    data: tuple[Tensor, Tensor] | None = None,
    dropout: float = 0.0,
    plan: dim.Plan | None = None,
    schedule: bool = True,
    **options: Any,
) -> tuple[Tensor, Captured, list[int]]:
    """Parameters after a run in a loop of one's own; which steps were replayed."""
    plan = plan or make_plan()
    model = make_model(dropout)
    stepped = OPTIMIZERS[optimizer](model)
    private = PrivateGradients(model, plan, noise=noise, seed=3, **options)
    take = private.captured(lambda x, y: LOSS(model(x), y), stepped)
    if not recorded:
        take.why_not, private.engine.static = "not wanted", False
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(stepped, STEPS) if schedule else None
    torch.manual_seed(5)
    x, y = (part.cuda() for part in data or make_data())
    replayed: list[int] = []
    plain = take._replay

    def replay(*given: Any) -> Tensor:
        replayed.append(private.step)
        return plain(*given)

    vars(take)["_replay"] = replay
    for batch in private.batches((x, y)):
        before = private.step
        take(*batch)
        if private.step > before and rates is not None:
            rates.step()
        if recorded:
            overwrite_free_memory()
    private.close()
    return weights(model), take, replayed


def agree(loose: float = 1e-5, **settings: Any) -> tuple[Captured, list[int]]:
    """A recorded run and one without end at the same parameters."""
    ours, take, replayed = trained(True, **settings)
    theirs, other, never = trained(False, **settings)
    assert take._private.step == other._private.step
    assert not never
    assert bool(ours.isfinite().all())
    assert not torch.equal(theirs, weights(make_model()))
    torch.testing.assert_close(ours, theirs, rtol=loose, atol=loose)
    return take, replayed


@cuda
@pytest.mark.parametrize("noise", ["exact", "fast"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replayed_run_is_the_run(optimizer: str, noise: NoiseName) -> None:
    """Falling noise, a falling learning rate, each optimizer; and nearly all steps are replayed."""
    take, replayed = agree(optimizer=optimizer, noise=noise)
    assert take.why_not is None
    assert take._update.recordable == (optimizer != "rprop")
    eager = {1, 2, 4, 8, 16, 32}
    assert replayed == [step for step in range(STEPS) if step + 1 not in eager]


@cuda
@pytest.mark.parametrize("noise", ["exact", "fast"])
def test_dropout_draws_other_masks_in_every_replay(noise: NoiseName) -> None:
    take, _ = agree(dropout=0.5, noise=noise)
    model = take._private.model.train()
    assert model[2].p == 0.5  # type: ignore[index]
    first, again = (take._recordings[key].losses for key in [next(iter(take._recordings))] * 2)
    assert first is again


@cuda
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.4])
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_sampled_batches_in_static_shapes(rate: float, micro_batch: int | None) -> None:
    """Empty draws, draws of one row, large draws between others, draws in parts: all the same as
    without a recording."""
    plan = make_plan(sampling_rate=rate, schedule="uniform")
    take, replayed = agree(plan=plan, pad=True, micro_batch=micro_batch)
    assert replayed
    assert take.why_not is None


@cuda
def test_a_full_batch_in_parts() -> None:
    take, replayed = agree(micro_batch=23)
    assert len(replayed) > 3 * 30
    assert take._finish is not None


@cuda
@pytest.mark.parametrize("clip", [PerLayer(0.7), lambda t: Flat(0.7 if t < 20 else 0.5)])
def test_other_clips(clip: Any) -> None:
    agree(clip=clip)


@cuda
@pytest.mark.parametrize("noise", ["exact", "fast"])
def test_examples_without_a_finite_gradient_add_nothing(noise: NoiseName) -> None:
    x, y = make_data()
    x[3], x[7, 2] = float("nan"), float("inf")
    agree(data=(x, y), noise=noise)


@cuda
@pytest.mark.parametrize("noise", ["exact", "fast"])
def test_noise_of_replays_is_independent_and_of_the_planned_size(noise: NoiseName) -> None:
    """Zero gradients: 40 steps of 30,000 numbers; deviations within 6 standard errors, products of
    two steps' noise within 6."""
    model = nn.Linear(300, 100, bias=False).cuda()
    plan = make_plan(steps=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = PrivateGradients(model, plan, noise=noise)
    take = private.captured(lambda x, y: model(x).sum(1) * y, optimizer)
    x, y = torch.zeros(N, 300, device="cuda"), torch.ones(N, device="cuda")
    found = []
    for batch in private.batches((x, y)):
        take(*batch)
        found.append(private.released[0].flatten().double().clone() * N)
    assert len(found) == 40
    for drawn, sigma in zip(found, plan.sigmas, strict=True):
        std = sigma * 0.7 * private.engine.sensitivity_factor(noise == "exact")
        assert abs(float(drawn.std()) / std - 1) < 6 / (2 * 30_000) ** 0.5
    unit = torch.stack([drawn / drawn.std() for drawn in found])
    products = (unit @ unit.t() / 30_000).fill_diagonal_(0.0)
    assert float(products.abs().max()) < 6 / 30_000**0.5


@cuda
def test_what_is_written_on_a_full_batch_is_gone_in_the_next_step() -> None:
    """By the loss, or by the engine, which zeroes what belongs to an example without a gradient."""
    results = []
    for wanted in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 70, 3), nn.Flatten(), nn.Linear(280, 3)).cuda()
        private = PrivateGradients(model, make_plan(), seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        take = private.captured(lambda x, y, model=model: LOSS(model(x.mul_(0.9)), y), optimizer)
        if not wanted:
            take.why_not, private.engine.static = "not wanted", False
        x, y = make_data()
        x = x.repeat(1, 3)[:, :16].reshape(N, 1, 4, 4).contiguous()
        x[3, 0, 0, 0] = float("nan")
        for batch in private.batches((x.cuda(), y.cuda())):
            take(*batch)
        results.append(weights(model))
        private.close()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@cuda
def test_all_recordings_release_into_the_same_memory() -> None:
    """A gradient that somebody keeps is written over by later gradients, and by nothing else that
    another recording, of another clip, holds in between."""
    model = make_model()
    private = PrivateGradients(model, make_plan(), clip=lambda t: Flat(0.7 if t < 20 else 0.5))
    take = private.captured(
        lambda x, y: LOSS(model(x), y), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    places = set()
    for batch in private.batches(tuple(part.cuda() for part in make_data())):
        before = len(take._recordings)
        take(*batch)
        if not take._eagerly and before:
            places.add(private.released[0].data_ptr())
    assert len(take._recordings) == 2
    assert len(places) == 1


class Recurrent(nn.Module):
    """Hidden weights, which are measured last, beside sums that are checked."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x)[0][:, -1])
        return found


@cuda
def test_norms_of_recurrent_layers_are_waited_for() -> None:
    """In TF32, where other sums are checked in the lanes in which the norms are taken."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    results = []
    try:
        for wanted in (True, False):
            torch.manual_seed(0)
            model = Recurrent().cuda()
            private = PrivateGradients(model, make_plan(clip=0.05), seed=3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            take = private.captured(lambda x, y, model=model: LOSS(model(x), y), optimizer)
            if not wanted:
                take.why_not, private.engine.static = "not wanted", False
            x, y = torch.randn(N, 5, 64), make_data()[1]
            for batch in private.batches((x.cuda(), y.cuda())):
                take(*batch)
            assert (take.why_not is None) == wanted
            results.append(weights(model))
            private.close()
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Branch(nn.Module):
    """Looks at a value on the host."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.inner = make_model(device=device)

    def forward(self, x: Tensor) -> Tensor:
        size = 1.0 if float(x.abs().max().item()) > 1e9 else 2.0
        out: Tensor = self.inner(x)
        return out * size


class Late(torch.autograd.Function):
    """Looks at a value on the host, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad * (1.0 if grad.abs().max().item() < 1e9 else 2.0)


@cuda
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_cannot_be_recorded_runs_step_by_step(kind: str) -> None:
    """One warning, the same result, and dropout afterwards still works."""
    results = []
    for wanted in (True, False):
        torch.manual_seed(0)
        model = Branch().cuda() if kind == "forward" else make_model(0.3)
        private = PrivateGradients(model, make_plan(), seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            out = model(x)
            if kind == "backward":
                out = Late.apply(out)  # type: ignore[no-untyped-call]
            each: Tensor = LOSS(out, y)
            return each

        take = private.captured(losses, optimizer)
        if not wanted:
            take.why_not, private.engine.static = "not wanted", False
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for batch in private.batches(tuple(part.cuda() for part in make_data())):
                take(*batch)
        said = [warning for warning in seen if warning.category is EagerStep]
        assert len(said) == wanted
        assert private.step == STEPS
        assert take.why_not is not None
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


class Asking(Branch):
    """Looks at a value on the host unless it is being recorded, as transformers' masks do."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            out: Tensor = self.inner(x)
            return out * 2.0
        return super().forward(x)


def test_a_model_that_asks_hears_that_it_is_recorded_for_as_long_as_it_is_tried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model, x = Asking("cpu"), torch.full((1, D), 1e10)
    with as_recorded():
        tried = model(x)
    assert not torch.cuda.is_current_stream_capturing()
    torch.testing.assert_close(tried, 2 * model(x))  # beyond 1e9 the other branch is taken


@cuda
def test_a_model_that_looks_only_where_it_is_not_recorded_is_recorded() -> None:
    model = Asking()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = PrivateGradients(model, make_plan(), seed=3)
    take = private.captured(lambda x, y: LOSS(model(x), y), optimizer)
    for batch in private.batches(tuple(part.cuda() for part in make_data())):
        take(*batch)
    assert take.why_not is None


@cuda
def test_modes_and_other_settings_are_followed() -> None:
    """Dropout is switched off, momentum changes, a parameter moves: each is seen."""
    results = []
    for wanted in (True, False):
        model = make_model(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        private = PrivateGradients(model, make_plan(), seed=3)
        take = private.captured(lambda x, y, model=model: LOSS(model(x), y), optimizer)
        if not wanted:
            take.why_not, private.engine.static = "not wanted", False
        torch.manual_seed(5)
        first = model[0]
        assert isinstance(first, nn.Linear)
        for batch in private.batches(tuple(part.cuda() for part in make_data())):
            take(*batch)
            if private.step == 10:
                model[2].eval()
            if private.step == 20:
                optimizer.param_groups[0]["momentum"] = 0.5
            if private.step == 25:
                first.weight.data = first.weight.data.clone()
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@cuda
def test_a_state_that_is_loaded_is_gone_on_from() -> None:
    """Momentum from elsewhere, in the middle of a run."""
    results = []
    for wanted in (True, False):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        private = PrivateGradients(model, make_plan(), seed=3)
        take = private.captured(lambda x, y, model=model: LOSS(model(x), y), optimizer)
        if not wanted:
            take.why_not, private.engine.static = "not wanted", False
        for batch in private.batches(tuple(part.cuda() for part in make_data())):
            take(*batch)
            if private.step == 10:
                kept = copy.deepcopy(optimizer.state_dict())
            if private.step == 20:
                optimizer.load_state_dict(kept)
                overwrite_free_memory()
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def in_a_folder(folder: Path, record: bool, after: Callable[[int, Any], None]) -> Tensor:
    """Parameters after a run with dropout and drawn batches; its state is saved every 5 steps."""
    model = make_model(0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    torch.manual_seed(5)
    fit(
        model,
        make_data(),
        make_plan(sampling_rate=0.4, schedule="uniform"),
        loss=LOSS,
        optimizer=optimizer,
        seed=3,
        folder=Checkpoints(folder, every=5),
        device=Compute(device="cuda", record=record, pad=True),
        progress=Progress(shown=False, after_step=after),
    )
    return weights(model)


def going_on(step: int, private: PrivateGradients) -> None:
    """What is done after a step of a run that nobody stops."""


@cuda
@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_recorded_or_not(first: bool, tmp_path: Path) -> None:
    """Stopped in a recorded run and taken up in one without, and the other way round."""

    class Stop(Exception):
        pass

    def stop(step: int, private: PrivateGradients) -> None:  # noqa: ARG001
        if step == 23:
            raise Stop

    whole = in_a_folder(tmp_path / "whole", first, going_on)
    with pytest.raises(Stop):
        in_a_folder(tmp_path / "parts", first, stop)
    parts = in_a_folder(tmp_path / "parts", not first, going_on)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_captured

def kill(step, private):
    if step == 23:
        os.kill(os.getpid(), signal.SIGKILL)

test_captured.in_a_folder(Path({folder!r}), {record!r}, kill)
"""


@cuda
@pytest.mark.parametrize("first", [True, False])
def test_a_killed_run_goes_on_recorded_or_not(first: bool, tmp_path: Path) -> None:
    """A process that dies in a recorded run, and one that dies in a run step by step."""
    whole = in_a_folder(tmp_path / "whole", first, going_on)
    script = KILLED.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path / "parts"), record=first
    )
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    parts = in_a_folder(tmp_path / "parts", not first, going_on)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@cuda
def test_fit_records_by_itself_and_says_nothing_of_it() -> None:
    plan = make_plan(sampling_rate=0.4, schedule="uniform")
    results = []
    for record in (True, False):
        model = make_model()
        with warnings.catch_warnings():
            warnings.simplefilter("error", EagerStep)
            fit(
                model,
                make_data(),
                plan,
                loss=LOSS,
                lr=0.1,
                seed=3,
                device=Compute(device="cuda", record=record),
                progress=False,
            )
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@cuda
def test_a_refused_step_leaves_everything_as_it_was() -> None:
    model = make_model()
    private = PrivateGradients(model, make_plan(steps=12), seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take = private.captured(lambda x, y: LOSS(model(x), y), optimizer)
    x, y = (part.cuda() for part in make_data())
    for _ in range(12):
        take(x, y)
    before = weights(model).clone()
    with pytest.raises(dim.BudgetRefused):
        take(x, y)
    assert torch.equal(weights(model), before)
    assert private.step == 12


@cuda
def test_a_clip_norm_beside_which_underflow_counts_is_refused_before_it_is_paid_for() -> None:
    x, y = (part.cuda() for part in make_data())
    private = PrivateGradients(make_model(), make_plan(clip=1e-10))
    losses = LOSS(private.model(x), y)
    with pytest.raises(InputError, match="at least 1e-09 on a GPU"):
        private.backward(losses)
    assert private.charged == 0


@cuda
def test_a_batch_of_ones_own_is_refused_where_rows_are_sampled() -> None:
    model = make_model()
    private = PrivateGradients(model, make_plan(sampling_rate=0.5), seed=3)
    take = private.captured(
        lambda x, y: LOSS(model(x), y), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    x, y = (part.cuda() for part in make_data())
    with pytest.raises(InputError, match=r"drawn by private\.batches"):
        take(x, y)
    assert private.step == 0


def test_on_a_cpu_steps_run_one_operation_after_the_other() -> None:
    results = []
    for captured in (True, False):
        model = make_model(device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        private = PrivateGradients(model, make_plan(sampling_rate=0.3), seed=3)
        take = private.captured(lambda x, y, model=model: LOSS(model(x), y), optimizer)
        assert take.why_not == "the model is not on a GPU"
        for x, y in private.batches(make_data()):
            if captured:
                losses = take(x, y)
                assert len(losses) == len(x)
                assert not losses.requires_grad
                continue
            private.backward(LOSS(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        results.append(weights(model))
    assert torch.equal(*results)

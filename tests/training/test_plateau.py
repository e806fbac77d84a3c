"""A learning rate that follows a metric: never a private one that nobody paid for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import diminuendo as dim
from diminuendo.spending import PlanSpending
from diminuendo.training import Checkpoints, OnPlateau, PrivateGradients, Progress, fit
from diminuendo.training.evaluation import evaluate
from diminuendo.training.mechanism import ExactNoise
from diminuendo.training.mechanism.keys import Keys

N, STEPS = 60, 12
LOSS = nn.CrossEntropyLoss(reduction="none")


def make_data(rows: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=chance)
    return x, (x[:, 0] > 0).long()


def make_plan(epsilon: float = 4.0, **settings: Any) -> dim.Plan:
    given = {"schedule": "uniform", "steps": STEPS, **settings}
    return dim.plan((epsilon, 1e-5), examples=N, parameters=15, **given)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 3)


def run(plan: dim.Plan, *, mode: str = "min", threshold: float = 1e-4, **given: Any) -> Any:
    """Fit with an OnPlateau that takes the words it knows; returns it and fit's result."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    metric = {name: given.pop(name) for name in ("public", "paid", "every") if name in given}
    inner = ReduceLROnPlateau(optimizer, mode, factor=0.5, patience=0, threshold=threshold)  # type: ignore[arg-type]
    scheduler = OnPlateau(inner, **metric)
    given = {"data": make_data(), "loss": LOSS, **given}
    data = given.pop("data")
    result = fit(
        model,
        data,
        plan,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        **{"progress": False, **given},
    )
    return scheduler, result


def test_a_metric_is_either_public_or_paid() -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=1.0)
    plateau = ReduceLROnPlateau(optimizer)
    with pytest.raises(dim.InputError, match=r"exactly one.*neither"):
        OnPlateau(plateau)
    with pytest.raises(dim.InputError, match=r"exactly one.*both"):
        OnPlateau(plateau, public=make_data(), paid=0.1)
    with pytest.raises(dim.InputError, match="a ReduceLROnPlateau"):
        OnPlateau(StepLR(optimizer, 3), paid=0.1)  # type: ignore[arg-type]
    for share in (0, 1, -0.1, math.nan):
        with pytest.raises(dim.InputError, match="paid"):
            OnPlateau(plateau, paid=share)
    with pytest.raises(dim.InputError, match="every"):
        OnPlateau(plateau, paid=0.1, every=0)


class _Asked(PlanSpending):
    """Fails as soon as anything is charged, or even begun."""

    def resume(self, *args: Any, **kwargs: Any) -> int:
        raise AssertionError(("begun", args, kwargs))

    def request(self, event: Any) -> None:
        raise AssertionError(("charged", event))


@pytest.mark.parametrize("copied", [False, True])
def test_the_training_data_are_not_public(copied: bool) -> None:
    data = make_data()
    public = tuple(part.clone() for part in data) if copied else data
    plan = make_plan()
    with pytest.raises(dim.InputError, match="other rows than the training data"):
        run(plan, public=public, data=data, spending=_Asked(plan))


def test_what_has_no_classes_cannot_be_counted() -> None:
    x, y = make_data()
    plan, loss = make_plan(), lambda out, target: (out[:, 0] - target).square()
    given: dict[str, Any] = {"data": (x, y.float()), "loss": loss, "spending": _Asked(plan)}
    with pytest.raises(dim.InputError, match="scores of classes"):
        run(plan, paid=0.1, every=5, **given)
    with pytest.raises(dim.InputError, match="scores of classes"):
        run(plan, public=(x[:9], y[:9].float()), mode="max", **given)


def test_public_rows_that_do_not_fit_are_refused_before_anything_is_spent() -> None:
    plan, (x, y) = make_plan(), make_data(9, seed=1)
    for public in ((x[:, :2], y), (x[:0], y[:0]), (x, y + 7), 5, (x, y[:3])):
        with pytest.raises(dim.InputError):
            run(plan, public=public, spending=_Asked(plan))


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_metric_of_public_rows_is_followed(mode: str) -> None:
    public = make_data(200, seed=1)
    scheduler, result = run(make_plan(epsilon=50), public=public, mode=mode, every=3)
    assert (result.status, list(scheduler.values)) == ("done", [3, 6, 9, 12])
    model = make_model()
    before = evaluate(model, public, LOSS)
    last = scheduler.values[12]
    assert last < before.loss if mode == "min" else last > (before.accuracy or 1)


def test_the_learning_rate_falls_where_nothing_improves() -> None:
    scheduler, _ = run(make_plan(), public=(torch.zeros(5, 4), torch.zeros(5).long()), mode="max")
    assert scheduler.optimizer.param_groups[0]["lr"] < 1.0


def test_a_paid_metric_costs_exactly_what_the_plan_does() -> None:
    for rate in (1.0, 0.5):
        plan = make_plan(sampling_rate=rate)
        spending = PlanSpending(plan)
        scheduler, result = run(plan, paid=0.3, every=4, spending=spending)
        assert list(scheduler.values) == [4, 8, 12]
        assert result.epsilon == plan.epsilon
        assert spending.granted == PlanSpending.granted.fget(_all_of(plan))  # type: ignore[attr-defined]


def _all_of(plan: dim.Plan) -> PlanSpending:
    whole = PlanSpending(plan)
    for event in plan.events:
        whole.request(event)
    return whole


@pytest.mark.parametrize("noise", ["exact", "fast"])
def test_gradient_and_number_share_the_noise_that_was_paid(noise: Any) -> None:
    """1/σ² of both add up to the plan's. Both estimates are 8 of their own errors inside."""
    model = nn.Linear(200, 100)
    plan = dim.plan((2, 1e-5), examples=8, parameters=20_100, steps=4, clip=0.7, schedule="uniform")
    private = PrivateGradients(model, plan, noise=noise)
    private.set_aside = lambda step: 0.75 if step % 2 else 0.0
    x = torch.zeros(8, 200)
    found = []
    for _ in range(2):
        private.backward(0.0 * model(x).sum(1))
        drawn = torch.cat([part.flatten() for part in private.released]).double() * 8
        found.append(float(drawn.std()) / (0.7 * plan.sigmas[0]))
    factor = private.engine.sensitivity_factor(noise == "exact")
    assert found[0] == pytest.approx(2.0 * factor, rel=0.04)
    assert found[1] == pytest.approx(1.0 * factor, rel=0.04)
    steps = range(10, 4010)
    numbers = [private.mechanism.noise.add_beside(5, noise_std=3.0, step=t) for t in steps]
    assert np.std(numbers) == pytest.approx(3.0, rel=0.09)
    assert np.mean(numbers) == pytest.approx(5.0, abs=8 * 3 / math.sqrt(4000))


def test_a_number_is_released_once_and_only_where_it_was_set_aside() -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan(epsilon=1e4))
    private.set_aside = lambda step: 0.5 if step == 2 else 0.0
    with pytest.raises(dim.UsageError, match="set aside"):
        private.release_number(3)
    private.backward(LOSS(model(x), y))
    with pytest.raises(dim.UsageError, match="set aside"):
        private.release_number(3)
    private.backward(LOSS(model(x), y))
    assert private.release_number(30) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(dim.UsageError, match="released before"):
        private.release_number(3)
    private.set_aside = lambda _: 1.0
    spent = private.spending.steps
    with pytest.raises(dim.InputError, match="set aside"):
        private.backward(LOSS(model(x), y))
    assert private.spending.steps == spent


def test_a_number_s_noise_is_never_drawn_twice_and_not_the_gradient_s() -> None:
    noise = ExactNoise(Keys.make(7))
    assert noise.keys.noise(0) != noise.keys.noise_beside(0)
    with pytest.raises(dim.DiminuendoError, match="drawn before"):
        noise.keys.noise_beside(0)


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_the_number_counts_the_whole_batch(micro_batch: int | None) -> None:
    """At a budget that leaves next to no noise, the first metric is that of the model's start."""
    data = make_data()
    scheduler, _ = run(
        make_plan(epsilon=1e5),
        paid=0.5,
        mode="max",
        data=data,
        device=dim.training.Compute(micro_batch=micro_batch),
    )
    start = evaluate(make_model(), data, LOSS).accuracy
    assert scheduler.values[1] == pytest.approx(start, abs=0.02)


def test_blank_rows_are_not_counted() -> None:
    plan = make_plan(sampling_rate=0.3)
    (plain, _), (filled, _) = (
        run(plan, paid=0.5, mode="max", seed=1, device=dim.training.Compute(pad=pad))
        for pad in (False, True)
    )
    assert filled.values == pytest.approx(plain.values, abs=1e-6)


def test_rows_of_a_run_that_broke_off_are_not_counted_in_the_next() -> None:
    """A row that is counted twice would move the number by two, for the price of one."""
    x, y = make_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = OnPlateau(ReduceLROnPlateau(optimizer, "max"), paid=0.5)
    broken = PlanSpending(make_plan())
    broken.request = _refuse  # type: ignore[method-assign]
    given: dict[str, Any] = {"loss": LOSS, "optimizer": optimizer, "lr_scheduler": scheduler}
    fit(model, (x, y), make_plan(), spending=broken, progress=False, **given)
    fit(model, (x, y), make_plan(epsilon=1e5), progress=False, **given)
    assert all(value < 1.1 for value in scheduler.values.values())


def _refuse(event: Any) -> None:
    raise dim.BudgetRefused(f"no {event}")


def test_noise_that_fades_is_warned_about_with_both_numbers() -> None:
    plan = make_plan(schedule="optimal", gamma=0.8)
    assert plan.sigmas[-1] < plan.sigmas[0]
    with pytest.warns(dim.PlanWarning, match=r"never improves: .*where the plan has 1\)"):
        run(plan, public=make_data(20, seed=1))
    with pytest.raises(dim.InputError, match="never improves"):
        run(plan, public=make_data(20, seed=1), strict=True, spending=_Asked(plan))
    planned = make_plan(schedule="optimal", gamma=0.8, lr=dim.influence.linear(STEPS))
    with pytest.warns(dim.PlanWarning, match=r"never improves: "):
        run(planned, paid=0.1)


def test_a_run_that_was_stopped_goes_on_with_the_metric_s_state(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: int, private: PrivateGradients) -> None:
        if step == private.step == 7:
            raise Stop

    given: dict[str, Any] = {"paid": 0.4, "every": 2, "mode": "max", "threshold": 9.0}
    given |= {"seed": 5, "noise": "fast"}
    whole, _ = run(make_plan(), **given)
    folder = Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(Stop):
        run(make_plan(), folder=folder, progress=Progress(shown=False, after_step=stop), **given)
    rest, result = run(make_plan(), folder=folder, **given)
    assert result.status == "done"
    assert rest.values == whole.values
    rates = [one.optimizer.param_groups[0]["lr"] for one in (whole, rest)]
    assert rates[0] == rates[1] < 1


def test_measuring_leaves_every_part_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    model[1].eval()
    evaluate(model, make_data(8), LOSS)
    assert [part.training for part in model] == [True, False, True]

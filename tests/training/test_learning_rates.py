"""Training follows the plan's learning rates, and says what another schedule costs."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import LINEAR, LOSS, run
from torch import nn
from torch.optim import lr_scheduler as schedulers

import diminuendo as dim
from diminuendo import influence
from diminuendo.planning import mismatch
from diminuendo.training import PrivateDescent, PrivateGradients, follow_plan

STEPS = LINEAR.steps
make_plan, make_model = LINEAR.plan, LINEAR.model


class Recording(PrivateDescent):
    """Plain descent that writes down the learning rate of every step."""

    seen: list[float]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(self.param_groups[0]["lr"])
        super().step(closure)


def rates_of(plan: dim.Plan, **options: Any) -> list[float]:
    """The optimizer's learning rate at every step of a run."""
    model = make_model()
    optimizer = Recording(model.parameters(), lr=0.2)
    optimizer.seen = []
    make = options.pop("scheduler", None)
    run(model, plan, optimizer=optimizer, lr_scheduler=make(optimizer) if make else None, **options)
    return optimizer.seen


def test_a_run_has_the_learning_rates_of_its_plan() -> None:
    lr = influence.warm_up(influence.cosine(STEPS), steps=3)
    assert rates_of(make_plan(gamma=0.95, lr=lr)) == pytest.approx(0.2 * lr)
    joint = make_plan(spectrum=[1.0, 0.3, 0.1], lr="joint")
    assert joint.lr is not None
    assert rates_of(joint) == pytest.approx(0.2 * joint.lr)
    assert rates_of(make_plan(gamma=0.95)) == pytest.approx(np.full(STEPS, 0.2))


def test_planned_learning_rates_survive_a_stop(tmp_path: Path) -> None:
    plan = make_plan(gamma=0.95, lr=influence.linear(STEPS))

    def stop(step: int, _: PrivateGradients) -> None:
        if step == 7:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        rates_of(plan, folder=tmp_path, every=1, after_step=stop)
    again = rates_of(plan, folder=tmp_path, every=1)
    assert again == pytest.approx(0.2 * influence.linear(STEPS)[STEPS - len(again) :])
    assert 0 < len(again) < STEPS


def cosine(optimizer: Any) -> Any:
    return schedulers.CosineAnnealingLR(optimizer, T_max=STEPS)


def test_the_schedule_that_was_planned_for_is_no_surprise() -> None:
    plan = make_plan(gamma=0.95, lr=cosine)
    assert rates_of(plan, scheduler=cosine, strict=True) == pytest.approx(
        0.2 * influence.cosine(STEPS), abs=1e-9
    )


def test_another_schedule_is_said_before_anything_is_spent() -> None:
    plan = make_plan(gamma=0.95)
    with pytest.warns(dim.PlanWarning, match=r"more noise in the final loss.*uniform"):
        rates_of(plan, scheduler=cosine)
    model = make_model()
    optimizer = PrivateDescent(model.parameters(), lr=0.2)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(dim.InputError, match=rf"learning rate of step {STEPS}.*Plan again"):
        run(model, plan, optimizer=optimizer, lr_scheduler=cosine(optimizer), strict=True)
    for was, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(was, parameter)


def test_uniform_noise_goes_with_every_schedule() -> None:
    rates_of(make_plan(gamma=0.95, schedule="uniform"), scheduler=cosine, strict=True)


def test_looking_ahead_leaves_scheduler_and_optimizer_as_they_were() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    chain = schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, 1.0, 4), cosine(optimizer)],
        milestones=[4],
    )
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    state = str(chain.state_dict())
    with pytest.warns(dim.PlanWarning):
        assert follow_plan(optimizer, make_plan(gamma=0.95), chain) is chain
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == group
    assert str(chain.state_dict()) == state


def test_looking_ahead_leaves_a_learning_rate_in_a_tensor_as_it_was() -> None:
    model = make_model()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = schedulers.StepLR(optimizer, 2, 0.5)
    with pytest.warns(dim.PlanWarning):
        follow_plan(optimizer, make_plan(gamma=0.9), scheduler)
    assert optimizer.param_groups[0]["lr"] is rate  # a recorded step would read this very tensor
    assert float(rate) == 0.5


def test_a_learning_rate_in_a_tensor_follows_the_plan() -> None:
    plan = make_plan(lr=influence.cosine(STEPS))
    ends = []
    for lr in (0.2, torch.tensor(0.2)):
        model = make_model()
        run(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=lr), seed=3)
        ends.append(torch.cat([part.detach().flatten() for part in model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0])


def test_a_scheduler_that_ends_before_the_run_is_refused() -> None:
    optimizer = PrivateDescent(make_model().parameters(), lr=0.2)
    one_cycle = schedulers.OneCycleLR(
        torch.optim.SGD(make_model().parameters(), lr=0.1), max_lr=0.1, total_steps=STEPS - 5
    )
    with pytest.raises(dim.InputError, match="a scheduler for"):
        follow_plan(one_cycle.optimizer, make_plan(gamma=0.95), one_cycle)
    with pytest.raises(dim.InputError, match="needs no loss"):
        follow_plan(
            optimizer,
            make_plan(gamma=0.95),
            schedulers.ReduceLROnPlateau(optimizer),
        )


def test_the_cost_of_a_mismatch_is_that_of_the_influence() -> None:
    """Estimated from the plan alone, it is what the influence says for gradient descent."""
    budget, lr = dim.Budget(epsilon=4, delta=1e-5), influence.cosine(100)
    plan = dim.plan(budget, examples=1000, parameters=10, gamma=0.98, steps=100)
    cost = mismatch(plan, lr)
    assert cost is not None
    q = influence.gradient_descent(gamma=0.98, steps=100, lr=lr)
    left = float(np.sum(q * plan.sigmas**2)) * budget.R
    assert cost.over_planned == pytest.approx(left / np.sum(np.sqrt(q)) ** 2, rel=0.05)
    assert cost.over_uniform == pytest.approx(left / (100 * np.sum(q)), rel=0.05)
    assert cost.over_uniform > 1
    assert (cost.step, cost.planned) == (100, 1)
    assert mismatch(plan, np.full(100, 0.3)) is None


def own_loop(plan: dim.Plan, *, follow: bool, base: float = 0.1) -> None:
    model = make_model()
    private = PrivateGradients(model, plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=base)
    scheduler = follow_plan(optimizer, plan) if follow else None
    for x, y in private.batches(LINEAR.data()):
        private.backward(LOSS(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    private.close()


def test_a_loop_of_its_own_is_told_where_it_leaves_the_plan() -> None:
    falling = make_plan(gamma=0.95, lr=influence.linear(STEPS))
    own_loop(falling, follow=True)
    with pytest.warns(dim.PlanWarning, match=r"step 2 is 0.1, where the plan has 0.095") as caught:
        own_loop(falling, follow=False)
    assert len(caught) == 1
    own_loop(make_plan(gamma=0.95), follow=False)


def test_a_loop_of_its_own_is_told_that_falling_noise_is_for_a_constant_rate() -> None:
    """Noise that falls and a learning rate that falls: the fall is counted twice."""

    def fall(plan: dim.Plan) -> None:
        model = make_model()
        private = PrivateGradients(model, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        scheduler = cosine(optimizer)
        for x, y in private.batches(LINEAR.data()):
            private.backward(LOSS(model(x), y))
            optimizer.step()
            scheduler.step()
        private.close()

    with pytest.warns(dim.PlanWarning, match=r"step 2 is .*plan has 0.2: .*constant one. Plan for"):
        fall(make_plan(gamma=0.95))
    fall(make_plan(gamma=0.95, schedule="uniform"))


class Standing(torch.optim.Optimizer):
    """An optimizer that calls something else its momentum, and leaves the model as it is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.2, "momentum": None})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


@pytest.mark.parametrize(
    ("make", "used"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.2), "0"),
        (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), None),
        (lambda p: torch.optim.Adam(p, lr=0.2, betas=(0.8, 0.999)), "0.8"),
        (lambda p: torch.optim.Adam(p, lr=0.2), None),
        (lambda p: torch.optim.Adam(p, lr=0.2, betas=[0.8, 0.999]), "0.8"),  # type: ignore[arg-type]
        (Standing, None),
        (lambda p: PrivateDescent(p, lr=0.2, beta=0.9), None),
        (lambda p: PrivateDescent(p, lr=0.2, beta=0.0), "0"),
    ],
)
def test_a_loop_is_told_once_that_the_noise_was_made_for_another_momentum(
    make: Any, used: str | None
) -> None:
    model = make_model()
    private = PrivateGradients(model, make_plan(gamma=0.95, momentum=0.9))
    optimizer = make(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in private.batches(LINEAR.data()):
            private.backward(LOSS(model(x), y))
            optimizer.step()
    private.close()
    told = [str(one.message) for one in caught if isinstance(one.message, dim.PlanWarning)]
    told = [text for text in told if "momentum" in text]
    assert len(told) == (used is not None)
    assert used is None or f"momentum is {used}, where the plan has 0.9" in told[0]


@pytest.mark.parametrize("falling", [True, False])
def test_a_run_that_begins_or_ends_at_a_learning_rate_of_zero_is_finite(falling: bool) -> None:
    """It ended at NaN with the budget spent: noise that is infinite in float32, times zero."""
    rates = np.linspace(1, 0, STEPS) if falling else np.minimum(np.arange(STEPS) / 5, 1)
    for beta in (0.0, 0.9):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=beta)
        run(model, make_plan(gamma=0.95, lr=rates), optimizer=optimizer)
        assert all(bool(torch.isfinite(part).all()) for part in model.parameters())


@pytest.mark.parametrize(
    ("planned", "used", "said"),
    [
        ([0.0, 0.5, 1.0], [0.1, 0.1, 0.1], "step 1 is 0.1, where the plan has 0:"),
        (None, [0.0, 0.1, 0.2], "step 1 is 0, where the plan has one above 0"),
        ([0.0, 0.5, 1.0], [0.0, 0.1, 0.2], None),
    ],
)
def test_a_loop_of_its_own_that_begins_at_zero(
    planned: list[float] | None, used: list[float], said: str | None
) -> None:
    plan = make_plan(gamma=0.95, lr=planned, steps=3)
    model = make_model()
    private = PrivateGradients(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rate, (x, y) in zip(used, private.batches(LINEAR.data()), strict=True):
            private.backward(LOSS(model(x), y))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    private.close()
    told = [str(one.message) for one in caught if isinstance(one.message, dim.PlanWarning)]
    assert len(told) == (said is not None)
    assert said is None or said in told[0]


def test_a_run_that_is_told_leaves_the_others_alone() -> None:
    """PyTorch goes through all hooks of a step: to remove one meanwhile raised a RuntimeError."""
    plan = make_plan(gamma=0.95, lr=influence.linear(STEPS))
    models = [make_model() for _ in range(3)]
    runs = [PrivateGradients(model, plan) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def two_steps(which: int) -> None:
        x, y = LINEAR.data()
        for _ in range(2):
            runs[which].backward(LOSS(models[which](x), y))
            optimizers[which].step()

    for which in (0, 1):
        with pytest.warns(dim.PlanWarning, match="step 2 is"):
            two_steps(which)
    del runs[2]  # nobody closed it
    torch.optim.SGD(make_model().parameters(), lr=0.1).step()
    for private in runs:
        private.close()


def test_other_optimizers_and_closed_runs_are_not_watched() -> None:
    model = make_model()
    private = PrivateGradients(model, make_plan(gamma=0.95, lr=influence.linear(STEPS)))
    other = nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in private.batches(LINEAR.data()):
        private.backward(LOSS(model(x), y))
        elsewhere.step()
    private.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()


def test_several_watched_runs_at_a_time_each_take_their_steps() -> None:
    """PyTorch calls all hooks of all optimizers in turn, and none may leave meanwhile."""
    plan = make_plan(gamma=0.95, lr=influence.linear(STEPS))
    forgotten = PrivateGradients(make_model(), plan)
    open_one = PrivateGradients(make_model(), plan)
    del forgotten
    gc.collect()
    with pytest.warns(dim.PlanWarning, match="step 2"):
        own_loop(plan, follow=False)
    own_loop(plan, follow=True)
    open_one.close()

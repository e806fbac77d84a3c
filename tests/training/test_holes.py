"""What the guard refuses: each of these was once accepted, and released what nobody paid for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import LINEAR, LOSS, run
from torch import Tensor, nn

import diminuendo as dim
from diminuendo.errors import InputError, UsageError
from diminuendo.spending import PlanSpending
from diminuendo.training import PrivateGradients, fit, probe
from diminuendo.training.sampling import Part, draw
from diminuendo.training.seeds import Seeds

D = LINEAR.features
MIXED = r"mixe[sd]"


@cache
def sampled(rate: float = 0.3) -> dim.Plan:
    """A plan at a sampling rate, made once: to plan takes longer than to train."""
    return LINEAR.plan(sampling_rate=rate, schedule="uniform")


def looped(private: PrivateGradients, data: Any = None) -> PrivateGradients:
    """One's own loop over all steps."""
    for x, y in private.batches(LINEAR.data() if data is None else data):
        private.backward(LOSS(private.model(x), y))
    return private


def _replaced(plan: dim.Plan) -> dim.Plan:
    return replace(plan, sigmas=plan.sigmas / 10)


def _set(plan: dim.Plan) -> dim.Plan:
    object.__setattr__(plan, "sigmas", plan.sigmas / 10)
    return plan


def _written(plan: dim.Plan) -> dim.Plan:
    plan.sigmas.setflags(write=True)
    plan.sigmas[3] /= 10
    return plan


def _rates(plan: dim.Plan) -> dim.Plan:
    plan.__dict__["rates"] = np.ones(plan.steps)
    return plan


@pytest.mark.parametrize("change", [_replaced, _set, _written, _rates])
def test_a_plan_with_other_noise_than_it_was_planned_for(change: Any) -> None:
    plan = LINEAR.plan(sampling_rate=0.2, schedule="uniform")
    assert plan.digest
    changed = change(plan)
    with pytest.raises(dim.InputError, match="plan again"):
        PrivateGradients(LINEAR.model(), changed)
    with pytest.raises(dim.InputError, match="plan again"):
        run(LINEAR.model(), changed)


def test_a_plan_with_more_noise_is_fine() -> None:
    assert run(LINEAR.model(), LINEAR.plan(steps=3).with_noise_scaled(1.5)).status == "done"


class Mixing(nn.Module):
    """A linear model, some way before or after a mixture of examples."""

    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor], *, before: bool) -> None:
        super().__init__()
        self.mix, self.before = mix, before
        self.drop, self.linear = nn.Dropout(0.2), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            out: Tensor = self.linear(self.mix(self, self.drop(x)))
            return out
        return self.mix(self, self.drop(self.linear(x)))


def _doubled_in_the_middle(rows: Tensor) -> Tensor:
    return torch.cat([rows[:1], rows[1:] + rows[:-1]]) if len(rows) > 2 else rows


MIXTURES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "the first is spared": lambda _, rows: rows.cumsum(0),
    "while training": lambda m, rows: rows - rows.mean(0) if m.training else rows,
    "over 2 rows": lambda _, rows: rows - rows.mean(0) if len(rows) > 2 else rows,
    "neighbours over 2 rows": lambda _, rows: _doubled_in_the_middle(rows),
    "weakly": lambda _, rows: rows + 1e-3 * rows.mean(0),
    "without a gradient": lambda _, rows: rows - rows.detach().mean(0),
    "by rank": lambda _, rows: rows + rows.argsort(0).argsort(0),
    "as many rows as columns": lambda _, rows: rows.T if len(rows) == rows.shape[1] else rows,
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_examples(kind: str, before: bool) -> None:
    model = Mixing(MIXTURES[kind], before=before)
    state = {name: part.clone() for name, part in model.state_dict().items()}
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        run(model, sampled(), seed=1)  # whose first draw has rows enough to mix
    assert all(torch.equal(part, state[name]) for name, part in model.state_dict().items())


def _first_draws_of_at_most(rows: int, plan: dim.Plan) -> int:
    """A seed whose first draws show nothing: so few rows."""
    for seed in range(1000):
        seeds, rate = Seeds.make(seed), float(plan.rates[0])
        if all(len(draw(plan.examples, rate, seeds, step)) <= rows for step in range(2)):
            return seed
    raise AssertionError("no such seed")


@pytest.mark.parametrize("kind", [*MIXTURES, "backward"])
def test_mixtures_that_the_first_draws_are_too_small_to_show(kind: str) -> None:
    """They were charged for the steps before the first draw that showed it."""
    mix = MIXTURES.get(kind, lambda _, rows: _Backwards.apply(rows))  # type: ignore[no-untyped-call]
    plan = sampled(0.04)
    spending = PlanSpending(plan)
    seed = _first_draws_of_at_most(1, plan)
    if kind == "as many rows as columns":
        seed = _first_draws_of_at_most(D - 1, plan)
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        run(Mixing(mix, before=False), plan, seed=seed, spending=spending)
    assert spending.steps == 0, "nothing was charged"


def test_trying_a_model_out_leaves_its_random_numbers_alone() -> None:
    """A run with dropout goes on after a checkpoint as it would have without one."""
    model = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model.train()
    with pytest.raises(StopIteration):
        run(model, sampled(0.04), seed=2, after_step=_stop)
    again = torch.get_rng_state()
    torch.set_rng_state(before)
    seeds = Seeds.make(2)
    first = draw(LINEAR.examples, 0.04, seeds, 0)
    if len(first):
        model(LINEAR.data()[0][first])
    assert torch.equal(torch.get_rng_state(), again)


def _stop(step: int, private: PrivateGradients) -> None:
    del step, private
    raise StopIteration


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if "columns" not in kind])
def test_mixtures_of_examples_in_one_s_own_loop(kind: str, before: bool) -> None:
    model = Mixing(MIXTURES[kind], before=before)
    private = PrivateGradients(model, sampled())
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        looped(private)
    assert private.spending.steps <= 2, "batches of fewer rows may come first"


class _Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0].cumsum(0)


def _hooked(rows: Tensor) -> Tensor:
    out = rows.clone()
    if out.requires_grad:
        out.register_hook(lambda grad: grad + 1e-3 * grad.sum(0))  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize("kind", [lambda rows: _Backwards.apply(rows), _hooked])  # type: ignore[no-untyped-call]
@pytest.mark.parametrize("own", [False, True])
def test_mixtures_in_the_backward_pass(kind: Any, own: bool) -> None:
    model, plan = Mixing(lambda _, rows: kind(rows), before=False), LINEAR.plan(steps=3)
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        _ = looped(PrivateGradients(model, plan)) if own else run(model, plan)


class Headed(nn.Module):
    """Two layers with something between or before them; the last may begin with zeros."""

    def __init__(
        self, before: Callable[[Tensor], Tensor], between: Callable[[Tensor], Tensor], zeros: bool
    ) -> None:
        super().__init__()
        self.before, self.between = before, between
        self.first, self.last = nn.Linear(D, 8), nn.Linear(8, 3)
        if zeros:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(self.before(x))))
        return out


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets.unsqueeze(1)).square().sum(1)


@pytest.mark.parametrize("loss", [LOSS, _squares])
@pytest.mark.parametrize("own", [False, True])
def test_a_last_layer_of_zeros_hides_no_mixture(loss: Any, own: bool) -> None:
    model, plan = Headed(lambda x: x - x.mean(0), torch.relu, zeros=True), LINEAR.plan(steps=3)
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        _ = looped(PrivateGradients(model, plan)) if own else run(model, plan, loss=loss)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].mean()


def _straight_through(rows: Tensor) -> Tensor:
    scaled = rows * rows.detach().mean()
    return scaled + (rows - scaled).detach()


def _scaled_by_a_hook(rows: Tensor) -> Tensor:
    out, factor = rows.clone(), rows.detach().mean()
    if out.requires_grad:
        out.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "kind",
    [_straight_through, _scaled_by_a_hook, lambda rows: _Scaled.apply(rows)],  # type: ignore[no-untyped-call]
    ids=["straight through", "hook", "function"],
)
def test_gradients_that_depend_on_values_of_other_examples(
    kind: Any, own: bool, zeros: bool
) -> None:
    model, plan = Headed(lambda x: x, kind, zeros), LINEAR.plan(steps=3)
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        _ = looped(PrivateGradients(model, plan)) if own else run(model, plan)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_whose_gradients_depend_on_values_of_other_examples() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return _straight_through(LOSS(outputs, targets))

    with pytest.raises(dim.DiminuendoError, match=MIXED):
        run(LINEAR.model(), LINEAR.plan(steps=3), loss=loss)


class WithItsGenerator(nn.Module):
    def __init__(self, only_training: bool) -> None:
        super().__init__()
        self.only_training = only_training
        self.linear, self.generator = nn.Linear(D, 3), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        if self.training or not self.only_training:
            x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        out: Tensor = self.linear(x)
        return out


class Unrepeatable(nn.Module):
    """Noise from a generator that nobody finds, while training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(D, 3), [torch.Generator()]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.hidden[0]) if self.training else 0.0
        out: Tensor = self.linear(x - x.mean(0) + noise)
        return out


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: WithItsGenerator(True), lambda: WithItsGenerator(False), Unrepeatable]
)
def test_random_numbers_of_its_own_hide_no_mixture(make: Any, own: bool) -> None:
    model, plan = make(), LINEAR.plan(steps=3)
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        _ = looped(PrivateGradients(model, plan)) if own else run(model, plan)
    assert model.training


class TwoInputs(nn.Module):
    def __init__(self, mix: bool) -> None:
        super().__init__()
        self.mix, self.linear = mix, nn.Linear(D, 3)

    def forward(self, x: Tensor, *, others: Tensor, shared: Tensor | None = None) -> Tensor:
        rows = x + others - (others.mean(0) if self.mix else 0)
        out: Tensor = self.linear(rows if shared is None else rows @ shared)
        return out


def test_mixtures_in_another_argument_of_a_call() -> None:
    for mix in (True, False):
        private = PrivateGradients(TwoInputs(mix), LINEAR.plan(steps=3))
        for x, y in private.batches(LINEAR.data()):
            if mix:
                with pytest.raises(dim.DiminuendoError, match=MIXED):
                    private.model(x, others=x * 1.0)
                break
            private.backward(LOSS(private.model(x, others=x * 1.0), y))


def test_what_all_examples_share_may_have_as_many_rows_as_the_batch() -> None:
    data = (torch.randn(D, D), torch.randint(0, 3, (D,)))
    private = PrivateGradients(TwoInputs(False), LINEAR.plan(steps=3, examples=D))
    for x, y in private.batches(data):
        private.backward(LOSS(private.model(x, others=x * 1.0, shared=torch.rand(D, D)), y))
    assert private.step == 3


@pytest.mark.parametrize("own", [False, True])
def test_mixtures_of_small_numbers(own: bool) -> None:
    model = Mixing(lambda _, rows: 1e-9 * (rows - rows.detach().mean(0)), before=False)
    plan = LINEAR.plan(steps=3)
    if own:
        with pytest.raises(dim.DiminuendoError, match=MIXED):
            looped(PrivateGradients(model, plan))
        return
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        run(model, plan, loss=lambda outputs, y: outputs[range(len(y)), y])


@pytest.mark.parametrize("own", [False, True])
def test_mixtures_where_gradients_are_wanted(own: bool) -> None:
    model = Headed(
        lambda x: x - x.mean(0) if torch.is_grad_enabled() else x, torch.relu, zeros=False
    )
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        _ = looped(PrivateGradients(model, sampled())) if own else run(model, sampled())


class Tokens(nn.Module):
    """Mixes examples after an embedding that is frozen: whole numbers have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(11, 5), nn.Linear(5, 3)
        self.table.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.table(tokens).mean(1)
        out: Tensor = self.linear(rows + 1e-2 * rows.cumsum(0))
        return out


@pytest.mark.parametrize("own", [False, True])
def test_mixtures_of_whole_numbers(own: bool) -> None:
    tokens, y = torch.randint(0, 11, (LINEAR.examples, 6)), LINEAR.data()[1]
    model, plan = Tokens(), LINEAR.plan(steps=3)
    data = (tokens, y)
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        _ = looped(PrivateGradients(model, plan), data) if own else run(model, plan, data=data)


class Writes(nn.Module):
    """Keeps a statistic of its inputs where PyTorch's versions do not see it, or in a weight."""

    mean: Tensor

    def __init__(self, kind: str, first: int = 1) -> None:
        super().__init__()
        self.kind, self.passes, self.first = kind, 0, first
        self.linear = nn.Linear(D, 3)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if torch.is_grad_enabled():
            self.passes += 1
        if torch.is_grad_enabled() and self.passes >= self.first:
            if self.kind == "data":
                self.mean.data.copy_(x.mean(0))
            elif self.kind == "numpy":
                self.mean.numpy()[:] = x.mean(0).numpy()
            elif self.kind == "weight":
                with torch.no_grad():
                    self.linear.weight[0].copy_(x.mean(0))
            elif self.kind == "weight.data":
                self.linear.weight.data[0] = x.mean(0)
        return out


@pytest.mark.parametrize("kind", ["data", "numpy", "weight", "weight.data"])
@pytest.mark.parametrize("own", ["fit", "drawn", "full batch"])
def test_what_the_forward_pass_writes(kind: str, own: str) -> None:
    model, plan, (x, y) = Writes(kind), LINEAR.plan(steps=3), LINEAR.data()
    said = MIXED if "weight" in kind else "left alone"  # a weight mixes what comes after it
    if own == "fit":
        with pytest.raises(dim.InputError, match=said):
            run(model, plan)
        return
    private = PrivateGradients(model, plan)
    if own == "drawn":
        x, y = next(private.batches((x, y)))
    with pytest.raises(dim.InputError, match=said):
        private.backward(LOSS(model(x), y))
    assert private.spending.steps == 0


@pytest.mark.parametrize("kind", ["data", "numpy"])
def test_what_later_passes_write_is_seen_before_the_state_is_saved(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(dim.InputError, match="left alone"):
        run(Writes(kind, first=3), LINEAR.plan(steps=9), folder=tmp_path, every=5)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert not saved["model"]["mean"].any()
    with pytest.raises(dim.InputError, match="left alone"):
        run(Writes(kind, first=3), LINEAR.plan(steps=9))


def test_a_full_batch_of_one_s_own_may_be_followed_by_a_step() -> None:
    model, (x, y) = LINEAR.model(), LINEAR.data()
    private = PrivateGradients(model, LINEAR.plan(steps=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        private.backward(LOSS(model(x), y))
        optimizer.step()
    assert private.spending.steps == 3


@pytest.mark.parametrize("own", [False, True])
def test_batch_statistics_in_evaluation_mode(own: bool) -> None:
    """Without running statistics a BatchNorm takes the batch's, in evaluation mode too."""
    norm = nn.BatchNorm1d(D, affine=False, track_running_stats=False).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]
    model, plan = nn.Sequential(norm, nn.Linear(D, 3)), LINEAR.plan(steps=3)
    with pytest.raises(dim.DiminuendoError, match="GroupNorm"):
        _ = looped(PrivateGradients(model, plan)) if own else run(model, plan)


def test_frozen_batch_statistics_are_fine() -> None:
    norm = nn.BatchNorm1d(D, affine=False).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]
    assert run(nn.Sequential(norm, nn.Linear(D, 3)), LINEAR.plan(steps=3)).status == "done"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.lstm(x)[0][:, -1])
        return out


class Attentive(nn.Module):
    """As many tokens as there are examples in a batch, at times; positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.places.weight.requires_grad_(False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.linear = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.tokens(tokens) + self.places(torch.arange(6))
        out: Tensor = self.linear(self.layer(rows).mean(1))
        return out


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.linear(x)
        return out.float()


class Noisy(nn.Module):
    """Draws random numbers that no generator of PyTorch's repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(D, 3), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator) if self.training else 0.0
        out: Tensor = self.linear(x + noise)
        return out


N = LINEAR.examples
HEALTHY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (Attentive, lambda: torch.randint(0, 11, (N, 6))),
    "lstm": (Recurrent, lambda: torch.randn(N, 4, 6)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        lambda: torch.randn(N, 1, 6, 6),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(D, 9), nn.Dropout(0.5), nn.Linear(9, 3)),
        lambda: torch.randn(N, D),
    ),
    "bfloat16": (Halves, lambda: torch.randn(N, D)),
    "its own randomness": (Noisy, lambda: torch.randn(N, D)),
    "a last layer of zeros": (
        lambda: Headed(lambda x: x, torch.relu, zeros=True),
        lambda: torch.randn(N, D),
    ),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)),
        lambda: torch.randn(N, D),
    ),
    "overflow far away": (
        lambda: Headed(lambda x: x, torch.exp, zeros=False),
        lambda: torch.randn(N, D),
    ),
    "constant data": (lambda: nn.Linear(D, 3), lambda: torch.zeros(N, D)),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_healthy_is_refused(kind: str, own: bool) -> None:
    make, x = HEALTHY[kind]
    model, data = make(), (x(), LINEAR.data()[1])
    if own:
        assert looped(PrivateGradients(model, sampled()), data).step == LINEAR.steps
    else:
        assert run(model, sampled(), data=data).status == "done"


PATIENTS = [f"patient {row % 7 if row < 20 else 6}" for row in range(N)]


def test_every_step_takes_at_most_one_row_of_a_person() -> None:
    plan = LINEAR.plan(examples=7, sampling_rate=0.5, schedule="uniform", steps=200)
    model, (x, y) = LINEAR.model(), LINEAR.data()
    private = PrivateGradients(model, plan, seed=5)
    times, taken = [0] * 7, set()
    for rows, targets in private.batches((x, y), groups=PATIENTS):
        numbers = [int((x == row).all(1).nonzero()) for row in rows]
        persons = [int(PATIENTS[number].split()[1]) for number in numbers]
        assert len(set(persons)) == len(persons)
        assert torch.equal(y[numbers], targets)
        taken.update(numbers)
        for person in persons:
            times[person] += 1
        private.backward(LOSS(model(rows), targets))
    assert private.divisor == 3.5
    assert taken == set(range(N)), "each row has its turn"
    # 200 steps at rate 1/2: 36 are five standard deviations, and the seed is fixed
    assert all(abs(count - 100) < 36 for count in times), (
        "a person of many rows is drawn no oftener"
    )


def test_a_person_s_gradients_count_once() -> None:
    plan = LINEAR.plan(examples=7, steps=3)
    private = PrivateGradients(LINEAR.model(), plan)
    sizes = []
    for x, y in private.batches(LINEAR.data(), groups=torch.tensor([row % 7 for row in range(N)])):
        sizes.append(len(x))
        private.backward(LOSS(private.model(x), y))
    assert sizes == [7, 7, 7]


@pytest.mark.parametrize(
    ("groups", "examples", "said"),
    [
        (PATIENTS, N, "examples=7"),
        (PATIENTS[:9], 7, "one for each row"),
        ([1.5] * N, 1, "whole numbers or text"),
        ([*PATIENTS[1:], None], 7, "missing"),
        (np.zeros((N, 2), dtype=int), 1, "one column"),
    ],
)
def test_groups_that_do_not_fit(groups: Any, examples: int, said: str) -> None:
    with pytest.raises(dim.InputError, match=said):
        run(LINEAR.model(), LINEAR.plan(examples=examples, steps=3), groups=groups)


def test_a_budget_for_patients_is_not_spent_by_rows(tmp_path: Path) -> None:
    with dim.Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create("patients", dim.Budget(epsilon=9, delta=1e-5), unit="patient")
        options = {"ledger": ledger, "budget": "patients"}
        with pytest.raises(dim.InputError, match="which patient"):
            run(LINEAR.model(), LINEAR.plan(steps=3), **options)
        plan = LINEAR.plan(steps=3)
        private = PrivateGradients(LINEAR.model(), plan, spending=ledger.pay("patients", plan))
        with pytest.raises(dim.InputError, match="which patient"):
            looped(private)
        x, y = LINEAR.data()
        losses = LOSS(private.model(x), y)
        with pytest.raises(dim.InputError, match="which patient"):
            private.backward(losses)
        assert ledger.status("patients").spent_units == 0
        result = run(LINEAR.model(), LINEAR.plan(steps=3, examples=7), groups=PATIENTS, **options)
        assert result.status == "done"


class Stored(nn.Module):
    """Looks at rows of its own instead of those it is called with."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows, self.linear = rows, nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.rows[: len(x)])
        return out


def test_losses_of_another_batch_in_fit() -> None:
    x, y = LINEAR.data()
    with pytest.raises(dim.InputError, match="batch that was drawn"):
        run(Stored(x), sampled(), loss=lambda output, _: LOSS(output, y[: len(output)]))
    model = LINEAR.model()
    with pytest.raises(dim.InputError, match="batch that was drawn"):
        run(
            model, sampled(), loss=lambda output, _: LOSS(model(x[: len(output)]), y[: len(output)])
        )


def test_losses_of_another_batch_in_one_s_own_loop() -> None:
    model, (x, y) = LINEAR.model(), LINEAR.data()
    private = PrivateGradients(model, sampled(), seed=1)
    drawn, _ = next(private.batches((x, y)))
    with pytest.raises(dim.InputError, match="batch that was drawn"):
        model(x[: len(drawn)])
    assert private.spending.steps == 0


@pytest.mark.parametrize(
    "way",
    [
        lambda x: x.flip(0),
        lambda x: x * 2 + 1,
        lambda x: x.to(torch.float64).to(x.dtype),
        lambda x: x + 0.01 * torch.randn_like(x),
    ],
)
def test_a_batch_may_be_prepared_on_its_way_to_the_model(way: Any) -> None:
    model, flips = LINEAR.model(), way(torch.tensor([1.0, 2.0]))[0] == 2
    private = PrivateGradients(model, sampled())
    for x, y in private.batches(LINEAR.data()):
        private.backward(LOSS(model(way(x)), y.flip(0) if flips else y))
    assert private.step == LINEAR.steps


def test_a_last_layer_of_zeros_is_healthy() -> None:
    model = LINEAR.model()
    nn.init.zeros_(model.weight)
    data = (LINEAR.data()[0], torch.ones(N, dtype=torch.int64))
    assert run(model, sampled(), data=data).status == "done"


def test_parts_of_another_step_enter_no_sum() -> None:
    """Two samplers at work at the same time: what one drew is not summed into the other's step."""
    x, y = torch.eye(8), torch.zeros(8)
    model = nn.Linear(8, 1, bias=False)
    plan = dim.plan((4, 1e-5), examples=8, parameters=8, steps=6, clip=1.0, gamma=0.9)
    private = PrivateGradients(model, plan, micro_batch=3)

    def take(batch: Any) -> None:
        private.backward(1e3 * model(batch[0]).squeeze(1))

    old = private.batches((x, y))
    take(next(old))
    new = private.batches((x, y))
    take(next(new))
    with pytest.raises(UsageError, match="drawn for step 1"):
        next(old)
    private._part = Part(private.step, first=False, last=False, size=3, parts=3, place=0)
    losses = model(x[:3]).squeeze(1)
    with pytest.raises(UsageError, match="every part enters the sum once"):
        private.backward(losses)
    assert model.weight.grad is None


@pytest.mark.parametrize("by", ["buffer", "parameter"])
def test_writes_during_the_backward_pass(by: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model.register_buffer("average", torch.zeros(3))
    held = model.average if by == "buffer" else model[1].bias

    def write(module: Any, grad_input: Any, grad_output: Any) -> None:
        del module, grad_input
        with torch.no_grad():
            held.add_(grad_output[0].sum())  # type: ignore[operator]

    model[1].register_full_backward_hook(write)
    plan = dim.plan((4, 1e-5), examples=12, parameters=19, steps=2, clip=1.0, gamma=0.9)
    private = PrivateGradients(model, plan)
    x = torch.randn(12, 4)
    batch, _ = next(private.batches((x, torch.zeros(12))))
    losses = model(batch).square().sum(1)
    with pytest.raises(InputError, match="left alone by the forward and backward"):
        private.backward(losses)
    assert all(p.grad is None for p in model.parameters())
    assert private.spending.steps == 0


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_row_that_changes_with_the_size_of_the_draw_is_refused_unpaid(own_loop: bool) -> None:
    class OverSize(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / len(x)

    each = nn.CrossEntropyLoss(reduction="none")
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    plan = dim.plan(
        dim.Budget(epsilon=4, delta=1e-5), examples=40, parameters=8, steps=3, clip=1.0,
        sampling_rate=0.5, gamma=0.98,
    )  # fmt: skip
    spending = PlanSpending(plan)

    def loop() -> None:
        model = OverSize(3, 2)
        private = PrivateGradients(model, plan, spending=spending)
        for bx, by in private.batches((x, y)):
            private.backward(each(model(bx), by))

    def fitted() -> None:
        fit(
            nn.Linear(3, 2), (x, y), plan, lr=0.1, spending=spending, progress=False,
            loss=lambda outputs, labels: each(outputs, labels) / len(labels),
        )  # fmt: skip

    with pytest.raises(InputError, match="whatever the other examples"):
        (loop if own_loop else fitted)()
    assert not spending.granted


def test_complex_outputs_that_change_with_the_size_of_the_draw_are_refused_unpaid() -> None:
    class Waves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            waves: Tensor = torch.fft.fft(super().forward(x) / len(x))
            return waves

    model, data = Waves(3, 2), (torch.randn(40, 3), torch.zeros(40))
    private = PrivateGradients(model, dim.plan((4, 1e-5), examples=40, parameters=8, steps=3))
    batch, _ = next(private.batches(data))
    with pytest.raises(InputError, match="whatever the other examples"):
        model(batch)
    assert private.spending.steps == 0


class Placed(nn.Module):
    """What a row gives depends on where it lies in the batch, and so on how many before it were
    drawn; or on how many there are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(D, 3)
        self.register_buffer("table", torch.randn(500, D))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x))
        if self.kind == "positions along the wrong dimension":
            x = x + self.table[: len(x)]  # type: ignore[index]
        elif self.kind == "every other row turned round" or (
            self.kind == "only while training" and self.training
        ):
            x = x * (1 - 2 * (places % 2))[:, None]
        out: Tensor = self.linear(x)
        if self.kind == "gradients of the first row alone":
            return torch.where((places < 1)[:, None], out, out.detach())
        if self.kind == "gradients over the number of rows" and out.requires_grad:
            out.register_hook(lambda grads: grads / len(grads))  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize(
    "kind",
    [
        "positions along the wrong dimension",
        "every other row turned round",
        "gradients of the first row alone",
        "gradients over the number of rows",
        "only while training",
    ],
)
def test_a_row_that_changes_with_its_place_is_refused_unpaid(
    kind: str, rate: float, own: bool
) -> None:
    plan = LINEAR.plan() if rate == 1 else sampled(rate)
    spending = PlanSpending(plan)

    def train() -> None:
        if own:
            looped(PrivateGradients(Placed(kind), plan, spending=spending, seed=1))
        else:
            run(Placed(kind), plan, spending=spending, seed=1)

    with pytest.raises(InputError, match=r"whatever the other examples.*its place in the batch"):
        train()
    assert not spending.granted


class Pictured(nn.Linear):
    """Reads two pieces of a picture beside each row, and perhaps where the row lies."""

    placed = False

    def forward(self, x: Tensor, pieces: Tensor | None = None) -> Tensor:
        assert pieces is not None
        places = torch.arange(len(x))[:, None] if self.placed else 0
        return super().forward(x + pieces.view(len(x), 2, D).sum(1) + places)


@pytest.mark.parametrize("placed", [False, True])
def test_pieces_are_put_in_another_order_with_their_examples(placed: bool) -> None:
    model, (x, y) = Pictured(D, 3), LINEAR.data()
    model.placed, pieces = placed, torch.randn(2 * len(x), D)
    private = PrivateGradients(model, LINEAR.plan())
    if placed:
        with pytest.raises(InputError, match="its place in the batch"):
            private.model(x, pieces)
    else:
        private.backward(LOSS(private.model(x, pieces), y))
    assert private.step == (not placed)


def test_rows_that_belong_together_are_replaced_together() -> None:
    """Where there are as many examples as columns, too: what lies where is told by another row."""

    class Scattered(nn.Linear):
        def forward(self, words: Tensor, sounds: Tensor | None = None) -> Tensor:
            assert sounds is not None
            heard = sounds[sounds > 0]  # one for each word that stands for a sound
            which = words.flatten().cumsum(0).view(words.shape).clamp(1, len(heard)) - 1
            return super().forward((heard[which] * words).float())

    words = torch.randint(0, 2, (D, D))
    private = PrivateGradients(
        Scattered(D, 3), dim.plan((4, 1e-5), examples=D, parameters=9, steps=3)
    )
    private.model(words, words * torch.randint(1, 9, (D, D)))


@pytest.mark.parametrize("rows", [3, 4])
def test_constants_beside_the_examples_stay_where_they_are(rows: int) -> None:
    """Whether their number is a multiple of the examples' or not."""

    class Weighed(nn.Linear):
        def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
            assert table is not None
            return super().forward(x + table.cumsum(0)[-1] + table[0])

    private = PrivateGradients(
        Weighed(D, 3), dim.plan((4, 1e-5), examples=2, parameters=9, steps=3)
    )
    private.model(torch.randn(2, D), torch.randn(rows, D))


class Halved(nn.Linear):
    """Products in half precision within a model of float32: sums over rows in another order are
    rounded otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_what_is_random_or_rounded_by_place_is_fine(own: bool, always: bool) -> None:
    class Masked(Halved):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.2, self.training or always))

    plan = sampled()
    if own:
        assert looped(PrivateGradients(Masked(D, 3), plan)).step == LINEAR.steps
    else:
        assert run(Masked(D, 3), plan).status == "done"


@pytest.mark.parametrize("own", [False, True])
def test_a_model_that_asserts_to_be_in_training_mode(own: bool) -> None:
    """Trying it in evaluation mode says nothing then, and hinders nobody."""

    class Training(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            return super().forward(nn.functional.dropout(x, 0.2))

    if own:
        assert looped(PrivateGradients(Training(D, 3), sampled())).step == LINEAR.steps
    else:
        assert run(Training(D, 3), sampled()).status == "done"


def test_what_is_drawn_is_not_told_from_values() -> None:
    """Two draws that happen to agree do not make a model one that nothing is random in."""

    class Seldom(nn.Linear):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            torch.rand(len(x))  # whom to drop: nobody, but for the third pass
            return super().forward(x) * (self.passes != 3)

    model = Seldom(D, 3)
    trial = probe._Trial(model, lambda call, inputs: [call(inputs[0])])
    trial.refuse_places((torch.randn(6, D),))
    assert model.passes == 2  # in training and in evaluation mode


def test_norms_of_float32_in_a_model_of_float64_are_fine() -> None:
    """As published models compute them; sums over rows in another order round otherwise."""

    class Mixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            single = x.float()
            rounded = single * (1 + 1e-7 * torch.arange(len(x)).view(-1, 1))
            return super().forward(rounded.to(x.dtype))

    trial = probe._Trial(Mixed(D, 3).double(), lambda call, inputs: [call(inputs[0])])
    trial.refuse_places((torch.randn(6, D, dtype=torch.float64),))


@pytest.mark.parametrize("own", [False, True])
def test_mixtures_behind_an_embedding_whose_gradients_are_sparse(own: bool) -> None:
    class Sparse(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(11, 5, sparse=True), nn.Linear(5, 3)
            self.share = share

        def forward(self, tokens: Tensor) -> Tensor:
            rows = self.table(tokens).mean(1)
            out: Tensor = self.linear(rows - self.share * rows.detach().mean(0))
            return out

    data = torch.randint(0, 11, (LINEAR.examples, 6)), LINEAR.data()[1]

    def train(model: nn.Module) -> None:
        plan = LINEAR.plan(steps=3)
        if not own:
            run(model, plan, data=data)
            return
        private = PrivateGradients(model, plan)
        for x, y in private.batches(data):
            private.backward(LOSS(model(x), y))

    train(Sparse(0.0))
    with pytest.raises(dim.DiminuendoError, match=MIXED):
        train(Sparse(0.5))

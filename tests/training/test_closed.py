"""Ways around the budget, each closed: no gradient, statistic or example leaves unpaid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import LOSS, PERCEPTRON
from torch import nn

import diminuendo as dim
from diminuendo.accounting import GaussianFilter
from diminuendo.spending import AdaptiveSpending, PlanSpending
from diminuendo.training import Flat, PrivateGradients, fit
from diminuendo.training.distributed import Group
from diminuendo.training.seeds import Seeds
from diminuendo.training.step import Released

N, D = PERCEPTRON.examples, PERCEPTRON.features
make_plan, make_model, make_data = PERCEPTRON.plan, PERCEPTRON.model, PERCEPTRON.data


def test_cpu_noise_has_more_than_32_bits_of_entropy() -> None:
    """Seeds that agree in 32 bits, as PyTorch reads them, must not give the same noise."""
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5 + 2**32)
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))
    words = Seeds.make(0).generator("noise", 0).get_state().numpy()[24 : 24 + 8 * 624 : 8]
    state = torch.Generator().manual_seed(int(words[0])).get_state().numpy()[24 : 24 + 8 * 624 : 8]
    assert (words != state).mean() > 0.9


def test_the_generator_is_a_function_of_seed_purpose_and_step() -> None:
    def values(seed: int, purpose: str, step: int) -> torch.Tensor:
        return torch.randn(50, generator=Seeds.make(seed).generator(purpose, step))

    assert torch.equal(values(1, "noise", 3), values(1, "noise", 3))
    for other in ((2, "noise", 3), (1, "sampling", 3), (1, "noise", 4)):
        assert not torch.equal(values(1, "noise", 3), values(*other))
    seeds = Seeds.make(1)
    torch.randn(7, generator=seeds.generator("noise", 3))  # leaves nothing behind
    again = torch.randn(50, generator=seeds.generator("noise", 3))
    assert torch.equal(again, values(1, "noise", 3))


def test_a_layer_added_later_gets_no_plain_gradient() -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan())
    model.append(nn.Linear(3, 3).double())
    with pytest.raises(dim.InputError, match=r"weight of a Linear.*added since"):
        private.backward(LOSS(model(x), y))
    assert model[3].weight.grad is None
    assert private.spending.steps == 0


def test_a_loss_with_parameters_gets_no_plain_gradient() -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan())
    scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(dim.InputError, match="part of the model"):
        private.backward(LOSS(model(x) * scale, y))
    assert scale.grad is None
    private.backward(LOSS(model(x) * scale.detach(), y))
    with pytest.raises(dim.InputError, match="optimizer"):
        fit(
            make_model(),
            (x, y),
            make_plan(),
            loss=lambda output, target: LOSS(output * scale, target),
            optimizer=torch.optim.SGD([*make_model().parameters(), scale], lr=0.1),
            progress=False,
        )


class Statistic(nn.Module):
    """Keeps a running mean of its inputs."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, 3).double()
        self.register_buffer("mean", torch.zeros(D, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        out: torch.Tensor = self.linear(x)
        return out


class Centred(nn.Module):
    """Mixes examples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out - out.mean(0)


@pytest.mark.parametrize(("model", "said"), [(Statistic, "buffers"), (Centred, "mixes")])
def test_statistics_and_mixtures_of_the_data_are_refused(model: type, said: str) -> None:
    with pytest.raises(dim.InputError, match=said):
        fit(model(), make_data(), make_plan(), loss=LOSS, lr=0.1, progress=False)


def test_a_loss_that_mixes_examples_is_refused() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = LOSS(output, target)
        return losses * output.abs().sum()

    with pytest.raises(dim.InputError, match="mixes"):
        fit(make_model(), make_data(), make_plan(), loss=loss, lr=0.1, progress=False)


def test_only_the_batch_that_was_drawn() -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan(sampling_rate=0.1, gamma=0.9))
    next(private.batches((x, y)))
    with pytest.raises(dim.InputError, match="number of losses"):
        private.backward(LOSS(model(x), y))
    assert private.spending.steps == 0


def test_an_own_full_batch_needs_a_single_process() -> None:
    """Each of two ranks would add every example once more."""
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan())
    private.group = Group(rank=0, world=2)
    with pytest.raises(dim.InputError, match="single process"):
        private.backward(LOSS(model(x), y))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_half_way_is_spent_and_the_next_goes_on(where: str) -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan(steps=4), micro_batch=15)
    batches = private.batches((x, y))
    bx, by = next(batches)
    private.backward(LOSS(model(bx), by))
    bx, by = next(batches)
    if where == "backward":
        hidden = model[0](bx)
        losses = LOSS(model[2](hidden.tanh()), by)
        bx.mul_(2)
        with pytest.raises(dim.DiminuendoError, match="in place"):
            private.backward(losses)
        bx, by = next(batches)
        with pytest.raises(dim.UsageError, match="Draw the next batch"):
            private.backward(LOSS(model(bx), by))
    assert private.charged == private.spending.steps == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    for bx, by in private.batches((x, y)):
        private.backward(LOSS(model(bx), by))
    assert private.step == private.spending.steps == 4


def test_a_release_cut_short_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after p.grad is set and before the step is counted: it was released."""
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan())
    plain = private._release

    def cut(*given: Any) -> None:
        plain(*given)
        private.step -= 1
        raise KeyboardInterrupt

    monkeypatch.setattr(private, "_release", cut)
    with pytest.raises(KeyboardInterrupt):
        private.backward(LOSS(model(x), y))
    assert private.charged == 1


def test_the_claim_is_the_spendings_own() -> None:
    budget = dim.Budget(epsilon=2, delta=1e-3, relation="replace-one")
    result = fit(
        make_model(),
        make_data(),
        make_plan(),
        loss=LOSS,
        lr=0.1,
        progress=False,
        spending=AdaptiveSpending(GaussianFilter(budget)),
    )
    assert (result.epsilon, result.delta, result.relation) == (2, 1e-3, "replace-one")


def test_fit_lets_go_of_the_model() -> None:
    model, (x, y) = make_model(), make_data()
    for _ in range(2):
        result = fit(model, (x, y), make_plan(), loss=LOSS, lr=0.1, progress=False)
        assert result.status == "done"
    LOSS(model(x), y).sum().backward()
    assert model[0].weight.grad is not None


def test_empty_draws_for_layers_that_take_no_empty_batch() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(D, affine=True), nn.Flatten(), nn.Linear(2 * D, 3))
    x, y = torch.randn(N, D, 2), torch.randint(0, 3, (N,))
    plan = make_plan(sampling_rate=0.01, gamma=0.9, steps=8)
    assert fit(model, (x, y), plan, loss=LOSS, lr=0.1, progress=False).steps == 8


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (torch.zeros(N, D), {}, "pairs"),
        ([{"x": torch.zeros(D), "y": torch.tensor(0)}] * N, {}, "pairs"),
        (None, {"device": "cuda:99"}, "device"),
        (None, {"clip": 1.0}, r"Flat\(C\)"),
        (None, {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)}, "optimizer"),
    ],
)
def test_bad_use_of_fit(data: object, options: dict[str, Any], said: str) -> None:
    data = make_data() if data is None else data
    arguments = {"loss": LOSS, "lr": 0.1, "progress": False, **options}
    with pytest.raises(dim.InputError, match=said):
        fit(make_model(), data, make_plan(), **arguments)


def test_a_clip_that_fails_costs_nothing() -> None:
    model, (x, y) = make_model(), make_data()
    sometimes: Any = lambda t: Flat(1.0) if t > 1 else 1.0  # noqa: E731
    private = PrivateGradients(model, make_plan(), clip=sometimes)
    with pytest.raises(dim.InputError, match="clip"):
        private.backward(LOSS(model(x), y))
    assert private.charged == private.spending.steps == 0


def test_a_loss_that_takes_on_parameters_later_gets_no_plain_gradient() -> None:
    model, data = make_model(), make_data()
    private = PrivateGradients(model, make_plan())
    scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for step, (x, y) in enumerate(private.batches(data)):
        outputs = model(x)
        if step < 2:
            private.backward(LOSS(outputs, y))
            continue
        with pytest.raises(dim.InputError, match="part of the model"):
            private.backward(LOSS(outputs * scale, y))
        break
    assert scale.grad is None
    assert private.spending.steps == 2


class Rebinds(nn.Module):
    """The usual way to write a running mean: the buffer becomes another tensor."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(D, 3).double()
        self.register_buffer("mean", torch.zeros(D, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.frozen = nn.Parameter(torch.zeros(D, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            if self.kind == "rebound":
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            elif self.kind == "new":
                self.register_buffer("late", x.mean(0).detach())
            elif self.kind == "counted":
                self.count += (x > 0).sum().item()
            elif self.kind == "frozen":
                with torch.no_grad():
                    self.frozen.copy_(x.mean(0))
        out: torch.Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("kind", ["rebound", "new", "counted", "frozen"])
@pytest.mark.parametrize("own", [False, True])
def test_no_statistic_gets_into_the_state(kind: str, own: bool) -> None:
    model, data = Rebinds(kind), make_data()
    private = PrivateGradients(model, make_plan())
    x, y = data if own else next(private.batches(data))
    losses = LOSS(model(x), y)
    with pytest.raises(dim.InputError, match="left alone"):
        private.backward(losses)
    assert private.spending.steps == 0


def test_changes_of_one_s_own_between_steps_are_fine() -> None:
    model, data = Rebinds("none"), make_data()
    private = PrivateGradients(model, make_plan())
    for x, y in private.batches(data):
        private.backward(LOSS(model(x), y))
        model.mean = model.linear.weight.detach().mean(0)
    assert private.spending.steps == 6


class Fragile(PlanSpending):
    """Its database is away once."""

    away = True

    def request(self, event: dim.GaussianStep) -> None:
        if self.away and self.steps == 1:
            self.away = False
            raise OSError("the database is locked")
        super().request(event)


def test_a_batch_is_charged_at_the_rate_it_was_drawn_at() -> None:
    """A request that failed, caught: the next batch belongs to the step after, and is refused."""
    rates = [0.2, 0.4, 0.9, 0.9, 0.9, 0.9]
    plan = make_plan(sampling_rate=rates, schedule="uniform")
    model = make_model()
    private = PrivateGradients(model, plan, spending=Fragile(plan))
    drawn = private.batches(make_data())
    x, y = next(drawn)
    private.backward(LOSS(model(x), y))
    x, y = next(drawn)
    losses = LOSS(model(x), y)
    with pytest.raises(OSError, match="locked"):
        private.backward(losses)
    with pytest.raises(dim.UsageError, match="next step to take is 2"):
        next(drawn)
    for x, y in private.batches(make_data()):
        private.backward(LOSS(model(x), y))
    assert [event.sampling_rate for event in private.spending.granted] == [0.2, 0.4, 0.9]


class BatchwiseWhileTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if self.training else x


def test_mixing_only_while_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(D, 7), BatchwiseWhileTraining(), nn.Linear(7, 3)).double()
    with pytest.raises(dim.InputError, match="whatever the other examples"):
        fit(model, make_data(), make_plan(), loss=LOSS, lr=0.1, progress=False)


def test_a_policy_sees_what_was_released_even_if_somebody_wrote_on_it() -> None:
    seen: list[float] = []

    def policy(released: Released) -> float:
        seen.append(sum(float(part.abs().sum()) for part in released.gradients))
        return 20.0

    spending = AdaptiveSpending(GaussianFilter(dim.Budget(epsilon=4, delta=1e-5)))
    model = make_model()
    private = PrivateGradients(model, make_plan(), spending=spending, policy=policy)
    for step, (x, y) in enumerate(private.batches(make_data())):
        private.backward(LOSS(model(x), y))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        if step == 2:
            break
    assert seen[0] == 0
    assert all(value > 0 for value in seen[1:])


def test_schedulers_that_would_fail_after_the_first_step() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    steps: Any = torch.optim.lr_scheduler.StepLR
    for scheduler, said in (
        (plateau, "needs no loss"),
        (steps, "made for the optimizer"),
        (steps(other, 3), "made for the optimizer"),
    ):
        with pytest.raises(dim.InputError, match=said):
            fit(
                model,
                make_data(),
                make_plan(),
                loss=LOSS,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                progress=False,
            )


def test_two_precisions_in_one_model_are_refused() -> None:
    model = nn.Sequential(nn.Linear(D, 7).double(), nn.Linear(7, 3).float())
    with pytest.raises(ValueError, match=r"model\.float\(\)"):
        PrivateGradients(model, make_plan())

"""Algorithm 1, step by step: what reaches p.grad, and what it cost."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import BUDGET, LOSS, PERCEPTRON, gradient, noisy
from torch import nn
from torch.utils.data import Dataset

import diminuendo as dim
from diminuendo.accounting import GaussianFilter
from diminuendo.errors import UsageError
from diminuendo.spending import AdaptiveSpending, PlanSpending
from diminuendo.training import Automatic, Flat, PerLayer, PrivateGradients, Released
from diminuendo.training.clipping import EngineError
from diminuendo.training.mechanism import NoiseName
from diminuendo.training.sampling import Part
from diminuendo.training.seeds import Seeds

N, D = PERCEPTRON.examples, PERCEPTRON.features
make_plan, make_model, make_data = PERCEPTRON.plan, PERCEPTRON.model, PERCEPTRON.data


def naive_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor, clip: float) -> torch.Tensor:
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for i in range(len(x)):
        grads = torch.autograd.grad(
            LOSS(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters())
        )
        flat = torch.cat([g.flatten() for g in grads])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("noise", ["exact", "fast"])
def test_full_batch_step_is_the_clipped_sum_plus_noise_over_n(noise: NoiseName) -> None:
    plan, (x, y) = make_plan(), make_data()
    expected = naive_sum(make_model(), x, y, 0.7)
    model = make_model()
    private = PrivateGradients(model, plan, noise=noise, seed=3)
    batch = next(iter(private.batches((x, y))))
    private.backward(LOSS(model(batch[0]), batch[1]))
    expected = noisy(expected, plan.sigmas[0] * 0.7, 3, noise=noise) / N
    torch.testing.assert_close(gradient(model), expected, rtol=1e-10, atol=1e-12)


def test_a_second_thread_is_refused_while_a_step_is_taken_and_charged_nothing() -> None:
    model, (x, y) = make_model(), make_data()
    found: list[Exception] = []
    others: list[threading.Thread] = []

    def steps_elsewhere() -> None:
        try:
            private.backward(LOSS(model(x), y))
        except Exception as error:
            found.append(error)

    def clip(step: int) -> Flat:
        if step == 1 and not others:
            others.append(threading.Thread(target=steps_elsewhere))
            others[0].start()
            others[0].join()
        return Flat(0.7)

    private = PrivateGradients(model, make_plan(), clip=clip)
    for _ in range(2):
        private.backward(LOSS(model(x), y))
    assert len(found) == 1
    assert isinstance(found[0], UsageError)
    assert "one thread at a time" in str(found[0])
    assert private.step == private.spending.steps == 2


def test_noise_has_the_planned_deviation_and_is_fresh_each_step() -> None:
    """Seven checks at 6.5 standard deviations: a false alarm in 10⁹ runs."""
    torch.manual_seed(0)
    model = nn.Linear(200, 100)
    plan = make_plan(steps=3, clip=2.0)
    private = PrivateGradients(model, plan)
    seen = []
    for _ in range(3):
        private.backward((model(torch.zeros(N, 200)) * 0).sum(1))
        seen.append(gradient(model))
        model.zero_grad()
    count = seen[0].numel()
    for t, values in enumerate(seen):
        expected = 2.0 * plan.sigmas[t] / N
        assert float(values.std()) == pytest.approx(expected, rel=6.5 / math.sqrt(2 * count))
        assert abs(float(values.mean())) < 6.5 * expected / math.sqrt(count)
    correlation = torch.corrcoef(torch.stack(seen))[0, 1]
    assert abs(float(correlation)) < 6.5 / math.sqrt(count)


def test_a_plan_runs_exactly_its_steps() -> None:
    plan, data = make_plan(steps=5), make_data()
    model = make_model()
    private = PrivateGradients(model, plan)
    for x, y in private.batches(data):
        private.backward(LOSS(model(x), y))
    assert private.step == 5
    assert private.spending.granted == plan.events
    assert private.spending.epsilon() <= 4
    with pytest.raises(dim.BudgetRefused, match="5 steps are spent"):
        private.backward(LOSS(model(data[0]), data[1]))
    assert private.spending.steps == 5


@pytest.mark.parametrize("micro", [1, 7, 13, 40])
def test_micro_batches_give_the_same_gradient(micro: int) -> None:
    plan, data = make_plan(), make_data()
    whole, parts = make_model(), make_model()
    one = PrivateGradients(whole, plan, seed=1)
    for x, y in one.batches(data):
        one.backward(LOSS(whole(x), y))
        break
    many = PrivateGradients(parts, plan, seed=1, micro_batch=micro)
    for x, y in many.batches(data):
        assert len(x) <= micro
        many.backward(LOSS(parts(x), y))
        if many.step:
            break
        assert all(p.grad is None for p in parts.parameters())
    torch.testing.assert_close(gradient(whole), gradient(parts), rtol=1e-10, atol=1e-12)


def test_poisson_draws_divide_by_the_expected_size_and_empty_ones_count() -> None:
    plan, (x, y) = make_plan(sampling_rate=0.02, steps=30), make_data()
    model = make_model()
    private = PrivateGradients(model, plan, seed=5)
    sizes = []
    for bx, by in private.batches((x, y)):
        sizes.append(len(bx))
        private.backward(LOSS(model(bx), by))
        if len(bx) == 0:
            step = private.step - 1
            noise = noisy(torch.zeros_like(gradient(model)), plan.sigmas[step] * 0.7, 5, step)
            torch.testing.assert_close(gradient(model), noise / (0.02 * N))
        model.zero_grad()
    assert len(sizes) == 30
    assert 0 in sizes
    assert private.divisor == pytest.approx(0.8)
    assert private.spending.steps == 30


class Pairs(Dataset[Any]):
    """A map-style dataset."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


@pytest.mark.parametrize("workers", [0, 2])
def test_any_dataset_draws_the_same(workers: int) -> None:
    plan, (x, y) = make_plan(sampling_rate=0.1, steps=12), make_data()
    results = []
    for data in ((x, y), (x.numpy(), y.numpy()), Pairs(x, y)):
        model = make_model()
        private = PrivateGradients(model, plan, seed=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for bx, by in private.batches(data, workers=workers if isinstance(data, Pairs) else 0):
            private.backward(LOSS(model(bx), by))
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=0)


def test_a_broken_example_contributes_nothing_and_changes_nothing_else() -> None:
    plan, (x, y) = make_plan(), make_data()
    broken = x.clone()
    broken[3] = float("nan")
    broken[8] = float("inf")
    keep = [i for i in range(N) if i not in (3, 8)]
    expected = naive_sum(make_model(), x[keep], y[keep], 0.7)
    model = make_model()
    private = PrivateGradients(model, plan, seed=3)
    private.backward(LOSS(model(broken), y))
    expected = noisy(expected, plan.sigmas[0] * 0.7, 3) / N
    torch.testing.assert_close(gradient(model), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("clip", "sensitivity"),
    [
        (Flat(2.0), 2.0),
        (PerLayer([3.0, 4.0]), 5.0),
        (Automatic(1.5), 1.5),
        (lambda t: Flat(2.0 / t), 2.0),
    ],
)
def test_noise_follows_the_sensitivity_of_the_clip(clip: Any, sensitivity: float) -> None:
    model, plan = make_model(), make_plan()
    private = PrivateGradients(model, plan, clip=clip, seed=9)
    private.backward((model(make_data()[0]) * 0).sum(1))
    noise = noisy(torch.zeros_like(gradient(model)), plan.sigmas[0] * sensitivity, 9)
    torch.testing.assert_close(gradient(model), noise / N)


def test_a_step_has_one_clip_whoever_asks_for_it() -> None:
    """A recording is looked up by the clip, made with it, and paid for by it: three questions."""
    norms = iter([1.0, 2.0, 3.0, 4.0])
    private = PrivateGradients(make_model(), make_plan(), clip=lambda _: Flat(next(norms)))
    looked_up = private._clip_of(private.step)
    paid = private._pay()
    assert looked_up == paid.clip == Flat(1.0)
    private._begin_step(paid, None)
    private.clip = Flat(5.0)  # from the next step on
    assert private._clip_of(private.step) == Flat(1.0)
    private._abandon()
    assert private._pay().clip == Flat(5.0)


def test_a_first_part_out_of_turn_is_not_paid_for_by_a_replay() -> None:
    """Nor is the rest of a step of which it would take the place: as in `backward`."""
    private = PrivateGradients(make_model(), make_plan())
    private.begin()
    private._begin_step(private._pay(), None)
    with pytest.raises(UsageError, match="drawn for step 1, and the next step to take is 2"):
        private._open_recorded(Part(0, first=True, last=False, size=N, parts=2))
    assert private.spending.steps == private.step == 1


def test_a_policy_is_held_by_its_filter() -> None:
    plan, data = make_plan(), make_data()
    model = make_model()
    seen: list[Released] = []

    def policy(released: Released) -> float:
        seen.append(released)
        return 6.0 if len(seen) % 2 else 9.0

    private = PrivateGradients(
        model, plan, spending=AdaptiveSpending(GaussianFilter(BUDGET)), policy=policy
    )
    for x, y in private.batches(data):
        private.backward(LOSS(model(x), y))
        model.zero_grad()
    sigmas = np.array(
        [e.noise_multiplier for e in private.spending.granted for _ in range(e.count)]
    )
    assert set(sigmas) <= {6.0, 9.0}
    assert np.sum(sigmas**-2.0) <= BUDGET.R
    assert np.sum(sigmas**-2.0) + 6.0**-2 > BUDGET.R
    assert private.spending.epsilon() == 4
    assert seen[1].step == 1
    assert len(seen[1].gradients) == 4


def test_plan_spending_grants_only_the_plan() -> None:
    spending = PlanSpending(make_plan())
    with pytest.raises(dim.BudgetRefused, match="Step 1 of the plan"):
        spending.request(dim.GaussianStep(noise_multiplier=1.0))
    assert spending.steps == 0
    assert spending.epsilon() == 0


def test_noise_cannot_be_predicted_unless_asked_for() -> None:
    plan, (x, y) = make_plan(), make_data()
    seen = []
    for seed in (None, None, 4, 4):
        model = make_model()
        private = PrivateGradients(model, plan, seed=seed)
        assert private.private is (seed is None)
        private.backward(LOSS(model(x), y))
        seen.append(gradient(model))
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])


def test_a_poisson_sample_is_one() -> None:
    """Each example 4,000 times at rate 0.1: within 5 deviations, and pairs are independent."""
    from diminuendo.training.sampling import draw

    seeds, hits = Seeds.make(0), torch.zeros(50)
    both = 0
    for step in range(4000):
        chosen = draw(50, 0.1, seeds, step)
        hits[chosen] += 1
        both += int(0 in chosen and 1 in chosen)
    deviation = math.sqrt(4000 * 0.1 * 0.9)
    assert float((hits - 400).abs().max()) < 5 * deviation
    assert abs(both - 40) < 5 * math.sqrt(40)


def wrong(action: Any) -> Any:
    model, plan, data = make_model(), make_plan(), make_data()
    return action(model, PrivateGradients(model, plan), data)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (lambda m, p, d: p.backward(LOSS(m(d[0]), d[1]).mean()), "drawn by|one loss per example"),
        (lambda m, p, d: p.backward(LOSS(m(d[0][:5]), d[1][:5])), "drawn by"),
        (lambda m, p, d: next(p.batches((d[0][:5], d[1][:5]))), "size of the dataset"),
        (lambda m, p, d: next(p.batches((d[0][:5], d[1]))), "of one length"),
        (lambda m, p, d: next(p.batches(iter([1, 2]))), "map-style"),
        (lambda m, p, d: next(p.batches((d[0][:0], d[1][:0]))), "at least one example"),
        (lambda m, p, d: list(p.batches(d)), "once for each batch"),
        (lambda m, p, d: PrivateGradients(make_model(), p.plan, policy=lambda r: 1.0), "policy"),
        (lambda m, p, d: PrivateGradients(make_model(), p.plan, micro_batch=0), "micro_batch"),
        (lambda m, p, d: PrivateGradients(make_model(), p.plan, seed=-1), "seed"),
        (lambda m, p, d: PrivateGradients(nn.BatchNorm1d(3), p.plan), "GroupNorm"),
    ],
)
def test_bad_use(action: Any, said: str) -> None:
    with pytest.raises(dim.DiminuendoError, match=said):
        wrong(action)


def test_eval_mode_is_refused() -> None:
    model = make_model().eval()
    private = PrivateGradients(model, make_plan())
    x, y = make_data()
    with pytest.raises(EngineError, match="eval mode"):
        private.backward(LOSS(model(x), y))


def test_a_loss_that_cannot_be_used_costs_nothing() -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan())
    for bx, by in private.batches((x, y)):
        with pytest.raises(EngineError, match="one loss per example"):
            private.backward(LOSS(model(bx), by).mean())
        assert private.spending.steps == 0
        private.backward(LOSS(model(bx), by))
        assert private.spending.steps == 1
        break


def test_rows_of_one_number() -> None:
    """Token ids, one for each example, in another order than they were drawn in."""
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 2)).double()
    tokens, labels = torch.arange(40), torch.arange(40) % 2
    plan = dim.plan((50, 1e-5), examples=40, parameters=210, steps=2)
    private = PrivateGradients(model, plan, seed=1)
    for x, y in private.batches((tokens, labels)):
        order = torch.arange(len(x) - 1, -1, -1)
        private.backward(LOSS(model(x[order]), y[order]))
    assert private.step == 2


def test_losses_are_summed_once_and_the_second_time_costs_nothing() -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan())
    losses = LOSS(model(x), y)
    private.backward(losses)
    with pytest.raises(EngineError, match="summed before"):
        private.backward(losses)
    assert private.charged == private.spending.steps == 1


def test_inference_mode_is_refused_before_a_batch_is_drawn() -> None:
    private = PrivateGradients(make_model(), make_plan())
    with torch.inference_mode(), pytest.raises(dim.UsageError, match="inference_mode"):
        next(private.batches(make_data()))


@pytest.mark.parametrize(
    "clip", [PerLayer([1.0, 2.0, 3.0]), lambda _: PerLayer([1.0]), Flat(1e280), lambda _: 3]
)
def test_a_clip_that_cannot_be_used_costs_nothing(clip: Any) -> None:
    model, (x, y) = make_model(), make_data()
    private = PrivateGradients(model, make_plan(), clip=clip)
    with pytest.raises(dim.DiminuendoError, match=r"PerLayer|noise_std"):
        private.backward(LOSS(model(x), y))
    assert private.charged == private.spending.steps == 0

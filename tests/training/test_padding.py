"""Draws in static shapes: nobody is dropped, blank rows count for nothing, shapes tell little."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_runs import LINEAR, LOSS, gradient, run, two_ranks, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import diminuendo as dim
from diminuendo.training import Automatic, Compute, Flat, OnPlateau, PerLayer, PrivateGradients
from diminuendo.training.clipping import Clip, Engine
from diminuendo.training.distributed import Group
from diminuendo.training.mechanism import FastNoise, NoiseName
from diminuendo.training.padding import (
    OFTEN,
    SELDOM,
    Buckets,
    Filler,
    cost,
    enough,
    exceeds,
    filled_rows,
)
from diminuendo.training.sampling import Sampler, Source, draw
from diminuendo.training.seeds import Seeds

RATE = 0.3


@cache  # sampled plans take a while
def planned(steps: int = 20, examples: int = LINEAR.examples, rate: float = RATE) -> dim.Plan:
    setting = dataclasses.replace(LINEAR, examples=examples)
    return setting.plan(steps=steps, sampling_rate=rate, schedule="uniform")


# Sizes


@pytest.mark.parametrize(
    ("examples", "rate"), [(7, 0.5), (1000, 0.001), (1000, 0.3), (60_000, 0.01)]
)
@pytest.mark.parametrize("tail", [OFTEN, SELDOM])
def test_a_size_is_the_smallest_that_is_enough(examples: int, rate: float, tail: float) -> None:
    size = enough(examples, rate, tail)
    draws = stats.binom(examples, rate)
    assert draws.sf(size) <= tail * (1 + 1e-9)
    assert size == 1 or draws.sf(size - 1) > tail
    assert exceeds(examples, rate, size) == pytest.approx(draws.sf(size), rel=1e-6)


@given(
    examples=st.integers(1, 400),
    rates=st.lists(st.floats(1e-4, 1), min_size=1, max_size=4),
    world=st.integers(1, 3),
    limit=st.none() | st.integers(1, 50),
    data=st.data(),
)
def test_every_row_is_in_one_part_and_every_part_has_one_of_the_sizes(
    examples: int, rates: list[float], world: int, limit: int | None, data: st.DataObject
) -> None:
    buckets = Buckets.of(examples, rates, world=world, micro_batch=limit)
    share = -(-examples // world)
    drawn = data.draw(st.integers(0, share))
    parts = buckets.split(torch.arange(drawn), data.draw(st.sampled_from(rates)))
    assert torch.equal(torch.cat(parts), torch.arange(drawn))
    assert all(len(part) <= buckets.size(len(part)) for part in parts)
    assert {buckets.size(len(part)) for part in parts} <= set(buckets.sizes)
    assert limit is None or max(buckets.sizes) <= limit
    assert max(buckets.sizes) <= share
    # what delta_added counts: so many calls of the engine at most
    assert len(parts) <= math.ceil(examples / buckets.sizes[-1]) + 1


@given(examples=st.integers(2, 10**6), rate=st.floats(1e-4, 0.9))
def test_few_draws_leave_the_main_size(examples: int, rate: float) -> None:
    main, more, leaves = cost(examples, rate)
    assert leaves <= OFTEN
    assert more >= 0
    sizes = Buckets.of(examples, [rate], micro_batch=None).sizes
    assert main == sizes[0]
    assert len(sizes) <= 2
    assert exceeds(examples, rate, sizes[-1]) <= SELDOM


def test_the_cost_is_what_draws_have_on_average() -> None:
    rng = torch.Generator().manual_seed(0)
    drawn = torch.binomial(torch.full((20_000,), 500.0), torch.tensor(0.2), generator=rng)
    buckets = Buckets.of(500, [0.2], micro_batch=None)
    rows = sum(buckets.size(int(n)) for n in drawn) / len(drawn)
    assert cost(500, 0.2).more == pytest.approx(rows / 100 - 1, abs=0.002)  # 20 deviations


def test_parts_of_micro_batches_are_as_many_in_nearly_every_step() -> None:
    buckets = Buckets.of(1000, [0.1], micro_batch=50)
    assert buckets.sizes == (41,)
    assert {len(buckets.split(torch.arange(n), 0.1)) for n in range(124)} == {3}
    assert len(buckets.split(torch.arange(124), 0.1)) == 4


# Nobody is dropped: example i's gradient is the i-th unit vector, so that the sum counts examples.

ONES = 60


class _Silent:
    """No noise: what is released is the sum itself."""

    def add_noise(
        self, total: Tensor, *, noise_std: float, sensitivity: float, step: int
    ) -> Tensor:
        del noise_std, sensitivity, step
        return total

    def add_beside(self, number: float, *, noise_std: float, step: int) -> float:
        del noise_std, step
        return number


class _SilentFast(FastNoise):
    def draw(
        self, size: int, noise_std: float, step: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        del noise_std, step
        return torch.zeros(size, dtype=dtype, device=device)


def silenced(private: PrivateGradients) -> PrivateGradients:
    fast = isinstance(private.mechanism.noise, FastNoise)
    private.mechanism.noise = _SilentFast(private.seeds) if fast else _Silent()
    return private


def counting(**options: Any) -> tuple[PrivateGradients, nn.Linear]:
    plan = planned(6, ONES)
    model = nn.Linear(ONES, 1, bias=False).double()
    return silenced(PrivateGradients(model, plan, pad=True, seed=4, **options)), model


def counts(private: PrivateGradients, model: nn.Linear, **options: Any) -> Iterator[Tensor]:
    """How often each example contributed to each step."""
    for x in private.batches(torch.eye(ONES).double(), **options):
        assert len(x) in private.sampler.buckets.sizes  # type: ignore[union-attr]
        before = private.step
        private.backward(model(x)[:, 0])
        if private.step > before:
            yield gradient(model) * private.divisor
            model.zero_grad()


CLIPS: list[tuple[Clip, float]] = [(Flat(1.0), 1.0), (Automatic(1.01), 1.0), (PerLayer(1.0), 1.0)]


@pytest.mark.parametrize(("clip", "each"), CLIPS)
@pytest.mark.parametrize("noise", ["exact", "fast"])
@pytest.mark.parametrize(("limit", "largest"), [(None, None), (None, 5), (7, None), (1, None)])
def test_each_example_that_was_drawn_counts_once(
    clip: Clip, each: float, noise: NoiseName, limit: int | None, largest: int | None
) -> None:
    private, model = counting(clip=clip, noise=noise, micro_batch=limit)
    if largest is not None:  # nearly every draw is larger than the largest size
        private.sampler.buckets = Buckets((largest,), {RATE: 1})
    steps = 0
    for step, found in enumerate(counts(private, model)):
        wanted = torch.zeros(ONES, dtype=torch.float64)
        wanted[draw(ONES, RATE, Seeds.make(4), step)] = each
        assert float(wanted.sum()) > 5
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
        steps += 1
    assert steps == private.step == 6


def test_a_dropped_row_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above has teeth: truncation to the largest size fails it."""

    def cut(self: Buckets, indices: Tensor, rate: float) -> list[Tensor]:
        del rate
        return [indices[: self.sizes[-1]]]

    monkeypatch.setattr(Buckets, "split", cut)
    with pytest.raises(AssertionError, match="Tensor-likes"):
        test_each_example_that_was_drawn_counts_once(Flat(1.0), 1.0, "exact", None, 5)


@pytest.mark.parametrize("drawn", [0, ONES])
def test_a_draw_of_nobody_and_of_everybody(monkeypatch: pytest.MonkeyPatch, drawn: int) -> None:
    monkeypatch.setattr("diminuendo.training.sampling.draw", lambda *given: torch.arange(drawn))
    private, model = counting()
    for found in counts(private, model):
        torch.testing.assert_close(found, (torch.arange(ONES) < drawn).double(), atol=0, rtol=1e-9)
    assert private.step == 6


def test_ranks_share_a_draw_and_have_the_same_sizes() -> None:
    plan = planned(6, ONES)
    seeds = Seeds.make(4)
    for limit in (None, 3):
        seen: list[list[int]] = [[] for _ in range(6)]
        shapes = set()
        for rank in range(3):
            sampler = Sampler(plan, seeds, Group(rank, 3), limit, pad=True)
            rows = sampler.batches(Source(torch.arange(1, ONES + 1)), 0, 6)
            for part, batch in rows:
                assert part.drawn is not None
                assert not batch[part.drawn :].any()
                seen[part.step] += batch[: part.drawn].tolist()
                shapes.add(len(batch))
        for step, found in enumerate(seen):
            assert sorted(found) == (draw(ONES, RATE, seeds, step) + 1).tolist()
        assert len(shapes) <= 2


def test_groups_are_filled_up_too() -> None:
    private, model = counting()
    rows = torch.eye(ONES).double().repeat(2, 1)
    whose = torch.arange(ONES).repeat(2)
    for step, x in enumerate(private.batches(rows, groups=whose)):
        assert len(x) in private.sampler.buckets.sizes  # type: ignore[union-attr]
        private.backward(model(x)[:, 0])
        wanted = torch.zeros(ONES, dtype=torch.float64)
        wanted[draw(ONES, RATE, Seeds.make(4), step)] = 1.0
        torch.testing.assert_close(gradient(model) * private.divisor, wanted)
        model.zero_grad()


# Blank rows add exactly nothing


class Normed(nn.Module):
    """Each example over its own length: zeros give what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 70), nn.LayerNorm(70), nn.Linear(70, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x / x.norm(dim=1, keepdim=True))
        return self.last(torch.tanh(self.norm(hidden)))  # type: ignore[no-any-return]


class Pictures(nn.Module):
    """Convolutions; the logarithm of a blank picture is minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        squares = x.log().view(-1, 1, 6, 6)
        return self.head(torch.relu(self.norm(self.conv(squares))).flatten(1))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Embeddings and attention; the weights of a row of zeros sum up to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embed(tokens)
        seen = (tokens > 0).to(words.dtype).unsqueeze(2)
        mean = (self.mix(words, words, words)[0] * seen).sum(1) / seen.sum(1)
        return self.head(mean)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one that is used twice, of each row over its length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.twice, self.head = (
            nn.LSTM(3, 5, batch_first=True),
            nn.Linear(5, 5),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lstm((x / x.norm(dim=1, keepdim=True)).view(-1, 2, 3))[0][:, -1]
        return self.head(self.twice(torch.tanh(self.twice(hidden))))  # type: ignore[no-any-return]


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    rows: Callable[[int], Tensor]


CASES = {
    "linear": Case(Normed, lambda n: torch.randn(n, 6)),
    "recurrent": Case(Recurrent, lambda n: torch.randn(n, 6)),
    "convolution": Case(Pictures, lambda n: torch.rand(n, 36) + 0.5),
    "embedding": Case(Words, lambda n: torch.randint(1, 9, (n, 5))),
}


@pytest.mark.parametrize("clip", [Flat(0.3), Automatic(0.3), PerLayer(0.3)])
@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_not_finite_add_nothing_where_they_are_blank(
    name: str, certify: bool, clip: Clip
) -> None:
    torch.manual_seed(0)
    model, real = CASES[name].model(), CASES[name].rows(11)
    labels = torch.randint(0, 3, (11,))
    blank = torch.cat([real, torch.zeros_like(real[:5])])
    with Engine(model) as engine:
        alone = engine.clipped_sum(LOSS(model(real), labels), clip, certify=certify)
        losses = LOSS(model(blank), torch.cat([labels, labels[:5] * 0]))
        assert not losses[11:].isfinite().any()
        filled = engine.clipped_sum(losses, clip, certify=certify, real=torch.arange(16) < 11)
        nothing = engine.clipped_sum(
            LOSS(model(blank), torch.cat([labels, labels[:5]])),
            clip,
            certify=certify,
            real=torch.zeros(16, dtype=torch.bool),
        )
    for wanted, found, none in zip(alone.sums, filled.sums, nothing.sums, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(none, torch.zeros_like(none))
    torch.testing.assert_close(filled.norms[:11], alone.norms, rtol=1e-5, atol=0)
    assert not filled.norms[11:].any()
    assert filled.nonfinite == nothing.nonfinite == 0


@pytest.mark.parametrize("certify", [False, True])
def test_a_backward_pass_that_makes_something_of_nothing_adds_nothing(certify: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    real = torch.tensor([True, True, False, True, False])
    sums = []
    with Engine(model, probing=False) as engine:
        for rows, taken in ((x, real), (x[real], None)):
            hidden = model[0](rows)
            hidden.register_hook(lambda grad: grad + 1)
            sums.append(
                engine.clipped_sum(model[1](hidden)[:, 0], Flat(9.0), certify=certify, real=taken)
            )
    for filled, alone in zip(sums[0].sums, sums[1].sums, strict=True):
        torch.testing.assert_close(filled, alone, rtol=1e-5, atol=1e-6)


def test_an_example_that_is_not_finite_is_told_from_a_blank_row() -> None:
    model = nn.Linear(2, 1)
    x = torch.tensor([[1.0, 2.0], [math.inf, 0.0], [math.nan, 0.0]])
    with Engine(model) as engine:
        result = engine.clipped_sum(model(x)[:, 0], Flat(9.0), real=torch.arange(3) < 2)
    assert result.nonfinite == 1
    torch.testing.assert_close(result.sums[0], torch.tensor([[1.0, 2.0]]))


# Whole runs


@pytest.mark.parametrize("noise", ["exact", "fast"])
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("clip", [Flat(1.0), Automatic(1.0), PerLayer(1.0)])
def test_a_run_gives_the_same_model(noise: NoiseName, limit: int | None, clip: Clip) -> None:
    plan = planned()
    options = {"seed": 3, "noise": noise, "clip": clip}
    alone, filled = LINEAR.model(), LINEAR.model()
    first = run(alone, plan, **options)
    second = run(filled, plan, micro_batch=limit, pad=True, **options)
    torch.testing.assert_close(weights(filled), weights(alone), rtol=1e-5, atol=1e-6)
    assert (first.steps, first.epsilon) == (second.steps, second.epsilon)


def test_full_batches_are_left_alone() -> None:
    alone, filled = LINEAR.model(), LINEAR.model()
    run(alone, LINEAR.plan(), seed=3)
    run(filled, LINEAR.plan(), seed=3, pad=True)
    assert torch.equal(weights(filled), weights(alone))


class Pairs:
    """A map-style dataset."""

    def __len__(self) -> int:
        return LINEAR.examples

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        x, y = LINEAR.data()
        return x[place], int(y[place])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_examples_is_filled_up_after_collate(workers: int) -> None:
    plan = planned(12, rate=0.05)
    alone, filled = LINEAR.model(), LINEAR.model()
    run(alone, plan, seed=3)
    private = PrivateGradients(filled, plan, seed=3, pad=True)
    sizes = set()
    for x, y in private.batches(Pairs(), workers=workers):
        assert x.dtype is torch.float32
        assert y.dtype is torch.int64
        sizes.add(len(x))
        private.backward(LOSS(filled(x), y))
        with torch.no_grad():
            for parameter in filled.parameters():
                parameter -= 0.5 * parameter.grad
        filled.zero_grad()
    assert 0 not in sizes
    assert sizes <= set(private.sampler.buckets.sizes)  # type: ignore[union-attr]
    torch.testing.assert_close(weights(filled), weights(alone), rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_with_blank_rows_and_without(tmp_path: Path) -> None:
    plan = planned()
    whole, parted = LINEAR.model(), LINEAR.model()
    run(whole, plan, seed=3)

    def stop(step: int, private: PrivateGradients) -> None:
        del private
        if step in (5, 11):
            raise KeyboardInterrupt

    for pad in (True, False):
        with pytest.raises(KeyboardInterrupt):
            run(parted, plan, seed=3, pad=pad, folder=tmp_path, every=1, after_step=stop)
    run(parted, plan, seed=3, pad=True, folder=tmp_path, every=1)
    torch.testing.assert_close(weights(parted), weights(whole), rtol=1e-5, atol=1e-6)


def test_the_training_loss_is_that_of_the_examples() -> None:
    plan = planned(3)
    seen = [
        run(LINEAR.model(), plan, seed=3, reveal_training_loss=True, **options).training_loss
        for options in ({}, {"pad": True}, {"pad": True, "micro_batch": 3})
    ]
    assert seen[1:] == pytest.approx([seen[0]] * 2, rel=1e-5)


def test_a_paid_metric_counts_no_blank_rows() -> None:
    values = []
    for options in ({}, {"pad": True}, {"pad": True, "micro_batch": 4}):
        model = LINEAR.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plateau = ReduceLROnPlateau(optimizer, mode="max", patience=2)
        metric = OnPlateau(plateau, paid=0.2)
        run(model, planned(6), optimizer=optimizer, lr_scheduler=metric, seed=3, **options)
        values.append(metric.values)
    assert len(values[0]) == 6
    assert values[1] == pytest.approx(values[0])
    assert values[2] == pytest.approx(values[0])


SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from small_runs import LINEAR, run, weights
torch.set_num_threads(1)
dist.init_process_group("gloo", os.environ["MEET"])
models = []
for limit in (None, 2):
    models.append(LINEAR.model())
    plan = LINEAR.plan(sampling_rate=0.3, steps=8, schedule="uniform")
    run(models[-1], plan, seed=3, pad=True, micro_batch=limit)
torch.save([weights(model) for model in models], f"{sys.argv[1]}/{os.environ['RANK']}.pt")
dist.barrier()
os._exit(0)  # threads of the backend may abort while the interpreter goes down
"""


def test_two_ranks_give_the_model_of_one(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    ranks = two_ranks([str(file), str(tmp_path)])
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    alone = LINEAR.model()
    run(alone, planned(8), seed=3)
    for place in range(2):
        for found in torch.load(tmp_path / f"{place}.pt"):
            torch.testing.assert_close(found, weights(alone), rtol=1e-5, atol=1e-6)


# What is refused, and what can be seen


def test_a_model_that_mixes_is_refused_before_anything_is_charged() -> None:
    class Mixes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    plan = planned()
    with pytest.raises(dim.InputError, match="mixes examples"):
        run(Mixes(4, 3), plan, pad=True)
    model = Mixes(4, 3)
    private = PrivateGradients(model, plan, seed=0, pad=True)
    x, _ = next(iter(private.batches(LINEAR.data())))
    with pytest.raises(dim.InputError, match="mixes examples"):
        model(x)
    assert private.spending.steps == 0


def test_blank_rows_want_a_loss_each() -> None:
    model = LINEAR.model()
    private = PrivateGradients(model, planned(), seed=0, pad=True)
    x, y = next(iter(private.batches(LINEAR.data())))
    assert private.drawn is not None
    assert private.waiting == len(x) > private.drawn
    with pytest.raises(dim.InputError, match=f"each of the {len(x)} examples"):
        private.backward(LOSS(model(x), y)[: private.drawn])
    assert private.spending.steps == 0


@pytest.mark.parametrize("kind", ["shuffled", "turned round", "rolled", "a dict"])
def test_rows_in_another_order_would_count_as_blank_ones(kind: str) -> None:
    """Which rows are examples is told by their places: of a shuffled batch others would count, and
    one example more would change which."""

    def other(rows: Tensor) -> Tensor:
        if kind in ("shuffled", "a dict"):
            return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
        return rows.flip(0) if kind == "turned round" else rows.roll(7, 0)

    model, (x, y) = LINEAR.model(), LINEAR.data()
    private = PrivateGradients(model, planned(), seed=0, pad=True)
    rows = [{"x": row, "y": label} for row, label in zip(x, y, strict=True)]
    batch = next(private.batches(rows if kind == "a dict" else (x, y)))
    with pytest.raises(dim.InputError, match="in the order in which they were drawn"):
        model(other(batch["x"] if kind == "a dict" else batch[0]))
    assert private.spending.steps == 0


def _longest_first(rows: Tensor) -> Tensor:
    return rows.abs().sum(1).argsort(descending=True)  # and the blank ones last


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x + 1,
        lambda x: torch.randn_like(x),
        lambda x: torch.zeros_like(x) + x[0],
        lambda x: x[_longest_first(x)],
    ],
)
def test_blank_rows_may_be_prepared_as_the_others_are(prepare: Callable[[Tensor], Tensor]) -> None:
    model = LINEAR.model()
    private = PrivateGradients(model, planned(), seed=0, pad=True)
    for x, y in private.batches(LINEAR.data()):
        private.backward(LOSS(model(prepare(x)), y))
    assert private.step == planned().steps


@pytest.mark.parametrize("pad", ["yes", 1, None])
def test_pad_is_true_or_false(pad: Any) -> None:
    if pad is not None:  # as it is best where it runs
        with pytest.raises(dim.InputError, match="pad to be True or False"):
            Compute(pad=pad)
    with pytest.raises(dim.InputError, match="pad"):
        PrivateGradients(LINEAR.model(), planned(), pad=pad)


class Named(NamedTuple):
    x: Tensor
    scale: float


def test_a_filler_tells_rows_from_what_all_examples_share() -> None:
    shared = torch.arange(3.0)

    def collate(rows: list[Tensor]) -> dict[str, Any]:
        return {"in": Named(torch.stack(rows), 2.0), "shared": shared, "one": [None, shared[:1]]}

    row = torch.ones(2)
    filler = Filler(collate([row]), collate([row, row]))
    filled = filler.fill(collate([row] * 3), 3, 5)  # as many rows as `shared` has
    assert torch.equal(filled["in"].x, torch.tensor([[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 2))
    assert filled["in"].scale == 2.0
    assert torch.equal(filled["shared"], shared)
    assert torch.equal(filled["one"][1], shared[:1])
    empty = filler.fill(filler.empty(), 0, 4)
    assert torch.equal(empty["in"].x, torch.zeros(4, 2))
    assert torch.equal(empty["shared"], shared)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (lambda rows: ["text"] * len(rows), "form changes"),
        (lambda rows: torch.cat([row[0] for row in rows]), "not one for each"),
        (lambda rows: (torch.stack([row[0] for row in rows]), {1, 2}), "a set"),
        (lambda rows: torch.stack([row[0] for row in rows]).numpy(), "a ndarray"),
    ],
)
def test_what_cannot_be_filled_up_is_refused_first(collate: Any, words: str) -> None:
    model = LINEAR.model()
    private = PrivateGradients(model, planned(), pad=True)
    with pytest.raises(dim.InputError, match=words):
        next(iter(private.batches(Pairs(), collate=collate)))
    assert private.spending.steps == 0


def test_trying_a_collate_function_out_leaves_the_random_numbers_alone() -> None:
    def collate(rows: list[Any]) -> Tensor:
        return torch.stack([row[0] for row in rows]) + torch.rand(len(rows), 1)

    private = PrivateGradients(LINEAR.model(), planned(), seed=0, pad=True)
    torch.manual_seed(0)
    next(iter(private.batches(Pairs(), collate=collate)))
    assert private.drawn is not None
    torch_now = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(private.drawn, 1)
    assert torch.equal(torch_now, torch.rand(1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16])
def test_rows_of_any_type_and_layout_are_filled_up(dtype: torch.dtype) -> None:
    whole = torch.arange(24).view(4, 6).t().to(dtype)  # not contiguous
    chosen = torch.tensor([5, 0])
    rows = filled_rows(whole, chosen, 4)
    assert rows.dtype is dtype
    assert torch.equal(rows[:2], whole[chosen])
    assert not rows[2:].any()
    assert torch.equal(filled_rows(whole[:, 0], chosen[:0], 3), torch.zeros(3, dtype=dtype))


def test_a_size_that_is_another_dimension_too() -> None:
    """The main size, 15, is the width of a layer, the number of tokens and of features."""
    assert Buckets.of(30, [RATE], micro_batch=None).sizes[0] == 15
    data = torch.randn(30, 15, 15), torch.randint(0, 15, (30,))
    ends = []
    for pad in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(15, 15), nn.Tanh(), nn.Flatten(), nn.Linear(225, 15))
        run(model, planned(4), data=data, pad=pad, seed=3)
        ends.append(weights(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_a_collate_function_that_drops_examples_is_refused() -> None:
    def collate(rows: list[Any]) -> Tensor:
        return torch.stack([row[0] for row in rows[:2]])

    private = PrivateGradients(LINEAR.model(), planned(), seed=0, pad=True)
    with pytest.raises(dim.InputError, match="not one for each"):
        next(iter(private.batches(Pairs(), collate=collate)))


def generators(folder: Path, seed: int, pad: bool) -> list[Tensor]:
    model = nn.Sequential(nn.Dropout(), LINEAR.model())
    torch.manual_seed(7)
    run(model, planned(), seed=seed, pad=pad, folder=folder)
    saved = sorted(folder.glob("**/*.pt"))[-1]
    found: list[Tensor] = torch.load(saved, weights_only=False)["generators"]
    return found


def test_a_checkpoint_does_not_say_how_many_random_numbers_were_used(tmp_path: Path) -> None:
    """Dropout draws as many as there are rows; with blank ones their number is public."""
    sizes = [[len(draw(30, RATE, Seeds.make(seed), step)) for step in range(20)] for seed in (1, 2)]
    assert sum(sizes[0]) != sum(sizes[1])
    main = Buckets.of(30, [RATE], micro_batch=None).sizes[0]
    assert max(map(max, sizes)) <= main  # no draw left the main size
    for pad in (True, False):
        found = [generators(tmp_path / f"{pad}{seed}", seed, pad) for seed in (1, 2)]
        assert torch.equal(found[0][0], found[1][0]) == pad


def test_the_rounding_of_parts_is_paid_for() -> None:
    """As many calls of the engine as the largest draw may need are counted."""
    plan = planned(5, 3000, 0.01)
    model = LINEAR.model()
    added = []
    for pad in (False, True):
        private = PrivateGradients(model, plan, pad=pad)
        added.append(private.delta_added)
        if pad:
            assert private.sampler.buckets is not None
            largest = private.sampler.buckets.sizes[-1]
            assert private.sampler.smallest == largest < 100
            assert added[1] / added[0] >= math.ceil(3000 / largest) / 2
            assert private.state_dict()["smallest_part"] == largest
        private.close()


def test_the_page_states_the_costs() -> None:
    page = Path(__file__).parents[2] / "docs/how-to/static-shapes.md"
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text().splitlines()
        if line.startswith(("| rate", "| 0."))
    ]
    sizes = [int(title.split()[0].replace(",", "")) for title in table[0][1:]]
    assert len(table) == 8
    for rate, *cells in table[1:]:
        for examples, cell in zip(sizes, cells, strict=True):
            main, more, leaves = cost(examples, float(rate))
            assert cell == f"{main:,}, +{more:.1%}, {leaves:.2%}"

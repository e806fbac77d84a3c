"""Full batches: what an example adds to a sum is bounded to the last bit, though float32 adds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import diminuendo as dim
from diminuendo.training import PrivateGradients, fit
from diminuendo.training.clipping import Engine, Flat, PerLayer, product_sums, sums
from diminuendo.training.clipping.certificate import ALLOWANCE
from diminuendo.training.clipping.certified import Located, Summation
from diminuendo.training.clipping.product_sums import Column, Product
from diminuendo.training.clipping.stretch import Stretch
from diminuendo.training.clipping.sums import Rows, Term


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


KINDS = ["constant", "random", "aligned", "tiny", "long", "short factors"]
OTHERS = ["absent", "opposite", "enormous", "tiny", "denormal"]
C = 1.0


def tokens(kind: str, examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two sides, 3 and 4 wide, whose products round as badly as they do."""
    torch.manual_seed(seed)
    u, v = torch.randn(examples, 3), torch.randn(examples, 4)
    if kind == "constant":
        return torch.full_like(u, 0.1 + seed / 9), torch.full_like(v, 0.3)
    if kind == "aligned":
        return u[:1].abs() * (1 + 2.0**-20 * torch.rand(examples, 1)), v[:1].abs() + 0 * v
    if kind == "tiny":
        return u * 1e-25, v * 1e-3
    if kind == "long":
        return u * 1e5, v * 1e4
    if kind == "short factors":
        u[::7] *= 1e20
    return u, v


def factors_of(u: Tensor, v: Tensor) -> Tensor:
    norms = u.double().norm(dim=1) * v.double().norm(dim=1) * (1 + 1e-12)
    return Flat(C).factors(norms)


def with_another(
    u: Tensor, v: Tensor, factors: Tensor, at: int, other: str
) -> tuple[Tensor, Tensor, Tensor]:
    """A neighbour: something else in the place of one example."""
    u, v, factors = u.clone(), v.clone(), factors.clone()
    if other == "opposite":
        u[at] *= -1
    elif other in ("enormous", "tiny", "denormal"):
        length = {"enormous": 1e30, "tiny": 1e-30, "denormal": 1e-40}[other]
        u[at] = u[at] / u[at].abs().max() * length
    factors[at] = 0.0 if other == "absent" else factors_of(u, v)[at]
    return u, v, factors


def terms(u: Tensor, v: Tensor, factors: Tensor, kind: str) -> list[Term]:
    """The same sum, by two kinds of terms, or with the column that is a by-product."""
    if kind == "rows":
        return [Rows(torch.einsum("ni,nj->nij", u, v), factors)]
    longest = torch.maximum(u.double().norm(dim=1), v.double().norm(dim=1)) * (1 + 1e-12)
    return [Product(u, v, factors, None, longest)]


def placed_sum(u: Tensor, v: Tensor, factors: Tensor, kind: str) -> tuple[Tensor, list[Term]]:
    found = terms(u, v, factors, kind)
    summation = Summation()
    summation.placed = True
    located = [Located(0, slice(None), term, factors) for term in found]
    return summation.parts(located, len(u), C, ALLOWANCE)[0], found


def rows_of(u: Tensor, v: Tensor, kind: str) -> list[list[Fraction]]:
    """The gradients that are summed, exactly."""
    if kind == "rows":
        return [
            [Fraction(x) for x in row.tolist()] for row in (u[:, :, None] * v[:, None]).flatten(1)
        ]
    return [
        [Fraction(a) * Fraction(b) for a in first for b in second]
        for first, second in zip(u.tolist(), v.tolist(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["rows", "product"])
@given(
    st.sampled_from(KINDS),
    st.sampled_from(OTHERS),
    st.sampled_from([125, 126, 250, 333]),
    st.integers(0, 124),
    st.integers(0, 30),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_neighbouring_sums_differ_by_one_contribution_and_the_error_of_one_stretch(
    kind: str, gradients: str, other: str, examples: int, at: int, seed: int
) -> None:
    """In exact arithmetic, whatever stands in the place of the one example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "FEW", 0)
        patch.setattr(product_sums, "_LARGE", 0)
        u, v = tokens(gradients, examples, seed)
        factors = factors_of(u, v)
        first, used = placed_sum(u, v, factors, kind)
        u2, v2, factors2 = with_another(u, v, factors, at, other)
        second, _ = placed_sum(u2, v2, factors2, kind)
    assert all(term.stretch_error > 0 for term in used), "float32 took part"
    here, there = (
        rows_of(u[at : at + 1], v[at : at + 1], kind),
        rows_of(u2[at : at + 1], v2[at : at + 1], kind),
    )
    moved = [
        Fraction(factors[at].item()) * a - Fraction(factors2[at].item()) * b
        for a, b in zip(here[0], there[0], strict=True)
    ]
    first, second = first.double().reshape(3, 4), second.double().reshape(3, 4)
    found = [
        Fraction(a) - Fraction(b)
        for a, b in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True)
    ]
    off = sum((x - y) ** 2 for x, y in zip(found, moved, strict=True))
    allowed = max(term.stretch_error + term.error * examples for term in used)
    assert off <= (2 * Fraction(allowed) * Fraction(C)) ** 2
    assert allowed <= ALLOWANCE


def test_all_stretches_but_one_are_the_same_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product_sums, "_LARGE", 0)
    u, v = tokens("random", 1000, 3)
    factors = factors_of(u, v)
    length = Stretch.of(u, 0.97 * ALLOWANCE, placed=True).length
    products = []
    for factor in (factors, with_another(u, v, factors, 5, "absent")[2]):
        (term,) = terms(u, v, factor, "product")
        assert isinstance(term, Product)
        term.relax(0.97 * ALLOWANCE, placed=True)
        assert term._scaled is not None
        sides = term._scaled, term.wide
        products.append(
            [
                term._in_stretches(*(s[i : i + length] for s in sides))
                for i in range(0, 1000, length)
            ]
        )
    same = [torch.equal(a, b) for a, b in zip(*products, strict=True)]
    assert same == [False] + [True] * (len(same) - 1)


@pytest.mark.parametrize("examples", [2, 100, 125, 126, 1000, 60_000, 10**6, 10**9])
@pytest.mark.parametrize("placed", [True, False])
def test_the_length_of_a_stretch_keeps_the_allowance(examples: int, placed: bool) -> None:
    like = torch.empty(0).expand(examples, 0)
    stretch = Stretch.of(like, 0.97 * ALLOWANCE, placed)
    assert 0 <= stretch.length <= examples
    if stretch.length > 0:
        all_over, one = stretch.errors(examples)
        assert all_over * examples + one <= 0.98 * ALLOWANCE
    longest = {2: 2, 100: 100, 125: 125}.get(
        examples, 125 if placed and examples <= 60_000 else None
    )
    assert longest is None or stretch.length == longest


def test_a_bias_whose_uses_may_cancel_takes_no_column_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared parameters are summed in float64: their parts may be longer than what is clipped."""
    monkeypatch.setattr(product_sums, "_LARGE", 0)
    u, v = torch.randn(250, 3), torch.randn(250, 4)
    factors = torch.full((250,), 0.5, dtype=torch.float64)
    product = Product(u, v, factors, None, torch.full((250,), 10.0, dtype=torch.float64))
    column = Column(v, factors, product).of_shared(v)
    summation = Summation()
    summation.placed = True
    located = [
        Located(slot, slice(None), term, factors) for slot, term in enumerate((product, column))
    ]
    _, total = summation.parts(located, 250, C, ALLOWANCE)
    assert product.relaxed
    assert column.stretch_error == 0
    assert torch.allclose(total, (v.double() * 0.5).sum(0), rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("clip", [Flat(0.05), PerLayer([0.02, 0.03])])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_whole_network_with_and_without_one_example(clip: Any, threads: int) -> None:
    """The sums of all parameters move by no more than the clip norm and its allowance."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 300), nn.ReLU(), nn.Linear(300, 5))
    x, y = torch.randn(400, 30).abs(), torch.zeros(400, dtype=torch.long)
    totals = []
    with Engine(model) as engine:
        for scale in (1.0, -3.0, 1e20, math.nan):
            z = x.clone()
            z[17] *= scale
            losses = F.cross_entropy(model(z), y, reduction="none")
            placed = engine.clipped_sum(losses, clip, certify=True, placed=True)
            totals.append(torch.cat([part.flatten() for part in placed.sums]))
        losses = F.cross_entropy(model(x), y, reduction="none")
        usual = engine.clipped_sum(losses, clip, certify=True)
    C = clip.sensitivity
    without = totals[-1]  # an example that is not a number adds nothing
    assert all((total - without).norm() <= C * (1 + 2 * ALLOWANCE) for total in totals)
    assert (totals[0] - without).norm() > 0.9 * C
    exact = torch.cat([part.flatten() for part in usual.sums])
    assert 0 < (totals[0] - exact).norm() < 1e-4 * C, "float32 took part"


class Case:
    """A private model, its full batch, and whether examples were found in places of their own."""

    def __init__(self, data: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.x, self.y = torch.randn(40, 3), torch.randint(0, 2, (40,))
        plan = dim.plan((8, 1e-5), examples=40, parameters=8, steps=5, **options)
        self.private = PrivateGradients(self.model, plan)
        self.data = (self.x, self.y) if data is None else data(self.x, self.y)
        self.placed: list[bool] = []
        sum_up = self.private.engine.clipped_sum

        def watched(*args: Any, placed: bool, **others: Any) -> Any:
            self.placed.append(placed)
            return sum_up(*args, placed=placed, **others)

        self.private.engine.clipped_sum = watched  # type: ignore[method-assign, assignment]

    def seen(self, change: Any = None, **options: Any) -> bool:
        x, y = next(iter(self.private.batches(self.data, **options)))
        self.private.backward(
            F.cross_entropy(self.model(x if change is None else change(x)), y, reduction="none")
        )
        return self.placed == [True]


def test_the_rows_of_a_full_batch_are_in_their_places() -> None:
    assert Case().seen()
    assert Case(data=TensorDataset).seen()


@pytest.mark.parametrize(
    "change",
    [lambda x: x[x[:, 0].argsort()], lambda x: x * 1.0, lambda x: x.copy_(x.flip(0))],
    ids=["sorted", "another tensor", "written on"],
)
def test_rows_that_came_another_way_are_not(change: Any) -> None:
    """In another order, an example more could move all others: then every error counts."""
    assert not Case().seen(change)


def test_nor_are_those_of_samples_groups_and_collated_lists() -> None:
    assert not Case(sampling_rate=0.9).seen()
    assert not Case().seen(groups=list(range(40)))
    assert not Case(data=lambda x, y: list(zip(x, y, strict=True))).seen()


def test_nor_if_the_model_is_called_twice_and_one_call_is_with_others() -> None:
    case = Case()
    x, y = next(iter(case.private.batches(case.data)))
    both = case.model(x) + case.model(x * 1.0)
    case.private.backward(F.cross_entropy(both, y, reduction="none"))
    assert case.placed == [False]


def test_nor_a_batch_that_nobody_drew() -> None:
    case = Case()
    case.private.backward(F.cross_entropy(case.model(case.x), case.y, reduction="none"))
    assert case.placed == [False]


def test_the_next_batch_is_looked_at_anew() -> None:
    case = Case()
    for step, (x, y) in enumerate(case.private.batches(case.data)):
        z = x if step % 2 else x.clone()
        case.private.backward(F.cross_entropy(case.model(z), y, reduction="none"))
    assert case.placed == [False, True, False, True, False]


def test_fit_finds_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    sum_up = Engine.clipped_sum

    def watched(self: Engine, *args: Any, **others: Any) -> Any:
        seen.append(others["placed"])
        return sum_up(self, *args, **others)

    monkeypatch.setattr(Engine, "clipped_sum", watched)
    x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    plan = dim.plan((8, 1e-5), examples=40, parameters=8, steps=3)
    loss = nn.CrossEntropyLoss(reduction="none")
    fit(nn.Linear(3, 2), (x, y), plan, loss=loss, lr=0.1, progress=False)
    assert seen[-3:] == [True] * 3

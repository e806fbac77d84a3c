"""Sums against rational arithmetic: the error that is known beforehand is never exceeded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diminuendo.training.clipping import (
    Engine,
    Flat,
    PerLayer,
    certified,
    device,
    kernels,
    products,
    rounding,
    sums,
)
from diminuendo.training.clipping.certificate import ALLOWANCE, Certificate
from diminuendo.training.clipping.certified import Located, Summation
from diminuendo.training.clipping.device import DeviceConvolved, DeviceTerm
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.reports import Group
from diminuendo.training.clipping.rounding import row_norm
from diminuendo.training.clipping.scaled import Scaled
from diminuendo.training.clipping.sums import Job, Lookup, Product, Rows, multiply
from diminuendo.training.cores import Beside


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


KINDS = ["constant", "aligned", "cancelling", "random", "one large", "tiny", "halves"]


def gradients(kind: str, examples: int, width: int, seed: int) -> Tensor:
    """Rows in float32 whose sums round as badly as sums do."""
    torch.manual_seed(seed)
    noise = torch.randn(examples, width, dtype=torch.float32)
    if kind == "constant":  # every addition rounds the same way for long
        return torch.full((examples, width), 0.1 + seed / 9, dtype=torch.float32)
    if kind == "aligned":
        return noise[:1].abs() * (1 + 2.0**-20 * torch.rand(examples, 1))
    if kind == "cancelling":
        half = examples // 2
        noise[half : 2 * half] = -noise[:half] * (1 + 2.0**-22)
    if kind == "one large":
        noise[0] *= 2.0**30
    if kind == "tiny":
        return noise * 1e-30
    if kind == "halves":  # ties to be rounded
        return torch.where(noise > 0, 1.0, 2.0**-24).float()
    return noise


def clipped(rows: Tensor, bound: float) -> Tensor:
    """Factors as the engine would take them."""
    return Flat(bound).factors(row_norm(rows))


def exact_sum(rows: Tensor, factors: Tensor) -> list[Fraction]:
    weights = [Fraction(c) for c in factors.tolist()]
    return [
        sum((c * Fraction(x) for c, x in zip(weights, column, strict=True)), Fraction(0))
        for column in rows.double().t().tolist()
    ]


def squared_error(total: Tensor, exact: list[Fraction]) -> Fraction:
    pairs = zip(total.double().flatten().tolist(), exact, strict=True)
    return sum(((Fraction(x) - y) ** 2 for x, y in pairs), Fraction(0))


@given(
    st.sampled_from(KINDS),
    st.integers(0, 50),
    st.sampled_from([1, 2, 16, 33, 64, 200, 500]),
    st.sampled_from([1.0, 1e-3, 3e5]),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_relaxed_sums_of_rows_stay_within_their_bound(
    kind: str, seed: int, examples: int, bound: float
) -> None:
    """In float32, as far as the allowance lets it, and summed over what was contributed at most."""
    rows = gradients(kind, examples, 3, seed)
    factors = clipped(rows, bound)
    term = Rows(rows, factors)
    in_double = term.error
    term.relax(ALLOWANCE / 2 / examples)
    total = term.precise()
    assert (
        squared_error(total, exact_sum(rows, factors))
        <= (Fraction(term.error) * examples * Fraction(bound)) ** 2
    )
    assert term.error * examples <= ALLOWANCE / 2 * (1 + 1e-6)
    assert (term.error > in_double) == (examples < 500), "beyond, float64 is as fast"


def test_the_bound_is_no_larger_than_it_needs_to_be() -> None:
    """A sum of equal numbers in float32 takes a good part of what it is allowed."""
    rows = torch.full((64, 1), 0.1, dtype=torch.float32)
    worst = 0.0
    for step in range(200):
        factors = torch.full((64,), 1.0 - step / 1000, dtype=torch.float64)
        term = Rows(rows, factors)
        term.relax(1e-5)
        found = squared_error(term.precise(), exact_sum(rows, factors))
        worst = max(worst, math.sqrt(found) / (term.error * 6.4))
    assert 0.01 < worst <= 1


@pytest.mark.parametrize(
    "why", ["shared", "double", "small factor", "small bound", "large bound", "bfloat16"]
)
def test_where_float32_has_not_the_range_or_the_digits_it_is_not_used(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(32, 4, dtype=torch.float64 if why == "double" else torch.float32)
    sensitivity = {"small bound": 2.0**-70, "large bound": 2.0**70}.get(why, 1.0)
    factors = torch.full((32,), 0.5, dtype=torch.float64)
    if why == "small factor":
        factors[3] = 2.0**-61
    if why == "bfloat16":
        monkeypatch.setattr(rounding, "_reduced", lambda like: True)
    term = Rows(rows, factors)
    if why == "shared":
        term.of_shared(rows)
    before = term.error
    located = [Located(0, slice(None), term, factors)]
    (total,) = Summation().parts(located, 32, sensitivity, ALLOWANCE)
    assert term.error == before
    assert total.dtype == torch.float64


def test_factors_that_are_zero_do_no_harm() -> None:
    rows, factors = torch.randn(32, 4), torch.full((32,), 0.5, dtype=torch.float64)
    factors[::2] = 0
    term = Rows(rows, factors)
    (total,) = Summation().parts([Located(0, slice(None), term, factors)], 32, 1.0, ALLOWANCE)
    assert total.dtype == torch.float32, "one stretch, in float32"
    assert squared_error(total, exact_sum(rows, factors)) <= Fraction(ALLOWANCE) ** 2


def test_terms_that_are_parts_of_one_norm_are_counted_once() -> None:
    """Sixty parameters whose rows are summed in float32 take no more than one of them."""
    factors = torch.ones(64, dtype=torch.float64)
    errors = []
    for count in (1, 60):
        certificate = Certificate(1.0, ALLOWANCE, torch.zeros(0, 11, dtype=torch.float64))
        for _ in range(count):
            term = Rows(torch.randn(64, 5), factors)
            term.relax(ALLOWANCE / 2 / 64)
            certificate.count(term, factors)
        errors.append(float(certificate.error()))
    assert errors[0] == errors[1] <= ALLOWANCE / 2


class Many(nn.Module):
    """Layers that keep rows: a norm, a convolution and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3)
        self.scale = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv(x)) * self.scale).square().flatten(1).sum(1)


@pytest.mark.parametrize("clip", [Flat(1e-2), PerLayer([1e-2, 2e-2, 5e-3])])
def test_a_whole_model_against_rational_arithmetic(clip: Flat | PerLayer) -> None:
    """The error of all parameters together, from the rows that the layers kept."""
    torch.manual_seed(1)
    model, x = Many(), torch.rand(90, 2, 6) + 0.5
    kept: list[tuple[Located, Tensor]] = []
    parts = Summation.parts

    def watched(self: Summation, terms: list[Located], *others: Any) -> list[Tensor]:
        found = parts(self, terms, *others)
        kept.extend(zip(terms, found, strict=True))
        return found

    with Engine(model) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Summation, "parts", watched)
        engine.clipped_sum(model(x), clip, certify=True)
    assert any(isinstance(term.term, Rows) and term.term.error > 1e-9 for term, _ in kept)
    square = Fraction(0)
    for located, total in kept:
        assert isinstance(located.term, Rows)
        square += squared_error(total, exact_sum(located.term.rows.flatten(1), located.factors))
    assert square <= (Fraction(ALLOWANCE) * Fraction(clip.sensitivity) / 2) ** 2


@pytest.mark.parametrize("tokens", [1, 3])
def test_products_divided_among_cores(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sum for any number of cores, to float64's rounding, and for odd numbers of rows."""
    monkeypatch.setattr(sums, "_DIVIDED", 1)
    torch.manual_seed(0)
    shape = (101,) if tokens == 1 else (101, tokens)
    u, v = torch.randn(*shape, 5), torch.randn(*shape, 9)
    factors = torch.rand(101, dtype=torch.float64)
    weights = factors.repeat_interleave(tokens).unsqueeze(1)
    wanted = torch.mm((u.reshape(-1, 5) * weights).t(), v.reshape(-1, 9).double())
    vectors = torch.randn(5, 11, dtype=torch.float64)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        product = Product(u, v, factors, None)
        assert len(product.pieces) == count
        assert torch.allclose(product.precise(), wanted, rtol=1e-13, atol=1e-13)
        assert product.column is not None
        column = (v.reshape(-1, 9) * weights).sum(0)
        assert torch.allclose(product.column, column, rtol=1e-13, atol=1e-13)
        multiply([Job(product, vectors, quick=True)])
        quick = product.quick()
        assert torch.allclose(quick.double(), wanted, rtol=1e-4, atol=1e-4)
        distance = (vectors.t() @ (quick.double() - wanted)).square().sum()
        assert torch.allclose(product.probe(quick, vectors), distance, rtol=1e-6)
        wrong = product.probe(quick + 1e-3, vectors)
        assert wrong > 100 * distance, "what was multiplied before is not taken for it twice"


@pytest.mark.parametrize("cost", [0.0, 200.0, 1e9])
def test_a_core_that_has_other_work_takes_fewer_rows(
    cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row enters the sum once, within the bound, whatever else a core does; in one thread,
    with nothing to do beside, the other work is left undone."""
    monkeypatch.setattr(sums, "_DIVIDED", 1)
    torch.manual_seed(0)
    u, v = torch.randn(101, 5), torch.randn(101, 9)
    factors = torch.rand(101, dtype=torch.float64)
    done: list[int] = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        product = Product(u, v, factors, None)
        even = product.pieces
        multiply([Job(product, None)], Beside(lambda: done.append(1), cost))
        assert len(done) == (count > 1)
        done.clear()
        assert [row for piece in product.pieces for row in range(101)[piece]] == [*range(101)]
        if count > 1:
            assert 0 < product.pieces[0].stop <= even[0].stop
            assert (product.pieces[0].stop < even[0].stop) is (cost > 0)
        total = product.precise()
        rows = torch.einsum("ni,nj->nij", u.double(), v.double()).flatten(1)  # exact in float64
        error = squared_error(total.flatten(), exact_sum(rows, factors))
        most = (factors * torch.linalg.vector_norm(rows, dim=1)).sum().item()
        assert error <= Fraction(product.error * most) ** 2


@pytest.mark.parametrize("held", [1, 40, 1 << 22])
@pytest.mark.parametrize("added", [1, 11, 1 << 14])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_tokens_that_are_looked_up_in_blocks(
    held: int, added: int, index: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is held at a time, every token enters the row of its index once, within the bound
    (against rational arithmetic), and rows that nobody looked up are zero."""
    monkeypatch.setattr(sums, "_LOOKED_UP", held)
    monkeypatch.setattr(sums, "_ADDED", added)
    torch.manual_seed(0)
    tokens, indices = torch.randn(7, 5, 3), torch.randint(0, 4, (7, 5), dtype=index)
    factors = torch.rand(7, dtype=torch.float64)
    term = Lookup(tokens, indices, factors, 6, None)
    rows = torch.zeros(7, 5, 6, 3, dtype=torch.float64)  # each token alone
    rows.scatter_(
        2, indices.long()[:, :, None, None].expand(-1, -1, 1, 3), tokens.double()[:, :, None]
    )
    each = rows.flatten(0, 1).flatten(1)
    total = term.precise()
    assert not total[4:].any()
    weights = factors.repeat_interleave(5)
    most = (weights * torch.linalg.vector_norm(each, dim=1)).sum().item()
    assert (
        squared_error(total.flatten(), exact_sum(each, weights)) <= Fraction(term.error * most) ** 2
    )


def test_the_words_of_a_large_full_batch_are_within_the_bound() -> None:
    """Sixty thousand texts at once were refused, after they had been paid for: now their words are
    added up some at a time, so that fewer of them meet in a row."""
    tokens = torch.ones(1, 1, 1).expand(60_000, 12, 1)
    indices = torch.zeros(1, 1, dtype=torch.int64).expand(60_000, 12)
    term = Lookup(tokens, indices, torch.full((60_000,), 1 / 12, dtype=torch.float64), 3, None)
    assert term.error * term.cancelled * 60_000 < ALLOWANCE / 2
    (total,) = Summation().parts(
        [Located(0, slice(None), term, term.factors)], 60_000, 1.0, ALLOWANCE
    )
    assert total[0].item() == pytest.approx(60_000, rel=1e-13)
    assert not total[1:].any()


def test_work_beside_a_sum_that_fails_fails_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_DIVIDED", 1)
    torch.set_num_threads(2)
    product = Product(torch.randn(40, 5), torch.randn(40, 9), torch.ones(40).double(), None)

    def fails() -> None:
        raise EngineError("refused")

    with pytest.raises(EngineError, match="refused"):
        multiply([Job(product, None)], Beside(fails, 1.0))


def test_the_range_of_float32_is_kept() -> None:
    """The smallest factor, bound and gradient that are let through, in exact arithmetic."""
    low = certified.TAME[0]
    rows = torch.tensor([[2.0**-20], [2.0**-66], [1.0]], dtype=torch.float32)
    factors = torch.tensor([low, 1.0, low], dtype=torch.float64)
    term = Rows(rows, factors)
    (total,) = Summation().parts([Located(0, slice(None), term, factors)], 3, low, ALLOWANCE)
    assert term.error > 1e-8
    error = squared_error(total, exact_sum(rows, factors))
    assert error <= (Fraction(ALLOWANCE) * Fraction(low)) ** 2


class There(DeviceTerm):
    """A term of the kind that a GPU has, on a CPU: its quick sum is off by a part of the sum."""

    def __init__(self, rows: Tensor, factors: Tensor, off: float = 0.0) -> None:
        self._exact = torch.einsum("i,inw->nw", factors, rows.double())
        self._off = off

    def precise(self) -> Tensor:
        return self._exact.clone()

    def quick_into(self, out: Tensor | None, vectors: Tensor) -> Tensor:  # noqa: ARG002
        quick = (self._exact * (1 + self._off)).float()
        return quick if out is None else out.copy_(quick)

    def probes(self) -> int:
        return len(self._exact)

    def probe_error(self) -> float:
        return 0.0

    def measure(self, total: Tensor, vectors: Tensor, into: Tensor) -> None:
        into.add_(torch.mm(vectors.t(), total.double() - self._exact).square_().sum())

    def repair(self, total: Tensor, holds: Tensor) -> None:
        if not holds:
            total.copy_(self._exact)


@pytest.mark.parametrize("quick_first", [True, False])
def test_rows_of_one_parameter_may_be_summed_in_two_ways(quick_first: bool) -> None:
    """Some rows quickly, in their place, others in float64: none of what was in that memory before
    is left, as it would be of an attention whose queries are few and whose keys are many."""
    torch.manual_seed(0)
    factors = torch.full((5,), 0.5, dtype=torch.float64)
    few, many = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    one, two = Rows(few, factors), There(many, factors)
    order = (two, one) if quick_first else (one, two)
    param, summation = nn.Parameter(torch.zeros(4, 3)), Summation()
    summation.static = True
    scaled = Scaled([param], {id(param): 0}, [0], [], [Group()], [factors])
    terms = [Located(0, slice(2 * i, 2 * i + 2), term, factors) for i, term in enumerate(order)]
    vars(scaled)["_terms"] = lambda: terms
    (total,) = scaled.certified([torch.full((4, 3), math.nan)], summation, 1.0, ALLOWANCE)
    expected = torch.cat([term.precise() for term in order])
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bound", [2.0**-140, 1.0])
def test_a_sum_that_is_taken_again_keeps_its_digits(bound: float) -> None:
    """Also where it is so small that float32 has none left."""
    torch.manual_seed(0)
    rows = torch.randn(3, 4, 5)
    factors = bound * clipped(rows.flatten(1), 1.0)
    term = There(rows, factors, off=0.5)
    (total,) = Summation().parts([Located(0, slice(None), term, factors)], 3, bound, ALLOWANCE)
    assert float((total.double() - term.precise()).norm()) <= ALLOWANCE * bound


def test_what_is_measured_in_a_lane_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane reads it after the host has gone on: memory that was let go of would be written over,
    in a recording, before the error of the sum is known."""
    monkeypatch.setattr(products, "square_of_difference", lambda *given: None)
    picture, factors = torch.randn(2, 3, 4, 4), torch.ones(2, dtype=torch.float64)
    term = DeviceConvolved(nn.Identity(), picture, picture, factors, None)  # type: ignore[arg-type]
    term._exact = [torch.ones(1, 16, 27, dtype=torch.float64)]
    read = weakref.ref(term._exact[0])
    term.measure(torch.zeros(3, 27), torch.zeros(3, 16), torch.zeros(1))
    assert read() is not None


def test_half_precision_is_not_kept_where_products_add_up_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rounding of norms is proven for sums in float32."""
    monkeypatch.setattr(kernels, "halved", lambda grad: grad.element_size() == 2)
    kinds = torch.float16, torch.bfloat16
    assert all(device.keeps_half(torch.zeros(2, dtype=kind), 64) for kind in kinds)
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    try:
        matmul.allow_fp16_accumulation = True
        kept = [device.keeps_half(torch.zeros(2, dtype=kind), 64) for kind in kinds]
    finally:
        matmul.allow_fp16_accumulation = before
    assert kept == [False, True]

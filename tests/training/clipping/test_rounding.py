"""No contribution above C, whatever float32 makes of it: checked with exact rational arithmetic.

With one example in the batch, a certified sum is its contribution but for ALLOWANCE. What is
contributed in real numbers follows from the tensors that the layers saved: it is computed with
fractions (or, for large layers, from closed forms), never with floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diminuendo.training.clipping import (
    Automatic,
    Clip,
    Engine,
    EngineError,
    Flat,
    PerLayer,
    rounding,
    sums,
)
from diminuendo.training.clipping import certificate as certificates
from diminuendo.training.clipping import engine as engines
from diminuendo.training.clipping.certificate import ALLOWANCE, Certificate, normal
from diminuendo.training.clipping.contract import Factor, shared_size
from diminuendo.training.clipping.layers import conv
from diminuendo.training.clipping.products import VECTORS
from diminuendo.training.clipping.rounding import row_norm, to_tf32
from diminuendo.training.clipping.sums import Product


def square_sum(tensors: list[Tensor]) -> Fraction:
    """The exact sum of squares."""
    values = [value for tensor in tensors for value in tensor.double().flatten().tolist()]
    return sum((Fraction(value) ** 2 for value in values), Fraction(0))


def at_most(tensors: list[Tensor], bound: float) -> bool:
    """Whether the exact norm of all tensors together is at most ``bound``."""
    return square_sum(tensors) <= Fraction(bound) ** 2


SHAPES = ["constant", "cancelling", "tiny", "huge", "denormal", "mixed", "one"]


def adversarial(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """float32 numbers that make rounding, cancellation, underflow or overflow likely."""
    torch.manual_seed(seed)
    noise = torch.randn(shape, dtype=torch.float32)
    if kind == "constant":
        return torch.full(shape, 0.1 + seed / 7, dtype=torch.float32)
    if kind == "cancelling":
        flat = noise.flatten()
        half = flat.numel() // 2
        flat[half : 2 * half] = -flat[:half] * (1 + 2.0**-20)
        return flat.view(shape)
    if kind == "tiny":
        return noise * 1e-23
    if kind == "huge":
        return noise * 1e18
    if kind == "denormal":
        return noise * 1e-41
    if kind == "mixed":
        return noise * 10.0 ** torch.randint(-30, 15, shape).float()
    return torch.where(torch.rand(shape) < 0.1, noise, 0.0)


class Weighted(nn.Module):
    """Whatever comes out times given weights: the gradients of the output are the weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        out = self.layer(x)
        return (out * weights).flatten(1).sum(1)


def contribution(model: Weighted, x: Tensor, weights: Tensor, clip: Clip) -> list[Tensor]:
    with Engine(model) as engine:
        return engine.clipped_sum(model(x, weights), clip, certify=True).sums


class Raw(nn.Module):
    """A parameter of its own: replayed."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Twice(nn.Module):
    """A module used twice, with outputs of opposite sign."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - self.layer(x * (1 + 2.0**-12))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (1, 5)),
    "linear, tokens, gram": (lambda: nn.Linear(9, 8), (1, 3, 9)),
    "linear, tokens, formed": (lambda: nn.Linear(2, 3), (1, 24, 2)),
    "linear, checked": (lambda: nn.Linear(70, 66, bias=False), (1, 2, 70)),
    "convolution": (lambda: nn.Conv1d(3, 4, 3, padding=1), (1, 3, 6)),
    "convolution, gram": (lambda: nn.Conv1d(12, 20, 2), (1, 12, 3)),
    "convolution, groups": (lambda: nn.Conv2d(4, 4, 2, groups=2), (1, 4, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(6), (1, 4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (1, 4, 5)),
    "raw": (lambda: Raw(7), (1, 7)),
    "twice": (lambda: Twice(nn.Linear(5, 4)), (1, 5)),
    "twice, convolution": (lambda: Twice(nn.Conv1d(3, 4, 2, groups=1)), (1, 3, 5)),
    "twice, norm": (lambda: Twice(nn.LayerNorm(6)), (1, 3, 6)),
}


@pytest.fixture(autouse=True)
def _single() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=25, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(SHAPES), st.sampled_from(SHAPES)),
    seed=st.integers(0, 1000),
    bound=st.sampled_from([1.0, 1e-6, 1e4]),
    rule=st.sampled_from([Flat, PerLayer, Automatic]),
)
def test_no_contribution_is_above_the_bound(
    name: str, kinds: tuple[str, str], seed: int, bound: float, rule: type[Flat]
) -> None:
    torch.set_default_dtype(torch.float32)
    make, shape = LAYERS[name]
    model = Weighted(make())
    x = adversarial(kinds[0], shape, seed)
    weights = adversarial(kinds[1], tuple(model.layer(x).shape), seed + 1)
    total = contribution(model, x, weights, rule(bound))
    assert all(part.isfinite().all() for part in total)
    assert at_most(total, bound * (1 + ALLOWANCE))


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(SHAPES), seed=st.integers(0, 1000), size=st.sampled_from([3, 2, 5]))
def test_embeddings(kind: str, seed: int, size: int) -> None:
    torch.set_default_dtype(torch.float32)
    model = Weighted(nn.Embedding(4, size))
    index = torch.randint(0, 4, (1, 9))
    total = contribution(model, index, adversarial(kind, (1, 9, size), seed), Flat(1.0))
    assert at_most(total, 1 + ALLOWANCE)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(SHAPES),
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1, 7, 1024, 1025, 3000]),
    double=st.booleans(),
)
def test_a_norm_is_never_too_small(kind: str, seed: int, size: int, double: bool) -> None:
    x = adversarial(kind, (3, size), seed)
    x = x.double() ** (5 if kind == "tiny" else 1) if double else x
    for row, norm in zip(x, row_norm(x).tolist(), strict=True):
        exact = square_sum([row])
        assert Fraction(norm) ** 2 >= exact
        assert float(exact) < 1e-290 or Fraction(norm) ** 2 <= exact * Fraction(1 + 2.0**-12)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(SHAPES), st.sampled_from(SHAPES)),
    seed=st.integers(0, 10_000),
    tokens=st.sampled_from([2, 5]),
)
def test_gram_matrices_against_rational_arithmetic(
    kinds: tuple[str, str], seed: int, tokens: int
) -> None:
    u, v = adversarial(kinds[0], (1, tokens, 4), seed), adversarial(kinds[1], (1, tokens, 3), seed)
    left = [[Fraction(value) for value in row] for row in u[0].double().tolist()]
    right = [[Fraction(value) for value in row] for row in v[0].double().tolist()]
    exact = sum(
        sum((left[t][i] * right[t][j] for t in range(tokens)), Fraction(0)) ** 2
        for i in range(4)
        for j in range(3)
    )
    size = shared_size([Factor(u, v)])
    norm = size.norm.item()
    assert math.isinf(norm) or Fraction(norm) ** 2 >= exact
    assert not exact or norm > 0


CONSTANTS = [
    (256, 256, 128),
    pytest.param(1000, 1000, 500, marks=pytest.mark.slow),
    pytest.param(2000, 2000, 1000, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize(("inputs", "outputs", "tokens"), CONSTANTS)
def test_long_vectors_of_constants(inputs: int, outputs: int, tokens: int, value: float) -> None:
    """float32 adds a million equal squares to a sum that stops growing."""
    model = Weighted(nn.Linear(inputs, outputs, bias=False))
    x = torch.full((1, tokens, inputs), value)
    weights = torch.full((1, tokens, outputs), 1.0)
    with Engine(model) as engine:
        norm = engine.clipped_sum(model(x, weights), Flat(1.0)).norms.item()
        (total,) = engine.clipped_sum(model(x, weights), Flat(1.0), certify=True).sums
    exact = Fraction(float(x[0, 0, 0])) * tokens
    # The product is formed in float32: its entries are all alike, and near the exact ones.
    assert Fraction(norm) ** 2 >= (exact * Fraction(1 - 2e-5)) ** 2 * inputs * outputs
    entry = Fraction(float(total[0, 0]))
    assert entry**2 * inputs * outputs <= Fraction(1 + 1e-9) ** 2


@pytest.mark.parametrize("size", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", [0.1, 0.7])
def test_a_parameter_of_many_weights(size: int, value: float) -> None:
    model = Weighted(Raw(size))
    x, weights = torch.full((1, size), value), torch.ones(1, size)
    with Engine(model) as engine:
        norm = engine.clipped_sum(model(x, weights), Flat(1.0)).norms.item()
        (total,) = engine.clipped_sum(model(x, weights), Flat(1.0), certify=True).sums
    assert Fraction(norm) ** 2 >= Fraction(float(x[0, 0])) ** 2 * size
    assert Fraction(float(total[0])) ** 2 * size <= Fraction(1 + 2.0**-40) ** 2


@pytest.mark.parametrize("scale", [(1e19, 1e-23), (1e-23, 1e19), (1e17, 1e-23), (1e30, 1e-40)])
@pytest.mark.parametrize("layer", ["linear", "tokens", "convolution"])
def test_squares_that_underflow(layer: str, scale: tuple[float, float]) -> None:
    """Their norms came out as zero, so that nothing was clipped."""
    torch.manual_seed(0)
    shape = {"linear": (1, 64), "tokens": (1, 4, 64), "convolution": (1, 64, 4)}[layer]
    make = nn.Conv1d(64, 80, 2, bias=False) if layer == "convolution" else nn.Linear(64, 70, False)
    model = Weighted(make)
    x = torch.randn(shape) * scale[0]
    weights = torch.randn(model.layer(x * 0).shape) * scale[1]
    for bound in (1e-4, 1e-12):
        total = contribution(model, x, weights, Flat(bound))
        assert at_most(total, bound * (1 + ALLOWANCE))
        assert bound == 1e-4 or not at_most(total, 0.99 * bound), "clipped, not left out"


def test_a_norm_does_not_depend_on_the_other_examples() -> None:
    """Those that float32 cannot hold are measured in another way, the others are not."""
    torch.manual_seed(0)
    u, v = torch.randn(5, 4, 9), torch.randn(5, 4, 8)
    alone = shared_size([Factor(u[1:2], v[1:2])]).norm
    u[0] *= 1e30
    u[3] *= 1e-30
    together = shared_size([Factor(u, v)]).norm
    assert together.isfinite().all()
    assert torch.equal(together[1:2], alone)
    assert torch.equal(row_norm(u[:, 0])[1:2], row_norm(u[1:2, 0]))


@pytest.mark.parametrize("aligned", [False, True])
def test_sums_of_many_examples_are_as_close_as_they_claim(aligned: bool) -> None:
    """Against float64; sums of gradients that point the same way err most, and are made anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 96), nn.ReLU(), nn.Linear(96, 64))
    x = torch.rand(700, 80) + 0.5 if aligned else torch.randn(700, 80)
    with Engine(model) as engine:
        rough = engine.clipped_sum(model(x).sum(1), Flat(1e-3))
        engine._summation.precise = dict.fromkeys(range(4), 9)
        exact = engine.clipped_sum(model(x).sum(1), Flat(1e-3), certify=True)
        errors = []
        for _ in range(3 if aligned else 30):
            engine._summation.precise = {}
            result = engine.clipped_sum(model(x).sum(1), Flat(1e-3), certify=True)
            pairs = zip(result.sums, exact.sums, strict=True)
            errors.append(math.hypot(*((a - b).norm() for a, b in pairs)))
    assert max(errors) <= ALLOWANCE * 1e-3
    # The random vectors passed 170 of 200 such sums; 30 refusals in a row are then below 1e-20.
    assert aligned or max(errors) > 0, "the quick sums were good enough"
    assert all(part.dtype == torch.float64 for part in result.sums)
    for a, b in zip(rough.sums, exact.sums, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-3, atol=1e-5)


def test_sums_of_convolutions_whose_channels_come_last() -> None:
    """As some models lay out their pictures: gradients come in the same layout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 40, 4, 4))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(12, 3, 8, 8).to(memory_format=torch.channels_last)
    with Engine(model) as engine:
        rough = engine.clipped_sum(model(x).flatten(1).sum(1), Flat(1.0))
        exact = engine.clipped_sum(model(x).flatten(1).sum(1), Flat(1.0), certify=True)
    for a, b in zip(rough.sums, exact.sums, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "convolution", "groups"])
def test_a_sum_that_is_off_is_noticed_and_made_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """False alarms apart, one wrong entry is enough; a wrong sum passes with 2^-50."""
    torch.manual_seed(0)
    monkeypatch.setattr(conv, "keeping_pays", lambda *_: False)
    monkeypatch.setattr(conv, "_NARROW", 1)
    monkeypatch.setattr(sums, "_NARROW", 1)
    model: nn.Module
    owner: type[Any] = Product
    if kind == "linear":
        model, x = nn.Linear(70, 64), torch.randn(40, 70)
    else:
        groups = 2 if kind == "groups" else 1
        model, x = nn.Conv1d(6, 8, 2, groups=groups), torch.randn(40, 6, 9)
        owner = conv._Convolved
    clip, made = Flat(1e-2), []
    quick, precise = owner.quick, owner.precise

    def wrong(self: sums.Term) -> Tensor:
        total = quick(self).clone()
        total.view(-1)[3] += 4 * ALLOWANCE * clip.bound
        return total

    def counted(self: sums.Term) -> Tensor:
        made.append(1)
        return precise(self)

    with Engine(model) as engine:

        def run() -> list[Tensor]:
            return engine.clipped_sum(model(x).flatten(1).sum(1), clip, certify=True).sums

        good = run()
        assert not made
        monkeypatch.setattr(owner, "precise", counted)
        assert all(torch.equal(a, b) for a, b in zip(run(), good, strict=True))
        assert not made
        monkeypatch.setattr(owner, "quick", wrong)
        mended = run()
        assert made == [1]
        assert engine._summation.precise, "the next calls do not try the quick sum again"
        run()
        assert made == [1, 1]
    error = math.hypot(*((a - b).norm() for a, b in zip(mended, good, strict=True)))
    assert error <= ALLOWANCE * clip.bound


@pytest.mark.parametrize("count", [certificates._VECTORS, VECTORS])
def test_projections_bound_the_error_of_the_worst_matrix(count: int) -> None:
    """An error of rank one is the hardest to see; 2000 draws, a false alarm in 2^-39."""
    errors = torch.zeros(6, 5, dtype=torch.float64)
    errors[2, 3] = 1.0

    class Known(sums.Term):
        def probe(self, total: Tensor, vectors: Tensor) -> Tensor:
            return torch.mm(vectors.t(), total).square().sum()

        def probes(self) -> int:
            return 6

        def probe_error(self) -> float:
            return 0.0

    factors = torch.ones(1, dtype=torch.float64)
    found = []
    for _ in range(2000):
        certificate = Certificate(1.0, 1.0, normal(6, count))
        certificate.measure(Known(), errors, factors)
        found.append(float(certificate.error()))
    assert min(found) >= 1.0
    assert sorted(found)[1000] < 60
    exact = certificates.share_of(count) / count
    chernoff = (exact * math.exp(1 - exact)) ** (count / 2)
    assert chernoff <= certificates.FAILURE


def test_normal_numbers() -> None:
    """200,000 numbers: mean, variance and fourth moment within 5 deviations (1 in 10^6)."""
    x = normal(50_000, 4).flatten()
    assert x.dtype == torch.float64
    assert abs(x.mean()) < 5 / math.sqrt(200_000)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / 200_000)
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / 200_000)
    assert normal(0, 4).shape == (0, 4)


def test_rounding_to_tf32() -> None:
    x = torch.cat([adversarial(kind, (1000,), 3) for kind in SHAPES if kind != "denormal"])
    rounded = to_tf32(x)
    assert torch.equal(to_tf32(rounded), rounded)
    assert torch.equal(rounded.view(torch.int32) & 0x1FFF, torch.zeros(len(x), dtype=torch.int32))
    normal_ = x.abs() > 2.0**-126
    assert ((rounded - x).abs() <= rounding.TF32 * x.abs())[normal_].all()
    assert not to_tf32(torch.tensor([math.inf, -math.inf, math.nan, 1e20, -1e38])).isfinite().any()


def test_tf32_as_a_gpu_would_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything rounded to TF32 beforehand, contributions stay within the bound."""
    for module in (rounding, sums, conv, engines):
        monkeypatch.setattr(module, "coarse", lambda like, convolved=False: True)
    from diminuendo.training.clipping.layers import linear

    monkeypatch.setattr(linear, "coarse", lambda like, convolved=False: True)
    monkeypatch.setattr(conv, "keeping_pays", lambda *_: False)
    torch.manual_seed(0)
    for layer, shape in (
        (nn.Linear(70, 66), (1, 70)),
        (nn.Linear(70, 66, bias=False), (1, 3, 70)),
        (nn.Conv1d(3, 4, 2, bias=False), (1, 3, 9)),
        (nn.Conv1d(40, 50, 2, bias=False), (1, 40, 4)),
        (Twice(nn.Linear(8, 8)), (1, 8)),
    ):
        model = Weighted(layer)
        x = torch.randn(shape)
        weights = torch.randn(model.layer(x).shape)
        total = contribution(model, x, weights, Flat(1e-2))
        assert at_most(total, 1e-2 * (1 + ALLOWANCE))
        assert isinstance(layer, Twice) or not at_most(total, 1e-2 * 0.9)


@pytest.mark.parametrize("layer", ["tokens", "convolution"])
def test_a_cpu_that_may_multiply_in_bfloat16(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then norms by matrix products are float64 ones, and not any less than they were."""
    torch.manual_seed(0)
    monkeypatch.setattr(conv, "keeping_pays", lambda *_: False)
    make = nn.Linear(9, 8, bias=False) if layer == "tokens" else nn.Conv1d(3, 4, 2, bias=False)
    model, x = Weighted(make), torch.randn(2, 3, 9)
    weights = torch.randn(model.layer(x).shape)
    found = []
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        try:
            assert rounding._reduced(x) == (precision == "medium")
            with Engine(model) as engine:
                found.append(engine.clipped_sum(model(x, weights), Flat(1.0)).norms)
        finally:
            torch.set_float32_matmul_precision(before)
    # The layer's own forward pass plays no part: the gradients are the weights.
    assert torch.allclose(found[0], found[1], rtol=1e-4)
    per_example = [
        torch.autograd.grad(
            (model.double().layer(row.double()[None]) * w.double()[None]).sum(),
            list(model.parameters()),
        )[0].norm()
        for row, w in zip(x, weights, strict=True)
    ]
    assert (found[1] >= torch.stack(per_example)).all()


def test_what_a_certified_sum_needs() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with Engine(model) as engine:
        refused: list[dict[str, Any]] = [{"scale": 0.5}, {"share": 0.0}, {"share": 1.5}]
        for wrong in refused:
            with pytest.raises(EngineError, match="scale 1 and a share"):
                engine.clipped_sum(model(x).sum(1), Flat(1.0), certify=True, **wrong)
        for narrow in (engine.zeros(), engine.zeros):
            with pytest.raises(EngineError, match="float64"):
                engine.clipped_sum(model(x).sum(1), Flat(1.0), narrow, certify=True)
        with pytest.raises(EngineError, match="micro-batches"):
            engine.clipped_sum(model(x).sum(1), Flat(1.0), certify=True, share=1e-12)
        buffers = engine.zeros(torch.float64)
        for part in (x[:1], x[1:], x[:0]):
            made = engine.clipped_sum(
                model(part).sum(1), Flat(1.0), buffers, certify=True, share=1 / 3
            )
            assert all(a is b for a, b in zip(made.sums, buffers, strict=True))
        whole = engine.clipped_sum(model(x).sum(1), Flat(1.0), certify=True)
        for a, b in zip(buffers, whole.sums, strict=True):
            assert torch.allclose(a, b, rtol=1e-12)
        assert engine.sensitivity_factor(certified=True) == 1 + 2 * ALLOWANCE
        assert engine.sensitivity_factor(certified=False) == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Flat(1e-190),
        lambda: PerLayer([1.0, 1e-162]),
        lambda: Automatic(1.0, 1e-200),
    ],
)
def test_bounds_whose_squares_underflow_are_refused(make: Callable[[], Clip]) -> None:
    with pytest.raises(EngineError, match="at least"):
        make()


@pytest.mark.parametrize(("bound", "gamma"), [(1.0, 1e-41), (1e40, 1.0), (1e250, 1e-100)])
def test_factors_that_float32_may_not_hold_are_refused(bound: float, gamma: float) -> None:
    """A gradient of zero times a factor of infinity is no number, and neither is the sum: a run
    would end with an error because of one example."""
    with pytest.raises(EngineError, match=r"bound / gamma must be at most 2\^120"):
        Automatic(bound, gamma)


@pytest.mark.parametrize("certify", [False, True])
def test_the_largest_factors_do_no_harm_to_gradients_of_nothing(certify: bool) -> None:
    layer = nn.LayerNorm(10)
    weights = torch.tensor([1.0, 0.0, 1e-30, 1e-44])
    with Engine(layer) as engine:
        losses = layer(torch.randn(4, 10)).square().sum(1) * weights
        found = engine.clipped_sum(losses, Automatic(2.0**60, 2.0**-60), certify=certify)
    assert all(bool(total.isfinite().all()) for total in found.sums)
    assert 0 < float(found.sums[0].norm()) < 2 * 2.0**60

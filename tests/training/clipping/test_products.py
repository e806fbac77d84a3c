"""Kernels of sums on a GPU: exact references, rows that count for nothing, checks and repairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping import (
    Automatic,
    Engine,
    Flat,
    device,
    kernels,
    products,
    rounding,
)
from diminuendo.training.clipping.certificate import ALLOWANCE
from diminuendo.training.clipping.products import VECTORS, Sides

pytestmark = pytest.mark.skipif(
    not (kernels.available and torch.cuda.is_available()), reason="no CUDA device with Triton"
)

SHAPES = [
    (5, 37, 70, 130),
    (3, 64, 256, 128),
    (2, 300, 72, 520),
    (1, 16, 64, 64),
    (2, 32, 64, 64),
    (6, 128, 128, 512),
    (9, 128, 640, 48),
]


def rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).cuda()


def sides(shape: tuple[int, int, int, int], kind: str) -> Sides:
    examples, tokens, width, other = shape
    if kind == "turned":  # the tokens of a convolution are neighbours
        u = rounding.to_tf32(rows(examples, width, tokens))
        v = rounding.to_tf32(rows(examples, other, tokens, seed=1))
        return Sides(u.mT, v.mT)
    u, v = rows(examples, tokens, width), rows(examples, tokens, other, seed=1)
    if kind == "half":
        return Sides(u.bfloat16(), v.bfloat16())
    return Sides(rounding.to_tf32(u), rounding.to_tf32(v), 1 if width <= other else 2)


def factors_of(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    factors = torch.rand(count, generator=generator, dtype=torch.float64)
    factors[::3] = 0.0 if count > 1 else factors[::3]
    return factors.cuda()


def exact(given: Sides, factors: Tensor) -> Tensor:
    u, v = given.u, given.v
    if given.scaled == 1:
        u = kernels.scale_rows(u, factors, rounded=True)
    if given.scaled == 2:
        v = kernels.scale_rows(v, factors, rounded=True)
    weights = (factors != 0).double() if given.scaled else factors
    return torch.einsum("i,itn,itw->nw", weights, u.double(), v.double()).contiguous()


@pytest.mark.parametrize("kind", ["half", "turned", "tf32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_their_errors_and_their_repair(shape: tuple[int, int, int, int], kind: str) -> None:
    given, factors = sides(shape, kind), factors_of(shape[0])
    expected = exact(given, factors)
    for i in range(0, shape[0], 3) if shape[0] > 1 else ():  # factor zero: whatever is there
        given.u[i] = float("nan")
        given.v[i] = float("inf")
    if kind == "tf32":
        quick = (expected + 1e-4 * torch.randn_like(expected)).float()
    else:
        quick = products.weighted(given, factors.float())
        assert (quick - expected).norm() <= 1e-6 * expected.norm()
        place = torch.empty_like(quick)
        assert products.weighted(given, factors.float(), place) is place or kind == "turned"
        assert torch.equal(place, quick)
    vectors = torch.randn(shape[2], VECTORS, dtype=torch.float64, device="cuda")
    into = torch.zeros(1, dtype=torch.float64, device="cuda")
    products.add_squares(given, factors, quick, vectors, into)
    error = (quick.double() - expected).t() @ vectors
    found = products.mixed(given, factors, vectors).sum(0)
    torch.testing.assert_close(found, vectors.t() @ expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(into[0], error.square().sum(), rtol=1e-6, atol=1e-18)
    spoilt = torch.full_like(quick, 3.0)
    yes, no = (torch.tensor([flag], device="cuda") for flag in (True, False))
    products.repair(given, factors, spoilt, yes)
    assert bool((spoilt == 3.0).all())
    products.repair(given, factors, spoilt, no)
    assert (spoilt - expected).norm() <= 2.0**-23 * expected.norm()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 4), (1000, 100, 60), (37, 130, 10), (70, 1, 200)])
def test_rows_and_their_column(shape: tuple[int, int, int], double: bool) -> None:
    u, v, factors = rows(*shape[:2]), rows(shape[0], shape[2], seed=1), factors_of(shape[0])
    kept = factors != 0
    weighted = u[kept].double() * factors[kept, None]
    expected, column = weighted.t() @ v[kept].double(), weighted.sum(0)
    u[~kept], v[~kept] = float("nan"), float("inf")
    given = factors if double else factors.float()
    total, beside = products.of_rows(u, v, given, double=double, rounded=False)
    loose = 1e-12 if double else 1e-5
    torch.testing.assert_close(total.double(), expected, rtol=loose, atol=loose)
    torch.testing.assert_close(beside.double(), column, rtol=loose, atol=loose)


@pytest.mark.parametrize("clip", [Flat(0.5), Automatic(0.5)])
def test_factors_by_one_kernel_are_those_of_the_rule(clip: Flat | Automatic) -> None:
    parts = torch.rand(3, 300, dtype=torch.float64, device="cuda")
    parts[1, 5], parts[2, 6], parts[:, 7] = float("inf"), float("nan"), 0.0
    real = torch.arange(300, device="cuda") < 290
    found = kernels.clip_norms(parts, real, (rounding.above(11), *clip.numbers, 1 - 2.0**-23))
    norms = parts.norm(dim=0)
    assert bool(((found.norms >= norms) | ~norms.isfinite()).all())
    assert found.finite.tolist() == norms.isfinite().tolist()
    expected = torch.where(real & norms.isfinite(), clip.factors(norms.nan_to_num(1.0)), 0.0)
    torch.testing.assert_close(found.factors, expected, rtol=1e-14, atol=0)
    assert bool((found.factors * norms.nan_to_num(0.0, 0.0) <= 0.5).all())
    assert bool((found.lower.double() <= found.factors).all())


def test_rows_are_measured_in_pairs() -> None:
    u, v = rows(50, 77) * 1e-20, rows(50, 9, seed=1) * 1e15
    u[3, 1] = float("inf")
    above = rounding.above(77), rounding.above(9), rounding.above(3)
    for rounded in (False, True):
        left, right, norms, both = kernels.row_pair(u, v, above, rounded=rounded)
        a, b = (rounding.to_tf32(u), rounding.to_tf32(v)) if rounded else (u, v)
        assert torch.equal(left, a)
        assert torch.equal(right, b)
        exact = a.double().norm(dim=1), b.double().norm(dim=1)
        finite = exact[0].isfinite()
        assert bool((norms >= exact[0])[finite].all())
        assert bool((both >= exact[0] * exact[1])[finite].all())
        torch.testing.assert_close(both[finite], (exact[0] * exact[1])[finite], rtol=1e-4, atol=0)
        assert not bool(both[3].isfinite())


@pytest.mark.parametrize(
    "window",
    [
        kernels.Window((3, 3), (1, 1), (1, 1), (1, 1)),
        kernels.Window((3, 2), (2, 1), (0, 1), (1, 2)),
        kernels.Window((1, 1), (2, 2), (0, 0), (1, 1)),
    ],
)
def test_patches_are_those_of_torch(window: kernels.Window) -> None:
    x = rows(4, 3, 11, 9)
    expected = F.unfold(x, window.size, window.dilation, window.padding, window.stride)
    assert torch.equal(kernels.unfold(x, window), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_rows_that_are_not_kept_are_overwritten(dtype: torch.dtype) -> None:
    x = rows(7, 5, 4001).to(dtype)
    keep = torch.tensor([True, False, True, True, False, True, True], device="cuda")
    expected = x * keep[:, None, None]
    x[~keep] = float("nan")
    kernels.zero_rows(x, keep)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("tokens", [16, 63, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_are_never_too_small(tokens: int, dtype: torch.dtype) -> None:
    from diminuendo.training.clipping import contract

    u, v = rows(6, tokens, 200).to(dtype), rows(6, tokens, 333, seed=1).to(dtype)
    u[1, 1::2], v[1, 1::2] = -u[1, : tokens // 2 * 2 : 2], v[1, : tokens // 2 * 2 : 2]
    size = contract.gram_size(u, v)
    exact = torch.bmm(u.double().mT, v.double()).flatten(1).norm(dim=1)
    bulk = (u.double().norm(dim=2) * v.double().norm(dim=2)).sum(1)
    assert bool((size.norm >= exact).all())
    assert bool((size.terms >= bulk).all())
    assert bool((size.norm <= exact * 1.01 + bulk * 0.02).all())


def test_there_may_be_more_examples_than_a_grid_has_columns() -> None:
    """CUDA counts to 65,535 in all directions but the first."""
    from diminuendo.training.clipping import contract

    shape = 70_000, 2, 64
    u, v = rounding.to_tf32(rows(*shape)), rounding.to_tf32(rows(*shape, seed=1))
    sizes = contract.gram_size(u, v)
    norms = torch.bmm(u.double().mT, v.double()).flatten(1).norm(dim=1)
    assert bool((sizes.norm >= norms).all())
    factors = torch.ones(len(u), dtype=torch.float64, device="cuda")
    vectors = torch.randn(64, VECTORS, dtype=torch.float64, device="cuda")
    given = Sides(u, v)
    found = products.mixed(given, factors, vectors).sum(0)
    torch.testing.assert_close(found, vectors.t() @ exact(given, factors), rtol=1e-9, atol=1e-9)


def test_tokens_that_lie_far_apart_are_found() -> None:
    """Sixteen tokens of one example that are 2²⁸ entries from each other: 8 GiB."""
    from diminuendo.training.clipping import contract

    shape, step = (1, 16, 64), 1 << 28
    if torch.cuda.mem_get_info()[0] < 1 << 34:
        pytest.skip("too little memory")
    u, v = rows(*shape).bfloat16(), rows(*shape, seed=1).bfloat16()
    far = u.new_empty(15 * step + 64).as_strided(shape, (16 * step, step, 1))
    far.copy_(u)
    factors = torch.ones(1, dtype=torch.float64, device="cuda")
    vectors = torch.randn(64, VECTORS, dtype=torch.float64, device="cuda")
    near, given = Sides(u, v), Sides(far, v)
    sizes = contract.gram_size(far, v), contract.gram_size(u, v)
    assert torch.equal(sizes[0].norm, sizes[1].norm)
    found = [products.mixed(pair, factors, vectors).sum(0) for pair in (given, near)]
    assert torch.equal(*found)
    torch.testing.assert_close(
        products.weighted(given, factors.float()), exact(near, factors).float()
    )
    again = torch.zeros(64, 64, device="cuda")
    products.repair(given, factors, again, torch.tensor([False], device="cuda"))
    torch.testing.assert_close(again, exact(near, factors).float())


class Wrong:
    """Quick sums that are off by a little, or by a lot, or no numbers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: type[device.DeviceTerm], off: float
    ) -> None:
        plain = kind.quick_into

        def quick(self: device.DeviceTerm, out: Tensor | None, vectors: Tensor) -> Tensor:
            total: Tensor = plain(self, out, vectors)
            return total.add_(off)

        monkeypatch.setattr(kind, "quick_into", quick)


@pytest.mark.parametrize("off", [0.0, 1e-3, float("nan")])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_a_wrong_sum_of_tokens_is_repaired(
    off: float, half: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the share is so small that float32 could not hold the sum closely enough."""
    Wrong(monkeypatch, device.DeviceProduct, off)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 96), nn.Tanh(), nn.Linear(96, 70)).float().cuda()
    x = rows(12, 32, 80)
    _check_repaired(model, x, half, share)


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_a_wrong_sum_of_patches_is_repaired(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    Wrong(monkeypatch, device.DeviceConvolved, off)
    monkeypatch.setattr(device, "_HELD", 1 << 16)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 128, 3), nn.Tanh(), nn.Conv2d(128, 128, 3)).float().cuda()
    _check_repaired(model, rows(12, 16, 8, 8), half=False)


class Pooled(nn.Module):
    """One query looks at many keys: a single token and many meet in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(72, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x[:, :1], x, x, need_weights=False)[0]
        return found


@pytest.mark.parametrize("half", [False, True])
def test_rows_of_one_parameter_may_be_summed_in_two_ways(half: bool) -> None:
    torch.manual_seed(0)
    _check_repaired(Pooled().float().cuda(), rows(12, 32, 72), half)


def _check_repaired(model: nn.Module, x: Tensor, half: bool, share: float = 1.0) -> None:
    """Certified sums against those of the engine in double precision, on what it was given."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with Engine(model) as engine:
            places = engine.zeros(torch.float32)
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                losses = model(x).float().square().flatten(1).mean(1)
            clip = Flat(0.1)
            values = losses.detach().clone()
            found = engine.clipped_sum(losses, clip, certify=True, share=share, places=places)
            assert engine.checks
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                losses = model(x).float().square().flatten(1).mean(1)
            precise = engine.clipped_sum(losses, clip, certify=True, share=1e-4)
        assert torch.equal(values, losses.detach())
        difference = [
            (a.double() - b).norm() for a, b in zip(found.sums, precise.sums, strict=True)
        ]
        assert float(torch.stack(difference).norm()) <= ALLOWANCE * 0.1 * (share + 1e-4)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

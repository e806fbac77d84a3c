"""The kernel makes the numbers of the CPU, bit for bit."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from diminuendo.errors import DiminuendoError
from diminuendo.training.mechanism import cipher, exact, kernels, normal
from diminuendo.training.mechanism.exact import add_rounded_gaussian
from diminuendo.training.mechanism.grid import Grid

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.available), reason="no CUDA device with Triton"
)

KEYS = (bytes(range(32)), bytes(range(1, 33)))


def test_the_cipher_gives_the_published_block() -> None:
    """RFC 8439, A.1, vector 1: key and nonce zero."""
    words = kernels.keystream(bytes(32), 1024, "cuda").cpu().numpy()
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert words[:8].astype("<i8").tobytes().hex() == expected


def test_the_cipher_gives_the_words_of_the_cpu() -> None:
    words = kernels.keystream(KEYS[0], 2**20, "cuda").cpu().numpy()
    assert np.array_equal(words.view(np.uint64), cipher.keystream(KEYS[0], 2**20))


@pytest.mark.parametrize("size", [0, 1, 7, 1025, 71_010, 5_000_003])
@pytest.mark.parametrize("noise_std", [1.0, 7.3, 1e-12])
def test_the_noise_is_that_of_the_cpu(size: int, noise_std: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sums = torch.randn(size, dtype=torch.float64, generator=generator) * 3 * noise_std
    there = add_rounded_gaussian(sums.cuda(), noise_std, KEYS)
    assert torch.equal(there.cpu(), add_rounded_gaussian(sums.clone(), noise_std, KEYS))


def test_ties_are_settled_alike() -> None:
    """Sums that put every coordinate within 10⁻⁹ of a tie: all of them are refined."""
    grid, size = Grid.of(1.0), 400
    noise = [exact.settle(0.0, grid, KEYS, place) for place in range(size)]
    far = add_rounded_gaussian(torch.zeros(size, dtype=torch.float64), 1.0, KEYS)
    assert far.tolist() == noise
    low = torch.zeros(size, dtype=torch.float64)
    high = torch.full_like(low, grid.spacing)
    for _ in range(60):  # bisect for the sum at which a coordinate's noise changes
        middle = (low + high) / 2
        up = add_rounded_gaussian(middle.clone(), 1.0, KEYS) > far
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)
    for sums in (low, high):
        there = add_rounded_gaussian(sums.cuda(), 1.0, KEYS)
        assert torch.equal(there.cpu(), add_rounded_gaussian(sums.clone(), 1.0, KEYS))


def test_a_sum_that_is_not_finite_is_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(DiminuendoError, match="not finite"):
            add_rounded_gaussian(torch.full((5000,), bad).double().cuda(), 1.0, KEYS)


@pytest.mark.parametrize("divisor", [1.0, 3.0, 1e-3])
def test_parts_of_a_sum_get_the_noise_of_the_whole(divisor: float) -> None:
    sums = torch.randn(5000, dtype=torch.float64) * 20
    expected = add_rounded_gaussian(sums.clone(), 7.3, KEYS) / divisor
    cuda, grid = torch.device("cuda"), Grid.of(7.3)
    order = kernels.sent(kernels.Order.of(grid, KEYS, divisor), cuda)
    out, faults = torch.empty(5000, dtype=torch.float64, device=cuda), kernels.Faults(cuda)
    parts = [part.clone() for part in torch.split(sums.cuda(), [10, 997, 1, 3992])]
    kernels.release(parts, out, order, faults)
    assert torch.equal(out.cpu(), expected)
    single = sums.float().cuda()
    kernels.release([single], single, order, faults)  # in place, and in float32
    exact = add_rounded_gaussian(sums.float().double(), 7.3, KEYS) / divisor
    assert torch.equal(single.cpu(), exact.float())
    assert faults.counts.tolist() == [0, 0]


def _at(words: list[int]) -> tuple[bytes, bytes]:
    """Keys whose first coordinate is far out: found by trying."""
    for number in range(1 << 16):
        key = number.to_bytes(32, "little")
        block = cipher.keystream(key, 1 << 20).view(np.int64)
        found = np.flatnonzero(np.abs(block) < 1 << 38)
        if len(found):
            words.extend(found.tolist())
            return key, bytes(32)
    raise AssertionError


def test_tails_are_settled_alike() -> None:
    """Coordinates of which 64 bits say too little: one in 30 million, searched for."""
    places: list[int] = []
    keys = _at(places)
    size = max(places) + 1
    sums = torch.zeros(size, dtype=torch.float64)
    there = add_rounded_gaussian(sums.cuda(), 1.0, keys)
    assert torch.equal(there.cpu(), add_rounded_gaussian(sums, 1.0, keys))


def test_the_tail_of_the_normal_distribution_has_thirty_digits() -> None:
    """Φ(−z) in pairs of doubles against bounds in 50 digits, 2⁻⁹⁸ apart."""
    import triton
    import triton.language as tl

    from diminuendo.training.mechanism import settling

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def below(z, low, out, knots, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        high, rest = settling._below(
            tl.load(z + at), tl.load(low + at), knots, STEPS=16, KNOTS=209, TERMS=30
        )
        tl.store(out + at, high)
        tl.store(out + SIZE + at, rest)

    generator = torch.Generator().manual_seed(2)
    z = torch.rand(512, dtype=torch.float64, generator=generator) * 13
    z[:3] = torch.tensor([0.0, 1 / 32, 12.97])
    low = (torch.rand(512, dtype=torch.float64, generator=generator) - 0.5) * 2.0**-53
    out = torch.empty(1024, dtype=torch.float64, device="cuda")
    knots = settling._knots(out.device)
    below[(1,)](z.cuda(), low.cuda(), out, knots, SIZE=512, enable_fp_fusion=False)
    highs, rests = torch.split(out.cpu(), 512)
    for a, b, high, rest in zip(
        z.tolist(), low.tolist(), highs.tolist(), rests.tolist(), strict=True
    ):
        bounds = normal.below(-(Fraction(a) + Fraction(b)), 90)
        found = Fraction(high) + Fraction(rest)
        assert abs(found - bounds[0]) <= bounds[1] * Fraction(1, 2**98)


@pytest.mark.parametrize("zeros", [0, 40, 100, 130, 200])
def test_all_256_bits_of_a_coordinate_are_read(zeros: int) -> None:
    """U, or 1 − U, after so many zeros, to a relative error of 2⁻¹⁰⁰."""
    import triton
    import triton.language as tl

    from diminuendo.training.mechanism import settling

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def tail(words, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        first, second = tl.load(words + at), tl.load(words + SIZE + at)
        third, fourth = tl.load(words + 2 * SIZE + at), tl.load(words + 3 * SIZE + at)
        upper = tl.where(first < 0, 1.0, 0.0)
        high, low = settling._tail(first, second, third, fourth, upper)
        tl.store(out + at, high)
        tl.store(out + SIZE + at, low)

    generator = np.random.default_rng(zeros)
    numbers = [int.from_bytes(generator.bytes(32), "big") >> zeros for _ in range(64)]
    numbers[1::2] = [2**256 - 1 - number for number in numbers[1::2]]
    words = [[number >> (192 - 64 * k) & (2**64 - 1) for number in numbers] for k in range(4)]
    given = torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64)).cuda()
    out = torch.empty(2, 64, dtype=torch.float64, device="cuda")
    tail[(1,)](given, out, SIZE=64, enable_fp_fusion=False)
    for number, high, low in zip(numbers, *out.tolist(), strict=True):
        nearer = Fraction(min(number, 2**256 - 1 - number), 2**256)
        assert abs(Fraction(high) + Fraction(low) - nearer) <= nearer * Fraction(1, 2**100)


def test_what_is_sent_arrives_although_nobody_waits() -> None:
    """Keys behind half a second of other work: memory on the host is not used again before."""
    cuda = torch.device("cuda")
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]
    found = [kernels.sent(bytes([number]) * 136, cuda) for number in range(200)]
    for number, words in enumerate(found):
        assert words.cpu().numpy().tobytes() == bytes([number]) * 136


def test_vectors_of_checks_are_normal() -> None:
    """2²⁴ numbers: mean, variance, fourth moment, and numbers beyond 5 and 5.5 deviations, each
    within 5 standard errors."""
    size = 1 << 24
    z = kernels.normal(size, kernels.sent(bytes(range(32)), torch.device("cuda")))
    assert abs(float(z.mean())) < 5 / size**0.5
    assert abs(float((z * z).mean()) - 1) < 5 * (2 / size) ** 0.5
    assert abs(float((z**4).mean()) - 3) < 5 * (96 / size) ** 0.5
    for edge, chance in ((5.0, 5.733e-7), (5.5, 3.798e-8)):
        expected = chance * size
        assert abs(int((z.abs() > edge).sum()) - expected) < 5 * expected**0.5 + 5
    assert bool(z.isfinite().all())


def test_fast_noise_is_drawn_anew_for_each_part_and_seed() -> None:
    """10⁶ numbers each: deviation within 5 standard errors, and no two parts or seeds alike."""
    cuda = torch.device("cuda")
    found = []
    for seed in (5, 6):
        order = kernels.sent(struct.pack("<2dq", 2.0, 4.0, seed), cuda)
        parts = [torch.zeros(n, device=cuda) for n in (333_333, 1, 666_667)]
        kernels.release_fast(parts, parts, order)
        flat = torch.cat(parts)
        assert abs(float(flat.std()) - 0.5) < 5 * 0.5 / (2e6) ** 0.5
        assert abs(float(flat.mean())) < 5 * 0.5 / 1e3
        assert len(torch.unique(flat)) > 0.9 * len(flat)
        found.append(flat)
    assert abs(float((found[0] * found[1]).mean())) < 5 * 0.25 / 1e3


@pytest.mark.slow
def test_a_hundred_million_in_the_right_cells() -> None:
    """Mean, variance and the tail beyond 5 deviations: each within 5 standard errors."""
    size = 100_000_000
    z = add_rounded_gaussian(torch.zeros(size, dtype=torch.float64, device="cuda"), 1.0, KEYS)
    assert abs(float(z.mean())) < 5 / size**0.5
    assert abs(float((z * z).mean()) - 1) < 5 * (2 / size) ** 0.5
    expected = 5.733e-7 * size
    assert abs(int((z.abs() > 5).sum()) - expected) < 5 * expected**0.5 + 1

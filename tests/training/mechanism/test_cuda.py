"""The kernel makes the numbers of the CPU, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diminuendo.errors import DiminuendoError
from diminuendo.training.mechanism import cipher, exact, kernels
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
    places, _ = kernels.add_rounded_gaussian(high.cuda(), grid, KEYS[0])
    assert places == list(range(size))
    for sums in (low, high):
        there = add_rounded_gaussian(sums.cuda(), 1.0, KEYS)
        assert torch.equal(there.cpu(), add_rounded_gaussian(sums.clone(), 1.0, KEYS))


def test_a_sum_that_is_not_finite_is_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(DiminuendoError, match="not finite"):
            add_rounded_gaussian(torch.full((5000,), bad).double().cuda(), 1.0, KEYS)


@pytest.mark.slow
def test_a_hundred_million_in_the_right_cells() -> None:
    """Mean, variance and the tail beyond 5 deviations: each within 5 standard errors."""
    size = 100_000_000
    z = add_rounded_gaussian(torch.zeros(size, dtype=torch.float64, device="cuda"), 1.0, KEYS)
    assert abs(float(z.mean())) < 5 / size**0.5
    assert abs(float((z * z).mean()) - 1) < 5 * (2 / size) ** 0.5
    expected = 5.733e-7 * size
    assert abs(int((z.abs() > 5).sum()) - expected) < 5 * expected**0.5 + 1

"""The noise as statistics sees it. Keys are fixed, so that a test passes always or never; the
false-alarm rates are those of picking such a key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from diminuendo.training.mechanism import cipher
from diminuendo.training.mechanism.exact import add_rounded_gaussian
from diminuendo.training.mechanism.grid import Grid

KEYS = (b"distribution of the noise, key 1", b"distribution of the noise, key 2")
SIZE = 2_000_000
ALARM = 1e-6


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    """Noise of deviation 1 in units of the grid, on sums that are not whole numbers."""
    grid = Grid.of(1.0)
    total = torch.full((SIZE,), 0.3 * grid.spacing, dtype=torch.float64)
    noisy = add_rounded_gaussian(total, 1.0, KEYS).numpy() / grid.spacing
    assert (noisy == np.round(noisy)).all()
    return noisy


def probabilities(edges: np.ndarray) -> np.ndarray:
    """Of K ≤ edge, for whole edges and the sum 0.3."""
    return stats.norm.cdf((edges + 0.5 - 0.3) / Grid.of(1.0).deviation)


def test_counts_in_cells(whole: np.ndarray) -> None:
    """Chi-square on about 400 cells of nearly equal probability, tails included: one in 10⁶."""
    edges = np.unique(np.round(stats.norm.ppf(np.arange(1, 400) / 400) * Grid.of(1.0).deviation))
    expected = np.diff(np.concatenate([[0.0], probabilities(edges), [1.0]])) * SIZE
    counts = np.bincount(np.searchsorted(edges, whole), minlength=len(expected))
    assert stats.chisquare(counts, expected).pvalue > ALARM


def test_single_cells_around_zero(whole: np.ndarray) -> None:
    """Chi-square on 601 single points of the grid: one in 10⁶."""
    points = np.arange(-301, 301)
    share = np.diff(probabilities(points))
    counts = np.array([(whole == k).sum() for k in points[1:]])
    rest = SIZE - counts.sum()
    assert (
        stats.chisquare([*counts, rest], [*(share * SIZE), (1 - share.sum()) * SIZE]).pvalue > ALARM
    )


def test_the_whole_curve(whole: np.ndarray) -> None:
    """Kolmogorov and Smirnov: one in 10⁶."""
    values, counts = np.unique(whole, return_counts=True)
    distance = np.abs(np.cumsum(counts) / SIZE - probabilities(values)).max()
    assert distance * math.sqrt(SIZE) < stats.kstwobign.isf(ALARM)


@pytest.mark.parametrize(
    ("power", "mean", "spread"), [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]
)
def test_moments(whole: np.ndarray, power: int, mean: float, spread: float) -> None:
    """Each within 5 standard errors: one in a million."""
    z = (whole - 0.3) / Grid.of(1.0).deviation
    assert abs((z**power).mean() - mean) < 5 * math.sqrt(spread / SIZE)


@pytest.mark.parametrize("lag", [1, 2, 4, 8, 16, 1024, 32768])
def test_pairs(whole: np.ndarray, lag: int) -> None:
    """Chi-square on 32 × 32 cells of (j, j + lag), and on their squares' sum: one in 10⁶ each."""
    z = (whole - 0.3) / Grid.of(1.0).deviation
    pairs = z[: SIZE // (2 * lag) * 2 * lag].reshape(-1, 2, lag)
    one, other = pairs[:, 0].ravel(), pairs[:, 1].ravel()
    cells = np.minimum((stats.norm.cdf(one) * 32).astype(int), 31) * 32
    cells += np.minimum((stats.norm.cdf(other) * 32).astype(int), 31)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > ALARM
    radius = np.exp(-(one**2 + other**2) / 2)
    counts = np.bincount((radius * 256).astype(int), minlength=256)
    assert stats.chisquare(counts).pvalue > ALARM


@pytest.mark.parametrize("bit", [0, 3, 8])
def test_rank_over_two_elements(whole: np.ndarray, bit: int) -> None:
    """Ranks of 64 × 64 matrices of one bit of the grid's numbers: chi-square, one in 10⁶.

    The chances of ranks 64, 63 and less: 0.2888, 0.5776, 0.1336.
    """
    bits = (whole.astype(np.int64) >> bit) & 1
    rows = np.packbits(bits[: SIZE // 4096 * 4096].astype(np.uint8)).view(">u8").tolist()
    ranks = [rank(rows[i : i + 64]) for i in range(0, len(rows), 64)]
    counts = [ranks.count(64), ranks.count(63), sum(r < 63 for r in ranks)]
    share = np.array([0.28879, 0.57758, 0.13363])
    assert stats.chisquare(counts, share / share.sum() * len(ranks)).pvalue > ALARM


def rank(rows: list[int]) -> int:
    leading: dict[int, int] = {}
    for row in rows:
        while row:
            top = row.bit_length()
            if top not in leading:
                leading[top] = row
                break
            row ^= leading[top]
    return len(leading)


@pytest.mark.slow
def test_a_thousand_million() -> None:
    """10⁹ numbers in about 800 cells out to 5 deviations, and the tails beyond 5, 5.5, 5.77, 6, 6.5
    and 7 by their counts: chi-square and Poisson, one in 10⁶ each."""
    grid, size, rounds = Grid.of(1.0), 10_000_000, 100
    reach = 16 * 1024
    counts = np.zeros(2 * reach + 1, np.int64)
    for i in range(rounds):
        keys = (i.to_bytes(32, "little"), (i + rounds).to_bytes(32, "little"))
        noisy = add_rounded_gaussian(torch.zeros(size, dtype=torch.float64), 1.0, keys)
        steps = noisy.div_(grid.spacing).to(torch.int64).add_(reach)
        counts += torch.bincount(steps, minlength=2 * reach + 1).numpy()
    total = size * rounds
    assert counts.sum() == total
    upper = stats.norm.sf((np.arange(reach + 1) + 0.5) / grid.deviation)
    below = np.concatenate([upper[reach - 1 :: -1], 1 - upper])  # P(K ≤ k) for k = −reach … reach
    edges = np.unique(np.round(np.linspace(-5, 5, 800) * grid.deviation).astype(int)) + reach
    sums = np.concatenate([[0], np.cumsum(counts)[edges], [total]])
    expected = np.concatenate([[0.0], below[edges], [1.0]]) * total
    assert stats.chisquare(np.diff(sums), np.diff(expected)).pvalue > ALARM
    for far in (5, 5.5, 5.77, 6, 6.5, 7):
        k = math.floor(far * grid.deviation)
        seen = counts[: reach - k].sum() + counts[reach + k + 1 :].sum()
        mean = 2 * upper[k] * total
        assert stats.poisson.cdf(seen, mean) > ALARM / 2, far
        assert stats.poisson.sf(seen - 1, mean) > ALARM / 2, far


@pytest.mark.slow
def test_tails_given_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 numbers, all with a first word below 2³⁰: beyond 6.4 deviations, where every one is
    decided by refinement; about 440 lie beyond 7. Kolmogorov and Smirnov, one in 10⁶."""
    size, grid = 20_000, Grid.of(1.0)
    made = cipher.keystream

    def tail(key: bytes, size: int, *, first: int = 0, nonce: int = 0) -> np.ndarray:
        words = made(key, size, first=first, nonce=nonce)
        return words >> np.uint64(34) if key == KEYS[0] else words

    monkeypatch.setattr(cipher, "keystream", tail)
    z = -add_rounded_gaussian(torch.zeros(size, dtype=torch.float64), 1.0, KEYS).numpy()
    assert (z > 7).sum() > 300
    upper = (np.sort(z) / grid.spacing - 0.5) / grid.deviation
    conditional = 1 - stats.norm.sf(upper) / 2.0**-34
    gap = np.abs(np.searchsorted(np.sort(z), np.sort(z)) / size - conditional).max()
    assert gap * math.sqrt(size) < stats.kstwobign.isf(ALARM)

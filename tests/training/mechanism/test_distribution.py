"""The noise as statistics sees it. Keys are fixed, so that a test passes always or never; the
false-alarm rates are those of picking such a key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from diminuendo.training.mechanism.exact import Grid, add_rounded_gaussian

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

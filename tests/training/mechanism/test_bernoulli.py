"""Coins: the right probability to the last bit, each alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from diminuendo.training.mechanism import bernoulli, cipher

KEY = bytes(range(32))


def with_words(monkeypatch: pytest.MonkeyPatch, first: int, later: list[int]) -> None:
    """Every coin begins with the word `first`; a coin's own stream is `later`, then zeros."""

    start = first

    def fixed(_: bytes, size: int, *, first: int = 0, nonce: int = 0) -> object:
        if nonce == 0:
            return np.full(size, start, np.uint64)
        padded = np.array([*later, *[0] * 64], np.uint64)
        return padded[first : first + size]

    monkeypatch.setattr(cipher, "keystream", fixed)


@pytest.mark.parametrize("rate", [0.5, 0.25, 1 / 3, 0.1, 2**-64, 1 - 2**-53])
def test_the_threshold_is_exact(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """The largest word below the rate is in, the smallest not below it is out."""
    bound = int(math.ldexp(rate, 64))
    assert bound == math.ldexp(rate, 64), "all bits of these rates are among the first 64"
    for word, inside in ((bound - 1, True), (bound, False), (0, True), (2**64 - 1, False)):
        with_words(monkeypatch, word, [2**64 - 1] * 8)
        assert (bernoulli.chosen(3, rate, KEY).size == 3) is inside


def test_bits_after_the_first_64_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = math.ldexp(1 + 2**-52, -60)  # 2⁻⁶⁰ + 2⁻¹¹²: first word 16, second word 2¹⁶
    for second, inside in ((2**16 - 1, True), (2**16, False), (2**16 + 1, False)):
        with_words(monkeypatch, 16, [second])
        assert (bernoulli.chosen(2, rate, KEY).size == 2) is inside
    smallest = math.ldexp(1.0, -1074)
    with_words(monkeypatch, 0, [])  # fifteen words of zeros, then the bit 2⁻¹⁰⁷⁴
    assert bernoulli.chosen(2, smallest, KEY).size == 2
    with_words(monkeypatch, 0, [0] * 15 + [2**14])
    assert bernoulli.chosen(2, smallest, KEY).size == 0


def test_counts_positions_and_pairs() -> None:
    """Chi-square of the sum, the halves and neighbours; a false alarm in 10⁵ keys, each."""
    n, rate = 2_000_000, 0.137
    taken = np.zeros(n, bool)
    taken[bernoulli.chosen(n, rate, KEY)] = True
    for part in (taken, taken[: n // 2], taken[1::2], taken[1:] & taken[:-1]):
        p = rate if part.size != n - 1 else rate**2
        spread = math.sqrt(part.size * p * (1 - p) * (1.5 if part.size == n - 1 else 1))
        assert abs(part.sum() - part.size * p) < stats.norm.isf(5e-6) * spread


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 10), (0.0, 0)])
def test_certain_coins(rate: float, expected: int) -> None:
    assert bernoulli.chosen(10, rate, KEY).size == expected


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bernoulli.chosen(10_000, 0.3, KEY)
    monkeypatch.setattr(bernoulli, "_BLOCK", 1024)
    assert np.array_equal(bernoulli.chosen(10_000, 0.3, KEY), whole)

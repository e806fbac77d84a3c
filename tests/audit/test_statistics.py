"""Bounds from canaries' scores: their coverage, and their limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from diminuendo.audit import statistics


def drawn(
    runs: int, canaries: int, distance: float, seed: int
) -> tuple[NDArray[np.float64], statistics.Flags]:
    generator = np.random.default_rng(seed)
    present = generator.integers(2, size=(runs, canaries)).astype(bool)
    noise = generator.normal(size=(runs, canaries))
    return noise + distance * present + generator.normal(size=(runs, 1)), present


@pytest.mark.parametrize(
    ("runs", "canaries", "distance"), [(1, 60, 0.5), (5, 30, 3.0), (2, 200, 0.1)]
)
def test_the_effect_is_below_its_bound_as_rarely_as_stated(
    runs: int, canaries: int, distance: float
) -> None:
    """400 audits at error 0.1: more than 75 failures have probability below 1e-6."""
    bounds = [statistics.effect(*drawn(runs, canaries, distance, seed), 0.1) for seed in range(400)]
    assert sum(bound.lower > distance for bound in bounds) <= 75
    assert np.mean([bound.estimate for bound in bounds]) == pytest.approx(distance, abs=0.1)


def test_without_noise_the_effect_is_infinite() -> None:
    present = np.array([[True, False] * 20])
    assert statistics.effect(present * 1.0, present, 0.05).lower == math.inf


def test_one_group_alone_says_nothing() -> None:
    present = np.ones((1, 30), dtype=bool)
    assert statistics.effect(np.zeros((1, 30)), present, 0.05).lower == -math.inf


def test_guesses_of_randomised_response_stay_within_the_theorem() -> None:
    """Randomised response at ε reaches the bound: a smaller ε is refuted as rarely as stated."""
    epsilon, error = 1.0, 0.1
    refuted = 0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        present = generator.integers(2, size=(1, 200)).astype(bool)
        truthful = generator.random((1, 200)) < 1 / (1 + math.exp(-epsilon))
        scores = np.where(present == truthful, 1.0, -1.0)
        bound = statistics.any_mechanism(scores, present, guesses=200, delta=0.0, error=error)
        refuted += bound > epsilon
    assert refuted <= 65  # 300 at 0.1: above that with probability below 1e-6
    assert refuted > 0


def test_guess_probability_falls_with_right_guesses_and_is_exact_without_delta() -> None:
    values = [statistics.guess_probability(100, 100, right, 0.5, 0.0) for right in range(101)]
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert values[60] == pytest.approx(stats.binom.sf(59, 100, 1 / (1 + math.exp(-0.5))))
    assert statistics.guess_probability(100, 100, 60, 0.5, 1e-3) > values[60]


def test_shared_noise_is_told_from_independent_noise() -> None:
    generator = np.random.default_rng(5)
    noise = generator.normal(size=(2000, 4))
    assert statistics.correlated(noise, 1e-6) is None
    noise[:, 1] += 0.5 * noise[:, 0]
    assert statistics.correlated(noise, 1e-6) == pytest.approx(0.45, abs=0.1)

"""From canaries' scores to lower bounds on what was leaked, each with its confidence.

A score is a number per canary; those of present canaries are larger. Two kinds of bound:

* `effect`: how far the scores of present and absent canaries lie apart, in standard deviations of
  the absent ones. For Gaussian noise this is the mechanism's own parameter (μ for full batches), so
  the bound is tight. It assumes independent Gaussian noise of one unknown scale.
* `any_mechanism`: by how many canaries' presence can be guessed. Holds for every mechanism,
  however its canaries influence each other (Steinke, Nasr and Jagielski 2023), and is much looser.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from diminuendo._validate import Vector

Flags = NDArray[np.bool_]
NOISE_SHARE = 0.25
"""The share of an error probability that goes to the noise's scale; the rest to the distance."""


class Effect(NamedTuple):
    """A standardised distance between present and absent canaries: the estimate, and a number
    that the true one is below only with the error probability that was asked for."""

    estimate: float
    lower: float


def effect(scores: Vector, present: Flags, error: float) -> Effect:
    """The distance for scores of shape (runs, canaries); every run has a level of its own.

    The noise's scale is bounded by the χ² law of the absent canaries' scores, the distance by the
    normal law, and the two error probabilities add up to `error`.
    """
    means = {which: _means(scores, present == which) for which in (True, False)}
    counts = {which: (present == which).sum(axis=1) for which in (True, False)}
    usable = (counts[True] > 0) & (counts[False] > 1)
    if not usable.any():
        return Effect(0.0, -math.inf)
    spread = {which: _squares(scores, present == which, means[which]) for which in (True, False)}
    degrees = float((counts[False] - 1)[usable].sum())
    variance = float(spread[False][usable].sum()) / degrees
    if variance == 0:
        return Effect(math.inf, math.inf)
    own = max(float((counts[True] - 1)[usable].sum()), 1.0)
    variance_present = max(float(spread[True][usable].sum()) / own, variance)
    per_run = variance_present / counts[True][usable] + variance / counts[False][usable]
    weight = 1 / per_run
    gap = float(np.sum(weight * (means[True] - means[False])[usable]) / weight.sum())
    gap_error = math.sqrt(1 / float(weight.sum()))
    most_noise = math.sqrt(variance * degrees / float(stats.chi2.ppf(NOISE_SHARE * error, degrees)))
    least_gap = gap - float(stats.norm.isf((1 - NOISE_SHARE) * error)) * gap_error
    noise = most_noise if least_gap > 0 else math.sqrt(variance)
    return Effect(gap / math.sqrt(variance), least_gap / noise)


def _means(scores: Vector, chosen: Flags) -> Vector:
    return np.asarray((scores * chosen).sum(axis=1) / np.maximum(chosen.sum(axis=1), 1))


def _squares(scores: Vector, chosen: Flags, means: Vector) -> Vector:
    return np.asarray((((scores - means[:, None]) * chosen) ** 2).sum(axis=1))


def any_mechanism(
    scores: Vector, present: Flags, *, guesses: int, delta: float, error: float
) -> float:
    """The ε below which no (ε, δ)-private mechanism allows so many right guesses, but with `error`.

    The canaries with the largest scores are guessed present, those with the smallest absent,
    `guesses` in all (fixed in advance); of the others nothing is said.
    """
    flat, truth = scores.ravel(), present.ravel()
    half = min(max(guesses // 2, 1), flat.size // 2)
    order = np.argsort(flat, kind="stable")
    right = int(truth[order[-half:]].sum() + (~truth[order[:half]]).sum())
    low, high = 0.0, 40.0
    if guess_probability(flat.size, 2 * half, right, 0.0, delta) > error:
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        refuted = guess_probability(flat.size, 2 * half, right, middle, delta) <= error
        low, high = (middle, high) if refuted else (low, middle)
    return low


def guess_probability(
    canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
    """An upper bound on the probability that an (ε, δ)-private mechanism lets anybody guess
    `right` of `guesses` or more (Steinke, Nasr and Jagielski 2023, Theorem 5.2)."""
    correct = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, correct))
    reach = min(right, 100 + int(20 * math.sqrt(guesses)))
    below = np.cumsum(stats.binom.pmf(right - np.arange(1, reach + 1), guesses, correct))
    slope = float(np.max(below / np.arange(1, reach + 1))) if right else 0.0
    if reach < right:
        slope = max(slope, 1 / reach)  # a sum of probabilities is at most 1
    return min(tail + 2 * canaries * delta * slope, 1.0)


def best_guesses(canaries: int, distance: float, delta: float, error: float) -> int:
    """How many guesses promise the largest bound where scores are `distance` apart (Gaussian)."""
    best, promised = 2, -1.0
    for share in np.geomspace(1e-3, 1.0, 12):
        half = max(int(share * canaries / 2), 1)
        cut = _quantile_of_mixture(half / canaries, distance)
        hit = float(stats.norm.sf(cut - distance) / 2) / (half / canaries)
        right = int(2 * half * min(hit, 1.0))
        low, high = 0.0, 20.0
        for _ in range(12):
            middle = (low + high) / 2
            refuted = guess_probability(canaries, 2 * half, right, middle, delta) <= error
            low, high = (middle, high) if refuted else (low, middle)
        if low > promised:
            best, promised = 2 * half, low
    return best


def _quantile_of_mixture(upper: float, distance: float) -> float:
    """Above which a share `upper` of an even mixture of N(0, 1) and N(distance, 1) lies."""
    low, high = -40.0, 40.0 + distance
    for _ in range(80):
        middle = (low + high) / 2
        above = (stats.norm.sf(middle) + stats.norm.sf(middle - distance)) / 2
        low, high = (middle, high) if above > upper else (low, middle)
    return (low + high) / 2


def learned_direction(parts: Vector, present: Flags) -> Vector:
    """Fisher's discriminant of absent and present canaries, for parts of shape (canaries, parts).

    Finds what a plan's own weights cannot: noise that one step shares with another.
    """
    absent = parts[~present]
    gap = parts[present].mean(axis=0) - absent.mean(axis=0)
    covariance = np.atleast_2d(np.cov(absent, rowvar=False))
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 1e-10 * max(float(values[-1]), 1e-300))
    return np.asarray(vectors @ ((vectors.T @ gap) / values))


def correlated(parts: Vector, error: float) -> float | None:
    """The largest correlation between columns of absent canaries' parts, if it is no accident.

    None where all are below what independent Gaussian columns exceed with probability `error`
    (by Fisher's transformation and a union bound).
    """
    rows, columns = parts.shape
    if columns < 2 or rows < 10:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):  # columns without any noise
        matrix = np.corrcoef(parts, rowvar=False)
    pairs = columns * (columns - 1) / 2
    limit = math.tanh(float(stats.norm.isf(error / (2 * pairs))) / math.sqrt(rows - 3))
    matrix = np.where(np.isfinite(matrix), matrix, 0.0)
    np.fill_diagonal(matrix, 0.0)
    largest = float(matrix.flat[int(np.abs(matrix).argmax())])
    return largest if abs(largest) > limit else None

"""Means with intervals, paired differences, and how much data a gain is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from diminuendo import _validate


class Interval(NamedTuple):
    """A mean, and the half-width of its 95% interval (Student's t)."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half:.4f}"


def interval(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """The mean of the finite values; without two of them there is no interval."""
    given = np.asarray(values, dtype=np.float64)
    sound = given[np.isfinite(given)]
    if sound.size == 0:
        return Interval(math.nan, math.nan)
    if sound.size == 1:
        return Interval(float(sound[0]), math.inf)
    quantile = float(stats.t.ppf((1 + level) / 2, sound.size - 1))
    return Interval(
        float(sound.mean()), quantile * float(sound.std(ddof=1)) / math.sqrt(sound.size)
    )


def paired(values: ArrayLike, others: ArrayLike) -> Interval:
    """The mean difference of runs that share seed, start and sample."""
    one, other = np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64)
    _validate.same_length("values", one, "others", other)
    return interval(one - other)


def examples_needed(
    examples: Sequence[int], reached: Sequence[float], target: float
) -> float | None:
    """How many examples reach the target, between grid points on a logarithmic scale of N.

    None where the grid does not show it: the target lies below its first or above its last value.
    """
    logs, values = np.log(np.asarray(examples, dtype=np.float64)), np.asarray(reached)
    for k in range(len(values) - 1):
        low, high = values[k], values[k + 1]
        if low <= target <= high and high > low:
            share = (target - low) / (high - low)
            return float(np.exp(logs[k] + share * (logs[k + 1] - logs[k])))
    return None

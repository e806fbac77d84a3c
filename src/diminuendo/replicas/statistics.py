"""Means over runs with intervals, paired differences, and how many examples a gain is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from diminuendo import _validate


class Interval(NamedTuple):
    """A mean, and the half-width of its confidence interval (Student's t, 95% by default)."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half:.4f}"

    def signed(self) -> str:
        """The same text with the mean's sign, for differences."""
        return f"{self.mean:+.4f} ± {self.half:.4f}"


def interval(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """The mean of the finite values, with its interval at `level`, in (0, 1).

    The half-width is infinite for one finite value, and everything is NaN for none.
    """
    array = np.asarray(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    if finite.size == 0:
        return Interval(math.nan, math.nan)
    if finite.size == 1:
        return Interval(float(finite[0]), math.inf)
    quantile = float(stats.t.ppf((1 + level) / 2, finite.size - 1))
    return Interval(
        float(finite.mean()), quantile * float(finite.std(ddof=1)) / math.sqrt(finite.size)
    )


def paired(values: ArrayLike, others: ArrayLike) -> Interval:
    """The mean of values − others, with its interval, for runs in pairs that share their seeds."""
    one, other = np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64)
    _validate.same_length("values", one, "others", other)
    return interval(one - other)


def examples_needed(
    examples: Sequence[int], reached: Sequence[float], target: float
) -> float | None:
    """How many examples reach the target, interpolated on a logarithmic scale of N.

    None where the target lies outside the values `reached` with these numbers of examples.
    """
    logs, values = np.log(np.asarray(examples, dtype=np.float64)), np.asarray(reached)
    for k in range(len(values) - 1):
        low, high = values[k], values[k + 1]
        if low <= target <= high and high > low:
            share = (target - low) / (high - low)
            return float(np.exp(logs[k] + share * (logs[k + 1] - logs[k])))
    return None

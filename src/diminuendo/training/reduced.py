"""A mean or a sum over examples, known by the losses before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

Kind = Literal["mean", "sum"]


@dataclass(frozen=True)
class Reduced:
    """The losses behind a mean or a sum over examples.

    losses   one for each example, shape (N,)
    kind     which of the two it is
    numbers  the constants by which the loop multiplied it, in order
    as_mean  the same as a mean, where a sum was divided by a number that is also that of the
             examples: which of the two was meant, the number cannot tell
    """

    losses: Tensor
    kind: Kind
    numbers: tuple[float, ...] = ()
    as_mean: Reduced | None = None

    def as_kind(self, kind: Kind) -> Reduced | None:
        """This, if it is (or can be read as) a reduction of the kind; else None."""
        return self if self.kind == kind else self.as_mean

    def plus(self, other: Reduced) -> Reduced | None:
        """The sum with another over the same examples; None where the two do not go together."""
        if self.losses.shape != other.losses.shape:
            return None
        sums = self._added(other, "sum") if self.kind == other.kind == "sum" else None
        means = self._added(other, "mean")
        return means if sums is None else replace(sums, as_mean=means)

    def _added(self, other: Reduced, kind: Kind) -> Reduced | None:
        mine, theirs = self.as_kind(kind), other.as_kind(kind)
        if mine is None or theirs is None:
            return None
        return Reduced(mine.losses + theirs.losses, kind, (*mine.numbers, *theirs.numbers))

    def times(self, number: float) -> Reduced:
        """A multiple by a constant."""
        as_mean = None if self.as_mean is None else self.as_mean.times(number)
        numbers = (*self.numbers, float(number))
        return Reduced(self.losses * number, self.kind, numbers, as_mean)

    def over(self, number: float) -> Reduced:
        """The quotient by a constant that is not 0."""
        if self.kind == "sum" and self.as_mean is None and number == len(self.losses):
            as_mean: Reduced | None = replace(self, kind="mean")
        else:
            as_mean = None if self.as_mean is None else self.as_mean.over(number)
        numbers = (*self.numbers, 1 / float(number))
        return Reduced(self.losses / number, self.kind, numbers, as_mean)


def is_number(part: Any) -> bool:
    """Whether it is a finite number of Python's or numpy's, which has no gradient."""
    plain = isinstance(part, (int, float, np.number)) and not isinstance(part, bool)
    return plain and bool(np.isfinite(part))

"""How many gradients float32 may add up before float64 goes on (docs/rounding.md, lemmas 7, 8)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from diminuendo.training.clipping.rounding import DOUBLE, gamma, unit

TAME = 2.0**-60, 2.0**60
"""Clip bounds, and factors that are not zero, for which float32 neither over- nor underflows."""
_LONG = 2.0**20
"""Longest rows of both sides of a product for which the same is true."""
# What adding up all stretches in float64 may take beside the error of one.
_ASIDE = 2.0**-11


class Stretch(NamedTuple):
    """So many gradients at a time; with ``placed`` examples, only one stretch of them counts.

    A factor is rounded, its products are, and as many sums as there are gradients: the error is
    ``gamma(length + 2)`` times the sizes of what is added up.
    """

    length: int
    unit: float
    placed: bool

    @classmethod
    def of(cls, like: Tensor, error: float, placed: bool) -> Stretch:
        """The longest for rows of this number and type whose error is allowed; it may be 0."""
        return cls(_longest(len(like), unit(like), error, placed), unit(like), placed)

    def errors(self, examples: int) -> tuple[float, float]:
        """A term's ``error`` and its ``stretch_error``."""
        in_double = _in_double(examples, self.length)
        rough = gamma(self.length + 2, self.unit)
        return (in_double, rough * self.length) if self.placed else (rough + in_double, 0.0)


@lru_cache(maxsize=64)
def _longest(examples: int, rough: float, error: float, placed: bool) -> int:
    each = error / examples
    length = math.floor(each / (rough * (1 + each))) - 2
    if placed:
        length = max(length, math.isqrt(math.floor(error / rough)))
        while length > 0 and gamma(length + 2, rough) * min(length, examples) > error:
            length -= 1
        if length > 0 and _in_double(examples, length) * examples > error * _ASIDE:
            length = 0
    return max(0, min(examples, length))


def out_of_range(factors: Tensor, longest: Tensor | None = None) -> Tensor | None:
    """Which examples float32 has not the range for, whatever the others are; None where it has it
    for all. ``longest`` are lengths of the rows of both sides of a product."""
    low, high = TAME
    lowest, highest = torch.aminmax(factors)
    tame = low <= lowest.item() and highest.item() <= high
    if tame and (longest is None or longest.max().item() <= _LONG):
        return None
    apart = factors < low
    if longest is not None:
        apart |= (factors > high) | (longest > _LONG)
    apart &= factors > 0
    return apart if bool(apart.any()) else None


def _in_double(examples: int, length: int) -> float:
    """The relative error of adding up the stretches in float64."""
    return DOUBLE * (examples // length + 8)

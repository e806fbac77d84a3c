"""The grid of the released numbers: public, fine beside the noise, and a power of two."""

from __future__ import annotations

import math
from typing import NamedTuple

from diminuendo.errors import InputError
from diminuendo.training.mechanism import table

GRID = 1024
"""Cells of the grid in one standard deviation, at least: rounding adds less than one ten-millionth
to the variance."""


class Grid(NamedTuple):
    """A power of two, and the deviation of the noise in its units."""

    spacing: float
    deviation: float

    @classmethod
    def of(cls, noise_std: float) -> Grid:
        """The grid for a noise: `noise_std` is raised by 2⁻⁵⁰ of it, so that the roundings of the
        products that gave it, σ·Δ, do no harm."""
        if not 2.0**-900 < noise_std < 2.0**900:
            raise InputError("between 2⁻⁹⁰⁰ and 2⁹⁰⁰", name="noise_std", value=noise_std)
        noise_std *= 1 + 2.0**-50
        spacing = math.ldexp(1.0, math.frexp(noise_std)[1] - 1) / GRID
        return cls(spacing, noise_std / spacing)

    @property
    def limit(self) -> float:
        """Distances to the nearest whole number up to this one are sure to be to the right one, if
        the noise was added to numbers between −½ and ½."""
        return 0.5 - (self.deviation * table.ERROR + 2.0**-36)

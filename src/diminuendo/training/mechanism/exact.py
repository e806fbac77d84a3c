"""The ideal Gaussian, rounded: exactly, from as many random bits as it takes.

Formal guarantee of `add_rounded_gaussian`: for every double x the result is a fixed function of

    K = ⌊x/g + s·Z + ½⌋,   Z = Φ⁻¹(U),   U = 0.b₁b₂b₃… in binary,

with s·g not below `noise_std` and independent fair bits b. K·g is x plus an ideal Gaussian, rounded
to the grid of spacing g: a post-processing of the Gaussian mechanism on real numbers, to which
the mechanism adds no error at all. docs/noise.md has the proof.

Sixty-four bits and a cubic in double precision decide K for all but about one in twenty million;
for the others U is compared with Φ(boundary) in exact arithmetic.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.mechanism import cipher, normal, table

GRID = 1024
"""Cells of the grid in one standard deviation, at least: rounding adds less than one ten-millionth
to the variance."""
_BLOCK = 2**16
"""Numbers that a core works on at once: few enough for its cache, enough to keep calls rare."""
_FRACTION_BITS = 52 - table.CELL_BITS
_FRACTION = 2**_FRACTION_BITS - 1
_SIGN_AND_CELL = 2 ** (64 - _FRACTION_BITS) - 1
_FIRST_BITS, _MORE_BITS = 64, 512
_DIGITS = 28


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
        """Distances to the nearest whole number up to this one are sure to be to the right one."""
        return 0.5 - (self.deviation * table.ERROR + 2.0**-36)


def add_rounded_gaussian(total: Tensor, noise_std: float, keys: tuple[bytes, bytes]) -> Tensor:
    """Add the noise to `total`, in place, and return it.

    total      the sum, flat and in float64, on a CPU or a GPU
    noise_std  the standard deviation of the noise on every coordinate
    keys       of the first 64 bits of each coordinate, and of the bits after them
    """
    if total.dtype != torch.float64 or total.dim() != 1 or not total.is_contiguous():
        raise InputError("flat, contiguous and in float64", name="total", value=total.dtype)
    grid = Grid.of(noise_std)
    if not len(total):
        return total
    if total.device.type != "cpu":
        from diminuendo.training.mechanism import kernels

        if not kernels.available:
            return total.copy_(add_rounded_gaussian(total.cpu(), noise_std, keys))
        undecided, sums = kernels.add_rounded_gaussian(total, grid, keys[0])
    else:
        undecided, sums = undecided_on_cpu(total, grid, keys[0])
    if undecided:
        settled = [settle(x, grid, keys, place) for place, x in zip(undecided, sums, strict=True)]
        where = torch.tensor(undecided, device=total.device)
        total[where] = torch.tensor(settled, dtype=torch.float64, device=total.device)
    return total


def undecided_on_cpu(total: Tensor, grid: Grid, key: bytes) -> tuple[list[int], list[float]]:
    """Coordinates that could not be decided, and what the sum was there; the others are done."""
    size = len(total)
    pieces = max(1, round(size / (_BLOCK * torch.get_num_threads())))
    block = (size // (8 * pieces) + 1) * 8  # of equal size, so that none is left to one core
    room = _Room(block)
    undecided: list[int] = []
    sums: list[float] = []
    for start in range(0, size, block):
        part = total[start : start + block]
        words = cipher.keystream(key, len(part), first=start)
        places = room.add(part, torch.from_numpy(words.view(np.int64)), grid)
        if places is not None:
            undecided += [start + place for place in places[0]]
            sums += places[1]
    return undecided, sums


class _Room:
    """Buffers for one block; written over by the next."""

    def __init__(self, size: int) -> None:
        self._floats = torch.empty(5, size, dtype=torch.float64)
        self._index = torch.empty(size, dtype=torch.int64)

    def add(self, total: Tensor, words: Tensor, grid: Grid) -> tuple[list[int], list[float]] | None:
        """Write the noisy sum over `total`; where it is not certain, say so."""
        powers = _spread_table()
        p, position, z, power, shifted = (part[: len(total)] for part in self._floats)
        index = self._index[: len(total)]
        bits = p.copy_(words).view(torch.int64)
        torch.bitwise_right_shift(bits, _FRACTION_BITS, out=index)
        index.bitwise_and_(_SIGN_AND_CELL)
        position.copy_(bits.bitwise_and_(_FRACTION))
        torch.index_select(powers[3], 0, index, out=z)
        for k in (2, 1, 0):
            torch.index_select(powers[k], 0, index, out=power)
            torch.addcmul(power, z, position, out=z)
        torch.mul(total, 1 / grid.spacing, out=shifted)
        whole = torch.round(shifted, out=power)
        shifted.sub_(whole).add_(z, alpha=grid.deviation)
        near = torch.round(shifted, out=z)
        whole.add_(near)
        distance = shifted.sub_(near).abs_()
        found = None
        if not distance.amax().item() <= grid.limit:  # also where a tail's NaN is the largest
            where = torch.nonzero(~(distance <= grid.limit)).flatten()
            found = (where.tolist(), total[where].tolist())
        torch.mul(whole, grid.spacing, out=total)
        return found


@cache
def _spread_table() -> tuple[Tensor, ...]:
    """The polynomials where a double's first bits (sign, exponent, seven more) find them.

    Whatever no word leads to is never touched, and so takes no memory. Positions are whole numbers
    below 2⁴⁵ here, and the tails beyond the table are NaN: nothing is decided there.
    """
    cells = table.coefficients()
    first = (1023 + table.FIRST_OCTAVE) * table.CELLS
    negative = 2048 * table.CELLS
    spread = []
    for k, powers in enumerate(cells):
        part = np.zeros(2 * negative)
        for sign, start in ((1.0, 0), (-1.0, negative)):
            part[start] = np.nan  # w = 0
            part[start + 1023 * table.CELLS : start + first] = np.nan
            part[start + first : start + first + len(powers)] = (
                sign * powers * 2.0 ** (-_FRACTION_BITS * k)
            )
            # |w| = 2⁶³, or rounded to it: p = ½, where Φ⁻¹ is zero.
        spread.append(torch.from_numpy(part))
    return tuple(spread)


def settle(x: float, grid: Grid, keys: tuple[bytes, bytes], place: int) -> float:
    """⌊x/g + s·Z + ½⌋ · g for the Z of a coordinate, in exact arithmetic."""
    if not math.isfinite(x):
        raise DiminuendoError("The sum of clipped gradients is not finite: nothing is released.")
    uniform = _Uniform(keys, place)
    sum_, deviation = Fraction(x) / Fraction(grid.spacing), Fraction(grid.deviation)
    guess = math.floor(sum_ + deviation * Fraction(uniform.quantile()) + Fraction(1, 2))

    def not_above(whole: int) -> bool:
        """Whether K ≤ whole: x/g + s·Z is below whole + ½, that is, U below Φ of that Z."""
        return uniform.is_below((whole + Fraction(1, 2) - sum_) / deviation)

    step = 1
    if not_above(guess):
        low = guess - step
        while not_above(low):
            step *= 2
            low -= step
        high = min(guess, low + step)
    else:
        high = guess + step
        while not not_above(high):
            step *= 2
            high += step
        low = max(guess, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if not_above(middle) else (middle, high)
    return float(high) * grid.spacing


class _Uniform:
    """A coordinate's U, of which as many bits are made as are asked for."""

    def __init__(self, keys: tuple[bytes, bytes], place: int) -> None:
        block = place // cipher.WORDS_PER_BLOCK * cipher.WORDS_PER_BLOCK
        first = cipher.keystream(keys[0], cipher.WORDS_PER_BLOCK, first=block)
        self._key, self._place, self._blocks = keys[1], place, 0
        self._bits, self._known = int(first[place - block]), _FIRST_BITS

    def _more(self) -> None:
        words = cipher.keystream(
            self._key,
            cipher.WORDS_PER_BLOCK,
            first=self._blocks * cipher.WORDS_PER_BLOCK,
            nonce=self._place,
        )
        for word in words.tolist():
            self._bits = self._bits << 64 | word
        self._blocks += 1
        self._known += _MORE_BITS

    def quantile(self) -> float:
        """Nearly Z: where the search begins."""
        if self._blocks == 0:
            self._more()
        tail = min(self._bits, 2**self._known - 1 - self._bits)
        size = math.ldexp(*_shortened(2 * tail + 1, self._known + 1))
        z = NormalDist().inv_cdf(max(size, 1e-300))
        return z if self._bits >> (self._known - 1) == 0 else -z

    def is_below(self, z: Fraction) -> bool:
        """Whether U < Φ(z)."""
        digits = _DIGITS
        while True:
            low, high = normal.below(z, digits)
            unit = Fraction(1, 2**self._known)
            if (self._bits + 1) * unit <= low:
                return True
            if self._bits * unit >= high:
                return False
            digits *= 2
            while self._known < digits * 4:
                self._more()


def _shortened(whole: int, scale: int) -> tuple[float, int]:
    """whole / 2^scale as a mantissa of at most 64 bits and an exponent."""
    spare = max(whole.bit_length() - 64, 0)
    return float(whole >> spare), spare - scale

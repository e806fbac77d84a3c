"""The fast path on a CPU: 64 bits and a cubic in double precision for each coordinate.

docs/noise.md bounds what every operation here rounds. Where that leaves a choice between two whole
numbers, the coordinate is undecided, and `exact.settle` decides it.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diminuendo.training.cores import FEW, few, one_core, side_by_side
from diminuendo.training.mechanism import cipher, table
from diminuendo.training.mechanism.grid import Grid

_BLOCK = FEW
"""Numbers for which one core does everything."""
_LARGE = 2.0**30
"""Sums up to this many cells are added to the noise as they are: of larger ones, more than is
welcome would be rounded off, and the whole cells are added afterwards."""
_NOT_CELL = 52 - table.CELL_BITS
_SIGN_AND_CELL = 2 ** (64 - _NOT_CELL) - 1

Undecided = tuple[list[int], list[float]]
"""Coordinates, and what the sum was there."""


Deviations = tuple[Tensor, Tensor]
"""Standard normal numbers, one for each coordinate, and memory of the same size to go on with."""


def ahead(size: int, key: bytes) -> Deviations:
    """The deviations for a sum that does not exist yet, to give to `add_rounded_gaussian`."""
    return deviations(_words(size, key))


def add_rounded_gaussian(
    total: Tensor, grid: Grid, key: bytes, drawn: Deviations | None = None
) -> Undecided:
    """Write the noisy sum over `total`, but for the coordinates that are returned.

    drawn  what `ahead` gave for this key: written on
    """
    if drawn is not None:
        with few(len(total)):
            return _add(total, drawn, grid) or ([], [])
    block = _equal_blocks(len(total))
    starts = range(0, len(total), block)

    def add(number: int) -> Undecided | None:
        part = total[starts[number] : starts[number] + block]
        return _add(part, deviations(_words(len(part), key, starts[number])), grid)

    if len(starts) > 1:
        found = side_by_side(add, len(starts))
    else:
        with one_core():
            found = [add(0)]
    undecided: list[int] = []
    sums: list[float] = []
    for start, places in zip(starts, found, strict=True):
        if places is not None:
            undecided += [start + place for place in places[0]]
            sums += places[1]
    return undecided, sums


def _equal_blocks(size: int) -> int:
    """The size of about equal blocks, as many for each core: a multiple of the cipher's."""
    cores = torch.get_num_threads()
    count = 1 if size <= _BLOCK else cores * max(1, round(size / (cores * _BLOCK)))
    words = cipher.WORDS_PER_BLOCK
    return -(-size // (count * words)) * words


def _words(size: int, key: bytes, first: int = 0) -> Tensor:
    """The first 64 bits of coordinates, with a sign."""
    return torch.from_numpy(cipher.keystream(key, size, first=first).view(np.int64))


def _add(total: Tensor, drawn: Deviations, grid: Grid) -> Undecided | None:
    z, spare = drawn
    shifted = torch.mul(total, 1 / grid.spacing, out=spare)
    lowest, highest = torch.aminmax(shifted)
    largest = max(-lowest.item(), highest.item())
    whole = None
    limit = grid.limit
    if largest <= _LARGE:
        limit -= largest * 2.0**-52
    else:
        whole = torch.round(shifted)
        shifted.sub_(whole)
    shifted.add_(z, alpha=grid.deviation)
    near = torch.round(shifted, out=z)
    below, above = torch.aminmax(shifted.sub_(near))
    found = None
    if not (-limit <= below.item() and above.item() <= limit):  # NaN: a tail, or no number
        where = torch.nonzero(~(shifted.abs_() <= limit)).flatten()
        found = (where.tolist(), total[where].tolist())
    torch.mul(near if whole is None else near.add_(whole), grid.spacing, out=total)
    return found


def deviations(words: Tensor) -> Deviations:
    """Φ⁻¹ of the probabilities that begin with these bits, to `table.ERROR`, NaN in the tails; and
    memory of the same size to go on with.
    """
    powers = _spread_table()
    p = words.double()
    cell = p.view(torch.int64).bitwise_right_shift(_NOT_CELL).bitwise_and_(_SIGN_AND_CELL)
    z = torch.index_select(powers[3], 0, cell)
    power = torch.empty_like(z)
    for k in (2, 1, 0):
        torch.index_select(powers[k], 0, cell, out=power)
        torch.addcmul(power, z, p, out=z)
    return z, power


@cache
def _spread_table() -> tuple[Tensor, ...]:
    """The polynomials, in powers of the word itself, where a double's first bits (sign, exponent,
    seven more) find them.

    Whatever no word leads to is never touched, and so takes no memory. The tails beyond the table
    are NaN: nothing is decided there.
    """
    first = (1023 + table.FIRST_OCTAVE) * table.CELLS
    negative = 2048 * table.CELLS
    spread = []
    for k, powers in enumerate(in_powers_of_the_word()):
        part = np.zeros(2 * negative)
        for sign, start in ((1.0, 0), (-1.0, negative)):
            part[start] = np.nan  # w = 0
            part[start + 1023 * table.CELLS : start + first] = np.nan
            part[start + first : start + first + len(powers)] = sign ** (k + 1) * powers
            # |w| = 2⁶³, or rounded to it: p = ½, where Φ⁻¹ is zero.
        spread.append(torch.from_numpy(part))
    return tuple(spread)


def in_powers_of_the_word() -> NDArray[np.float64]:
    """The table's polynomials in powers of |w| instead of the position inside a cell: (4, 3200).

    Σ c_k (|w|/h − a)^k for a cell [a·h, (a + 1)·h), multiplied out. The tests bound, in exact
    arithmetic, what that rounds.
    """
    cells = table.coefficients()
    number = np.arange(cells.shape[1])
    back = -(table.CELLS + number % table.CELLS).astype(np.float64)
    width = table.FIRST_OCTAVE - table.CELL_BITS + number // table.CELLS
    return np.array(
        [
            np.ldexp(
                sum(math.comb(k, j) * back ** (k - j) * cells[k] for k in range(j, 4)), -width * j
            )
            for j in range(4)
        ]
    )

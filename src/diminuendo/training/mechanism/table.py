"""The inverse of the normal distribution function, as cubic polynomials in double precision.

A 64-bit word w, read with a sign, is a tail probability p = |w| / 2⁶⁴ at full relative precision:
w ≥ 0 stands for the deviation Φ⁻¹(p) < 0, and w < 0 for −Φ⁻¹(p). Every octave of p from 2⁻²⁶ to ½
is cut into 128 cells of equal width, and a cell has a polynomial in the position inside it. Only
additions and multiplications are left to do, which IEEE 754 rounds alike on every machine.

The coefficients are in `inverse_normal.npy`. `build` makes them; `error_bound` proves, cell by
cell, how far they are from Φ⁻¹, and the tests run it on every cell.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diminuendo.errors import DiminuendoError
from diminuendo.training.mechanism import normal

CELL_BITS = 7
CELLS = 2**CELL_BITS
"""Cells in an octave."""
FIRST_OCTAVE, LAST_OCTAVE = 38, 62
"""Octaves of |w| that have cells: 2³⁸ ≤ |w| < 2⁶³. Farther out 64 bits are too few to decide."""
DEGREE = 3
ERROR = 2.0**-37
"""How far a computed value may be from Φ⁻¹(p), for any p that begins with the word's bits: 55% of
it for `error_bound`, 10% for the bits that are not there yet, next to nothing for rounding."""

_FILE = Path(__file__).with_name("inverse_normal.npy")
_DIGEST = "f060775ee56fd4af1d67e958a16bb5f6feccc5040b48a6e603506860d20f8b67"


@cache
def coefficients() -> NDArray[np.float64]:
    """Shape (4, 3200): coefficients of the position's powers 0 to 3, cells by increasing |w|.

    The position runs from 0 to 1 through the cell; the values are those of Φ⁻¹(p), p ≤ ½.
    """
    table: NDArray[np.float64] = np.load(_FILE)
    if hashlib.sha256(table.tobytes()).hexdigest() != _DIGEST:
        raise DiminuendoError(
            f"{_FILE} is damaged: its digest is not that of the table that was proven. Install "
            "diminuendo anew."
        )
    return table


def cell(octave: int, index: int) -> tuple[Fraction, Fraction]:
    """The probabilities (left end, width) of a cell."""
    width = Fraction(2) ** (octave - CELL_BITS - 64)
    return (CELLS + index) * width, width


def build() -> NDArray[np.float64]:
    """The table, from interpolation at Chebyshev nodes in 40 digits; takes some seconds."""
    import mpmath

    columns = []
    with mpmath.workdps(40):
        for octave in range(FIRST_OCTAVE, LAST_OCTAVE + 1):
            for index in range(CELLS):
                left, width = cell(octave, index)
                values = [
                    _quantile(mpmath, left + width * node) for node in (Fraction(n) for n in NODES)
                ]
                columns.append(_interpolate(mpmath, values))
    return np.array(columns, dtype=np.float64).T.copy()


NODES = tuple(float(0.5 - 0.5 * np.cos((2 * i + 1) * np.pi / 8)) for i in range(4))
"""Where the polynomials meet Φ⁻¹: Chebyshev's nodes on [0, 1], as doubles."""


def _quantile(mpmath: Any, p: Fraction) -> Any:
    exact = mpmath.mpf(p.numerator) / p.denominator
    return -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * exact)


def _interpolate(mpmath: Any, values: list[Any]) -> list[float]:
    """Coefficients of the cubic through (NODES, values)."""
    matrix = mpmath.matrix([[mpmath.mpf(node) ** k for k in range(4)] for node in NODES])
    return [float(c) for c in mpmath.lu_solve(matrix, mpmath.matrix(values))]


def error_bound(octave: int, index: int, powers: list[float], digits: int = 30) -> Fraction:
    """An upper bound of |polynomial − Φ⁻¹| on a cell, in exact arithmetic.

    |Φ⁻¹ − I| ≤ max |(Φ⁻¹)⁗| / 4! · max |∏ (t − tᵢ)| for the cubic I through Φ⁻¹ at the nodes; I and
    the polynomial P are cubics, so that |I − P| ≤ Λ · max |Φ⁻¹(tᵢ) − P(tᵢ)| with Λ < 2 for these
    nodes; and |Φ⁻¹(tᵢ) − P(tᵢ)| ≤ e where Φ(P(tᵢ) ± e) lie on both sides of the probability.
    """
    left, width = cell(octave, index)
    worst = Fraction(0)
    for node in (Fraction(n) for n in NODES):
        value = sum((Fraction(c) * node**k for k, c in enumerate(powers)), Fraction(0))
        worst = max(worst, _distance(value, left + width * node, digits))
    z = Fraction(float(powers[0])) - Fraction(1, 2**30)  # not above Φ⁻¹ at the left end
    if normal.below(z, digits)[1] > left:
        raise ValueError(f"The polynomial of cell {octave}, {index} is off at its left end.")
    # (Φ⁻¹)⁗ = (7z + 6z³)/φ(z)⁴ grows in size towards the tail; 2⁻⁷ bounds the product of distances
    # to Chebyshev's nodes on [0, 1] (and 2% more what rounding them does).
    density_at_least = normal.density(z, digits)[0]
    fourth = abs(7 * z + 6 * z**3) / density_at_least**4
    return 2 * worst + fourth * width**4 / 24 * Fraction(102, 100) / 128


def _distance(value: Fraction, p: Fraction, digits: int) -> Fraction:
    """A power of two that |value − Φ⁻¹(p)| is proven not to exceed."""
    for exponent in range(-50, -20):
        e = Fraction(2) ** exponent
        low, high = normal.below(value - e, digits), normal.below(value + e, digits)
        if low[1] <= p <= high[0]:
            return e
    raise ValueError(f"Φ({float(value)}) is far from {float(p)}.")

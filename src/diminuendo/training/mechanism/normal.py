"""The normal distribution function to any number of digits, with a proven error.

Used where double precision cannot decide. The series has positive terms only,

    Φ(z) − ½ = z · exp(−z²/2) / √(2π) · Σ_k z²ᵏ / (1·3·…·(2k+1)),

and every operation of `decimal` is correctly rounded, `exp` and `sqrt` included, so that relative
errors merely add up: see docs/noise.md.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import cache

_LOST = 9
"""Digits that rounding may spoil: less than 10⁸ roundings, each of half a unit at most."""
_LARGEST = 1000
"""Beyond so many deviations Φ is 0 or 1 to 200,000 digits, which no one asks for."""


def below(z: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Bounds (low, high) of Φ(z), with high − low ≤ 10^−`digits`."""
    if abs(z) > _LARGEST:
        raise ValueError(f"Expected |z| ≤ {_LARGEST}.")
    with localcontext(Context(prec=digits + _LOST, Emin=-(10**9), Emax=10**9)):
        square = Decimal(z.numerator) / Decimal(z.denominator)
        square *= square
        smallest = Decimal(10) ** -(digits + _LOST)
        term, total, odd = Decimal(1), Decimal(0), 1
        while odd < 2 * square or term > smallest * total:
            total += term
            odd += 2
            term = term * square / odd
        total += term  # from here on each is at most half the one before
        root = (2 * _pi(digits + _LOST)).sqrt()
        half = total * square.sqrt() * (-square / 2).exp() / root
        error = Fraction(10) ** -digits / 2
    middle = Fraction(1, 2) + (Fraction(half) if z >= 0 else -Fraction(half))
    return middle - error, middle + error


def density(z: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Bounds (low, high) of φ(z), with high − low ≤ 10^−`digits`."""
    with localcontext(Context(prec=digits + _LOST, Emin=-(10**9), Emax=10**9)):
        value = Decimal(z.numerator) / Decimal(z.denominator)
        middle = Fraction((-value * value / 2).exp() / (2 * _pi(digits + _LOST)).sqrt())
    error = Fraction(10) ** -digits / 2
    return middle - error, middle + error


@cache
def _pi(digits: int) -> Decimal:
    """π by Machin's formula, 16·arctan(1/5) − 4·arctan(1/239), in whole numbers."""
    one: int = 10 ** (digits + 10)

    def arctan(inverse: int) -> int:
        power = total = one // inverse
        k = 1
        while power:
            power //= -inverse * inverse
            k += 2
            total += power // k
        return total

    scaled = 16 * arctan(5) - 4 * arctan(239)
    return Decimal(scaled).scaleb(-(digits + 10), Context(prec=digits + 20, Emin=-(10**9)))

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
from statistics import NormalDist

import torch
from torch import Tensor

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.mechanism import cipher, cpu, normal
from diminuendo.training.mechanism.grid import Grid

_FIRST_BITS, _MORE_BITS = 64, 512
_DIGITS = 28


def add_rounded_gaussian(
    total: Tensor,
    noise_std: float,
    keys: tuple[bytes, bytes],
    drawn: cpu.Deviations | None = None,
) -> Tensor:
    """Add the noise to `total`, in place, and return it.

    total      the sum, flat and in float64, on a CPU or a GPU
    noise_std  the standard deviation of the noise on every coordinate
    keys       of the first 64 bits of each coordinate, and of the bits after them
    drawn      on a CPU, what `cpu.ahead` made of the first key
    """
    if total.dtype != torch.float64 or total.dim() != 1 or not total.is_contiguous():
        raise InputError("flat, contiguous and in float64", name="total", value=total.dtype)
    grid = Grid.of(noise_std)
    if not len(total):
        return total
    if total.device.type != "cpu":
        return _on_device(total, grid, keys)
    undecided, sums = cpu.add_rounded_gaussian(total, grid, keys[0], drawn)
    if undecided:
        settled = [settle(x, grid, keys, place) for place, x in zip(undecided, sums, strict=True)]
        total[torch.tensor(undecided)] = torch.tensor(settled, dtype=torch.float64)
    return total


def _on_device(total: Tensor, grid: Grid, keys: tuple[bytes, bytes]) -> Tensor:
    from diminuendo.training.mechanism import kernels

    if not kernels.available:
        there = total.cpu()
        cpu_keys = keys
        undecided, sums = cpu.add_rounded_gaussian(there, grid, cpu_keys[0], None)
        for place, x in zip(undecided, sums, strict=True):
            there[place] = settle(x, grid, keys, place)
        return total.copy_(there)
    faults = kernels.Faults(total.device)
    order = kernels.sent(kernels.Order.of(grid, keys, 1.0), total.device)
    kernels.release([total], total, order, faults)
    faults.check()
    return total


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

"""Whether quick sums are close enough to the exact ones, decided by random projections.

Let E be the error of all checked sums together and R a matrix of k columns of independent standard
normal numbers. Whatever E is, ``P(||E^T R||^2 < x ||E||^2) <= (x e^(1 - x / k) / k)^(k / 2)``
(docs/rounding.md, lemma 5), so that ``||E|| <= ||E^T R|| / sqrt(x)`` but for that probability.
Nothing is assumed about how the sums were computed, only that R had no part in it.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from diminuendo.training.clipping.sums import Term
from diminuendo.training.cores import few

ALLOWANCE = 2.0**-10
"""The error of a clipped sum is at most this part of the clip's sensitivity."""
FAILURE = 2.0**-50
"""Largest probability, for each call of the engine, that a larger error is not noticed."""

_VECTORS = 11
_SHARE = 0.999 * _VECTORS * FAILURE ** (2 / _VECTORS) / math.e
"""The x of the module's text, from below."""
# What additions into the caller's buffers may take of the allowance.
_BUFFERS = 0.02


class Certificate:
    """Gathers the errors of the sums of one call.

    ``sensitivity`` is the clip's; ``allowance`` the part of it that all errors together may take;
    ``length`` the length of the longest random vectors that are needed.
    """

    def __init__(self, sensitivity: float, allowance: float, length: int) -> None:
        self._sensitivity = sensitivity
        self._allowed = allowance * sensitivity * (1 - _BUFFERS)
        vectors = normal(length, _VECTORS)
        self._size = float(vectors.norm()) * 1.001
        self._vectors = vectors
        self._parts: dict[int, Tensor] = {}
        self._squares: list[Tensor] = []
        self._known: list[Tensor | float] = []
        self._of_norms = 0.0

    def count(self, term: Term, factors: Tensor) -> None:
        """Count the error of a precise sum.

        Terms whose sizes are parts of the norm are counted together: their errors are a vector
        that is, for each example, at most the largest ``error`` times its clipped norm.
        """
        if term.terms is None and term.cancelled == 1.0:
            self._of_norms = max(self._of_norms, term.error * len(factors) * self._sensitivity)
        else:
            self._known.append(term.spent(factors, self._sensitivity) * term.error)

    def vectors(self, term: Term, device: torch.device | None = None) -> Tensor:
        """The random vectors for a term, one column each: the same tensor every time."""
        length = term.probes()
        if device is not None and self._vectors.device != device:
            self._vectors, self._parts = self._vectors.to(device, non_blocking=True), {}
        if length not in self._parts:
            self._parts[length] = self._vectors[:length]
        return self._parts[length]

    def measure(self, term: Term, total: Tensor, factors: Tensor) -> None:
        """Measure the error of a quick sum."""
        with few(total.numel()):
            self._squares.append(term.probe(total, self.vectors(term, total.device)))
        rounding = term.probe_error() * self._size / math.sqrt(_SHARE)
        self._known.append(term.spent(factors, self._sensitivity) * rounding)

    def error(self) -> Tensor | float:
        """An upper bound for the error of all sums together, but for ``FAILURE``."""
        known: Tensor | float = sum(self._known, self._of_norms)
        if not self._squares:
            return known
        return torch.stack(self._squares).sum().div(_SHARE).sqrt().mul(1.001) + known

    def holds(self) -> bool:
        """Whether that is allowed; False too if it is not a number."""
        return float(self.error()) <= self._allowed

    def excessive(self) -> list[bool]:
        """For each sum that was measured, whether it takes more than its even share."""
        even = self._allowed**2 * _SHARE / max(1, len(self._squares))
        return [not float(square) <= even / 4 for square in self._squares]


def normal(rows: int, cols: int) -> Tensor:
    """Independent standard normal numbers from the operating system's randomness, float64."""
    if not rows:
        return torch.empty(0, cols, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * rows * cols)), dtype=torch.int64)
    uniform = (bits >> 12).double().add_(2.0**51 + 0.5).mul_(2.0**-52)
    numbers: Tensor = torch.special.ndtri(uniform)
    return numbers.view(rows, cols)

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

from diminuendo.training.clipping.device import DeviceTerm
from diminuendo.training.clipping.lanes import Lanes
from diminuendo.training.clipping.products import VECTORS
from diminuendo.training.clipping.sums import Term
from diminuendo.training.cores import few
from diminuendo.training.mechanism import kernels

ALLOWANCE = 2.0**-10
"""The error of a clipped sum is at most this part of the clip's sensitivity."""
FAILURE = 2.0**-50
"""Largest probability, for each call of the engine, that a larger error is not noticed."""

_VECTORS = 11
# What additions into the caller's buffers may take of the allowance.
_BUFFERS = 0.02


class Certificate:
    """Gathers the errors of the sums of one call.

    ``sensitivity`` is the clip's; ``allowance`` the part of it that all errors together may take;
    ``vectors`` the random vectors, as long as any term needs them, one column each.
    """

    def __init__(self, sensitivity: float, allowance: float, vectors: Tensor) -> None:
        self._sensitivity = sensitivity
        self._allowed = allowance * sensitivity * (1 - _BUFFERS)
        self._share = share_of(vectors.shape[1])
        self._size: Tensor | float = vectors.norm() * 1.001
        if not vectors.is_cuda:
            self._size = float(self._size)
        self._vectors = vectors
        self._parts: dict[int, Tensor] = {}
        self._squares: list[Tensor] = []
        self._together: Tensor | None = None
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

    def vectors(self, term: Term) -> Tensor:
        """The random vectors for a term, one column each: the same tensor every time."""
        length = term.probes()
        if length not in self._parts:
            self._parts[length] = self._vectors[:length]
        return self._parts[length]

    def measure(
        self, term: Term, total: Tensor, factors: Tensor, lanes: Lanes | None = None
    ) -> None:
        """Measure the error of a quick sum; on a GPU in one of the lanes."""
        if isinstance(term, DeviceTerm) and lanes is not None:
            if self._together is None:
                self._together = self._vectors.new_zeros(1)
                self._squares.append(self._together[0])
            vectors, into = self.vectors(term), self._together
            lanes.do(lambda: term.measure(total, vectors, into))
        else:
            with few(total.numel()):
                self._squares.append(term.probe(total, self.vectors(term)))
        rounding = self._size * (term.probe_error() / math.sqrt(self._share))
        self._known.append(term.spent(factors, self._sensitivity) * rounding)

    def error(self) -> Tensor | float:
        """An upper bound for the error of all sums together, but for ``FAILURE``."""
        known: Tensor | float = sum(self._known, self._of_norms)
        if not self._squares:
            return known
        squares = torch.stack(self._squares).sum()
        return squares.div(self._share).sqrt().mul(1.001) + known

    def holds(self) -> bool:
        """Whether that is allowed; False too if it is not a number."""
        return float(self.error()) <= self._allowed

    def flag(self) -> Tensor:
        """The same in a GPU's memory, after sums that were measured there."""
        error = self.error()
        assert isinstance(error, Tensor)
        return error <= self._allowed

    def excessive(self) -> list[bool]:
        """For each sum that was measured, whether it takes more than its even share."""
        even = self._allowed**2 * self._share / max(1, len(self._squares))
        return [not float(square) <= even / 4 for square in self._squares]


def share_of(vectors: int) -> float:
    """The x of the module's text for so many vectors, from below."""
    return 0.999 * vectors * math.pow(FAILURE, 2 / vectors) / math.e


def on_device(rows: int, key: Tensor) -> Tensor:
    """Independent standard normal vectors for a GPU, from a key of 32 bytes in its memory."""
    return kernels.normal(rows * VECTORS, key).view(rows, VECTORS)


def normal(rows: int, cols: int = _VECTORS) -> Tensor:
    """Independent standard normal numbers from the operating system's randomness, float64."""
    if not rows:
        return torch.empty(0, cols, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * rows * cols)), dtype=torch.int64)
    uniform = (bits >> 12).double().add_(2.0**51 + 0.5).mul_(2.0**-52)
    numbers: Tensor = torch.special.ndtri(uniform)
    return numbers.view(rows, cols)

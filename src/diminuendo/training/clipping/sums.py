"""``sum_i c_i G_i`` of one parameter, so that its rounding error is known.

A term can be summed with an error that is bounded beforehand (``precise``): in float64, or, where
few enough numbers are added up at a time, in float32 (``relax``). Where that costs more than a
plain sum, it can be summed in the type of the data (``quick``) and checked: ``probe`` multiplies
the error of such a sum by random vectors, for docs/rounding.md, lemma 5.

What is summed is exact by definition: rows ``G_i`` that were formed are what they are, and a
product ``U_i^T V_i`` is that of its two tensors in real numbers.

Examples are *placed* where another example in the place of one leaves all others in theirs, as in a
full batch. Then only what one stretch of examples is rounded by counts, not all of them (lemma 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diminuendo.training.clipping.contract import spread
from diminuendo.training.clipping.rounding import (
    DOUBLE,
    cached,
    cancelled,
)
from diminuendo.training.clipping.stretch import Stretch, out_of_range
from diminuendo.training.cores import FEW, few

# Fewest gradients to add up at a time in float32, unless they are all; for fewer, float64 is as
# fast.
_FEWEST = 16
# Entries of tokens that are looked up, held in float64 at a time.
_LOOKED_UP = 1 << 22


class Term:
    """A part of the clipped sum.

    ``checked`` says whether a quick sum and its check are cheaper than a precise sum. The error
    of the precise sum is at most ``error`` times ``sum_i c_i m_i``, where ``m_i`` (``terms``, if
    known) bounds the sizes of what is added up for example i: at most ``cancelled`` times what is
    taken for its norm. If ``cancelled`` is 1, ``m_i`` is what this term adds to the norm.
    ``stretch_error`` is what is to be added for the one stretch of placed examples in which two
    neighbouring sums differ, over the bound for every ``c_i ||G_i||``.
    """

    checked = False
    error = 0.0
    stretch_error = 0.0
    cancelled = 1.0
    terms: Tensor | None = None

    def of_shared(self, like: Tensor) -> Term:
        """This term as one of several of the same parameter, which may cancel each other."""
        self.terms, self.cancelled = None, cancelled(like)
        return self

    def relax(self, error: float, placed: bool) -> None:
        """Allow the precise sum an error of this part of the bound for every ``c_i ||G_i||``, over
        all examples, or, where they are placed, over a stretch of them; if it is faster then.

        The bound must be within ``TAME``, which keeps float32 from losing it.
        """
        del error, placed

    def precise(self) -> Tensor:
        """The sum with the error that ``error`` bounds; in float64 unless it was relaxed."""
        raise NotImplementedError

    def quick(self) -> Tensor:
        """The sum in the type of the data, or so."""
        raise NotImplementedError

    def probes(self) -> int:
        """The length of the random vectors for ``probe``."""
        raise NotImplementedError

    def probe(self, total: Tensor, vectors: Tensor) -> Tensor:
        """``||(total - the exact sum)^T vectors||_F^2``, to float64 rounding."""
        raise NotImplementedError

    def probe_error(self) -> float:
        """What float64 may round the root of that by, over ``||vectors||_F sum_i c_i m_i``."""
        raise NotImplementedError

    def spent(self, factors: Tensor, bound: float) -> Tensor | float:
        """An upper bound for ``sum_i c_i m_i``; ``bound`` is one for every ``c_i ||G_i||``."""
        if self.terms is None:
            return len(factors) * bound * self.cancelled
        return torch.dot(factors, torch.where(factors > 0, self.terms, 0.0))


@dataclass
class Known(Term):
    """Rows of ``examples`` that a GPU adds up in float64 when it is asked to."""

    total: Callable[[], Tensor]
    examples: int

    def __post_init__(self) -> None:
        self.error = DOUBLE * (self.examples + 8)

    def precise(self) -> Tensor:
        return self.total()


@dataclass
class Rows(Term):
    """Gradients ``(N, *shape)`` that were formed."""

    rows: Tensor
    factors: Tensor

    def __post_init__(self) -> None:
        self.error = DOUBLE * (len(self.factors) + 8)
        self._stretch = 0

    def relax(self, error: float, placed: bool) -> None:
        """Add up some gradients at a time in float32, and what comes out in float64."""
        if self.cancelled != 1.0 or self.rows.is_cuda or self.rows.dtype is not torch.float32:
            return
        stretch, examples = Stretch.of(self.rows, error, placed), len(self.factors)
        if stretch.length < examples and self.rows.numel() <= FEW:
            return
        if stretch.length >= min(examples, _FEWEST):
            self._stretch = stretch.length
            self.error, self.stretch_error = stretch.errors(examples)

    def precise(self) -> Tensor:
        flat = self.rows.flatten(1)
        if not self._stretch:
            return self._in_double(flat, self.factors).view(self.rows.shape[1:])
        apart = out_of_range(self.factors)
        factors = self.factors if apart is None else torch.where(apart, 0.0, self.factors)
        factors = factors.to(flat.dtype)
        if self._stretch >= len(flat):
            total = torch.mv(flat.t(), factors)
        else:
            total = flat.new_zeros(flat.shape[1], dtype=torch.float64)
            parts = torch.split(flat, self._stretch), torch.split(factors, self._stretch)
            for part, some in zip(*parts, strict=True):
                total.add_(torch.mv(part.t(), some))
        if apart is not None:
            total = total.double() + self._in_double(flat, torch.where(apart, self.factors, 0.0))
        return total.view(self.rows.shape[1:])

    @staticmethod
    def _in_double(flat: Tensor, factors: Tensor) -> Tensor:
        step = cached(flat)
        if step >= len(flat):
            with few(flat.numel()):
                return torch.mv(flat.double().t(), factors)
        total = flat.new_zeros(flat.shape[1], dtype=torch.float64)
        for part, some in zip(torch.split(flat, step), torch.split(factors, step), strict=True):
            total.addmv_(part.double().t(), some)
        return total


@dataclass
class Lookup(Term):
    """Tokens ``(N, T, width)`` that are added to the rows of their indices ``(N, T)``."""

    tokens: Tensor
    indices: Tensor
    factors: Tensor
    rows: int
    terms: Tensor | None

    def __post_init__(self) -> None:
        self.error = DOUBLE * (self.indices.numel() + 8)
        self.cancelled = cancelled(self.tokens)

    def precise(self) -> Tensor:
        step = max(1, _LOOKED_UP // max(1, self.tokens[0].numel()))
        parts = [torch.split(part, step) for part in (self.tokens, self.indices, self.factors)]
        total: Tensor | None = None
        for tokens, indices, factors in zip(*parts, strict=True):
            scaled = tokens.double().mul_(spread(factors, tokens))
            if total is None:
                total = self._added(scaled, indices)
            else:
                total.index_add_(0, indices.reshape(-1), scaled.flatten(0, 1))
        assert total is not None
        return total

    def _added(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """The sums of float64 tokens by index, which a CPU adds up one after the other."""
        if tokens.is_cuda:
            total = tokens.new_zeros(self.rows, tokens.shape[2])
            return total.index_add_(0, indices.reshape(-1), tokens.flatten(0, 1))
        added: Tensor = torch.ops.aten.embedding_dense_backward(
            tokens, indices, self.rows, -1, False
        )
        return added

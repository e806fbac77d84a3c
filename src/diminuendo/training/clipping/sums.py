"""``sum_i c_i G_i`` of one parameter, so that its rounding error is known.

A term can be summed in float64 (``precise``), with an error that is bounded beforehand. Where
that costs more than a plain sum, it can be summed in the type of the data (``quick``) and checked:
``probe`` multiplies the error of such a sum by random vectors, for docs/rounding.md, lemma 5.

What is summed is exact by definition: rows ``G_i`` that were formed are what they are, and a
product ``U_i^T V_i`` is that of its two tensors in real numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diminuendo.training.clipping.contract import spread
from diminuendo.training.clipping.rounding import DOUBLE, cached, cancelled, coarse, to_tf32

# Rows of a matrix product that are added up at a time in the type of the data.
_QUICK = 1024
# A product is summed and checked if its narrower side is wider than this; else it is precise.
_NARROW = 56


class Term:
    """A part of the clipped sum.

    ``checked`` says whether a quick sum and its check are cheaper than a precise sum. The error
    of the precise sum is at most ``error`` times ``sum_i c_i m_i``, where ``m_i`` (``terms``, if
    known) bounds the sizes of what is added up for example i: at most ``cancelled`` times what is
    taken for its norm.
    """

    checked = False
    error = 0.0
    cancelled = 1.0
    terms: Tensor | None = None

    def of_shared(self, like: Tensor) -> Term:
        """This term as one of several of the same parameter, which may cancel each other."""
        self.terms, self.cancelled = None, cancelled(like)
        return self

    def precise(self) -> Tensor:
        """The sum in float64."""
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
class Rows(Term):
    """Gradients ``(N, *shape)`` that were formed."""

    rows: Tensor
    factors: Tensor

    def __post_init__(self) -> None:
        self.error = DOUBLE * (len(self.factors) + 8)

    def precise(self) -> Tensor:
        flat = self.rows.flatten(1)
        step = cached(flat)
        if step >= len(flat):
            return torch.mv(flat.double().t(), self.factors).view(self.rows.shape[1:])
        total = self.factors.new_zeros(flat.shape[1])
        for part, factors in zip(
            torch.split(flat, step), torch.split(self.factors, step), strict=True
        ):
            total.addmv_(part.double().t(), factors)
        return total.view(self.rows.shape[1:])


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
        width = self.tokens.shape[2]
        total = self.factors.new_zeros(self.rows, width)
        step = cached(self.tokens.flatten(1))
        parts = [torch.split(part, step) for part in (self.tokens, self.indices, self.factors)]
        for tokens, indices, factors in zip(*parts, strict=True):
            scaled = tokens.double().mul_(spread(factors, tokens))
            total.index_add_(0, indices.reshape(-1), scaled.view(-1, width))
        return total


class Product(Term):
    """Tokens u and v, ``(N, T, *)`` or ``(N, *)``, whose products are added up.

    Sums are kept as (narrower side) x (wider side), which is how matrix products are fastest.
    Where a GPU multiplies in TF32, u has been scaled and rounded, v has been rounded, and the
    products are those of the rounded numbers. ``column`` is ``sum_i c_i w_i`` over the wider side w
    in float64, a by-product of ``precise`` and ``probe``.
    """

    def __init__(self, u: Tensor, v: Tensor, factors: Tensor, terms: Tensor | None) -> None:
        many = u.dim() == 3
        self.terms = terms if many else None
        self.cancelled = cancelled(u) if many else 1.0
        self.column: Tensor | None = None
        self.factors = factors
        self.weights: Tensor | None = factors
        if coarse(u):
            u, self.weights = to_tf32(u * spread(factors.to(u.dtype), u)), None
        elif many:
            self.weights = factors.repeat_interleave(u.shape[1])
        u, v = u.flatten(0, -2), v.flatten(0, -2)
        self.turned = u.shape[1] > v.shape[1]
        self.narrow, self.wide = (v, u) if self.turned else (u, v)
        self.checked = self.narrow.shape[1] > _NARROW and u.dtype is not torch.float64
        length = u.shape[0]
        self.block = max(64, cached(self.wide), math.isqrt(length))
        self.error = DOUBLE * (min(length, self.block) + length // self.block + 8)

    def _shaped(self, total: Tensor) -> Tensor:
        return total.t() if self.turned else total

    def _scaled(self, dtype: torch.dtype) -> Tensor:
        narrow = self.narrow.to(dtype)
        return narrow if self.weights is None else narrow * self.weights.to(dtype).unsqueeze(1)

    def _times_wide(self, left: Tensor) -> Tensor:
        """``left`` times the wider side in float64; the column too."""
        count, length = left.shape
        padded = left.new_zeros(-(-(count + 1) // 4) * 4, length)  # a width that kernels like
        padded[:count] = left
        padded[count] = 1.0 if self.weights is None else self.weights
        total = left.new_zeros(padded.shape[0], self.wide.shape[1])
        parts = zip(
            torch.split(padded, self.block, 1), torch.split(self.wide, self.block), strict=True
        )
        for part, wide in parts:
            total.addmm_(part, wide.double())
        self.column = total[count]
        return total[:count]

    def precise(self) -> Tensor:
        return self._shaped(self._times_wide(self._scaled(torch.float64).t()))

    def quick(self) -> Tensor:
        narrow, total = self._scaled(self.wide.dtype), None
        for part, wide in zip(
            torch.split(narrow, _QUICK), torch.split(self.wide, _QUICK), strict=True
        ):
            product = torch.mm(part.t(), wide)
            total = product if total is None else total.double().add_(product)
        assert total is not None
        return self._shaped(total)

    def probes(self) -> int:
        return self.narrow.shape[1]

    def probe_error(self) -> float:
        return self.error + 3 * DOUBLE * self.probes()

    def probe(self, total: Tensor, vectors: Tensor) -> Tensor:
        exact = self._times_wide(torch.mm(vectors.t(), self._scaled(torch.float64).t()))
        ours = torch.mm(vectors.t(), self._shaped(total).double())
        return ours.sub_(exact).square_().sum()


@dataclass
class Column(Rows):
    """Rows ``(N, d)`` that are the wider side of a product with the same factors."""

    product: Product

    def precise(self) -> Tensor:
        column = self.product.column
        return super().precise() if column is None else column

"""``sum_i c_i G_i`` of one parameter, so that its rounding error is known.

A term can be summed in float64 (``precise``), with an error that is bounded beforehand. Where
that costs more than a plain sum, it can be summed in the type of the data (``quick``) and checked:
``probe`` multiplies the error of such a sum by random vectors, for docs/rounding.md, lemma 5.

What is summed is exact by definition: rows ``G_i`` that were formed are what they are, and a
product ``U_i^T V_i`` is that of its two tensors in real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diminuendo.training.clipping.contract import spread
from diminuendo.training.clipping.rounding import DOUBLE, cancelled, coarse, to_tf32

# Rows of a matrix product that are added up at a time in the type of the data.
_QUICK = 4096
# Entries converted to float64 at a time; they should stay in the cache.
_CONVERTED = 1 << 18
# A product is summed and checked if its narrower side is wider than this; else it is precise.
_NARROW = 24


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
        """What float64 may round that by: its root, over the vectors' norm and ``sum_i c_i m_i``."""
        raise NotImplementedError

    def spent(self, factors: Tensor, bound: float) -> Tensor | float:
        """``sum_i c_i m_i``, or an upper bound for it if every ``c_i ||G_i||`` is under ``bound``."""
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
        if flat.dtype is torch.float64 or flat.numel() <= _CONVERTED or flat.is_cuda:
            return torch.mv(flat.double().t(), self.factors).view(self.rows.shape[1:])
        total = torch.zeros(flat.shape[1], dtype=torch.float64, device=flat.device)
        step = max(1, _CONVERTED // flat.shape[1])
        for part, factors in zip(flat.split(step), self.factors.split(step), strict=True):
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
        step = max(1, _CONVERTED // (self.tokens.shape[1] * width))
        parts = [part.split(step) for part in (self.tokens, self.indices, self.factors)]
        if self.tokens.is_cuda:
            parts = [(part,) for part in (self.tokens, self.indices, self.factors)]
        for tokens, indices, factors in zip(*parts, strict=True):
            scaled = tokens.double().mul_(spread(factors, tokens))
            total.index_add_(0, indices.reshape(-1), scaled.view(-1, width))
        return total


class Product(Term):
    """Tokens u and v, ``(N, T, *)`` or ``(N, *)``, whose products are added up.

    Where a GPU multiplies in TF32, u has been scaled and rounded, v has been rounded, and the
    products are those of the rounded numbers.
    """

    def __init__(self, u: Tensor, v: Tensor, factors: Tensor, terms: Tensor | None) -> None:
        many = u.dim() == 3
        self.terms = terms if many else None
        self.cancelled = cancelled(u) if many else 1.0
        self.shape = (u.shape[-1], v.shape[-1])
        self.checked = min(self.shape) > _NARROW and u.dtype is not torch.float64
        self.weights: Tensor | None = factors
        if coarse(u):
            scaled = u * spread(factors.to(u.dtype), u)
            u, self.weights = to_tf32(scaled), None
        elif many:
            self.weights = factors.repeat_interleave(u.shape[1])
        self.u, self.v = u.flatten(0, -2), v.flatten(0, -2)
        length, width = self.u.shape[0], sum(self.shape)
        self.block = max(64, _CONVERTED // width, math.isqrt(length))
        self.error = DOUBLE * (min(length, self.block) + length // self.block + 8)

    def _blocks(self, size: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """u and v, of which the narrower one is scaled, in blocks of tokens."""
        thin = self.shape[0] <= self.shape[1]
        weights = None if self.weights is None else self.weights.to(dtype).unsqueeze(1)
        for start in range(0, self.u.shape[0], size):
            part = slice(start, start + size)
            u, v = self.u[part].to(dtype), self.v[part].to(dtype)
            if weights is not None:
                u, v = (u * weights[part], v) if thin else (u, v * weights[part])
            yield u, v

    def precise(self) -> Tensor:
        total = torch.zeros(self.shape, dtype=torch.float64, device=self.u.device)
        for u, v in self._blocks(self.block, torch.float64):
            total.addmm_(u.t(), v)
        return total

    def quick(self) -> Tensor:
        total: Tensor | None = None
        for u, v in self._blocks(_QUICK, self.u.dtype):
            part = torch.mm(u.t(), v)
            total = part if total is None else total.double().add_(part)
        assert total is not None
        return total

    def probes(self) -> int:
        return min(self.shape)

    def probe_error(self) -> float:
        return self.error + 3 * DOUBLE * self.probes()

    def probe(self, total: Tensor, vectors: Tensor) -> Tensor:
        thin = self.shape[0] <= self.shape[1]
        sketch = torch.mm(vectors.t(), (total if thin else total.t()).double())
        for u, v in self._blocks(self.block, torch.float64):
            narrow, wide = (u, v) if thin else (v, u)
            sketch.addmm_(torch.mm(narrow, vectors).t(), wide, alpha=-1.0)
        return sketch.square_().sum()

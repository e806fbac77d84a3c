"""``sum_i c_i G_i`` of one parameter, so that its rounding error is known.

A term can be summed with an error that is bounded beforehand (``precise``): in float64, or, where
few enough numbers are added up at a time, in float32 (``relax``). Where that costs more than a
plain sum, it can be summed in the type of the data (``quick``) and checked: ``probe`` multiplies
the error of such a sum by random vectors, for docs/rounding.md, lemma 5.

What is summed is exact by definition: rows ``G_i`` that were formed are what they are, and a
product ``U_i^T V_i`` is that of its two tensors in real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diminuendo.training.clipping.contract import spread
from diminuendo.training.clipping.rounding import (
    DOUBLE,
    cached,
    cancelled,
    coarse,
    gamma,
    to_tf32,
    unit,
)
from diminuendo.training.cores import Beside, few, pieces, side_by_side

# Rows of a matrix product that are added up at a time in the type of the data.
_QUICK = 1024
# A product is summed and checked if its narrower side is wider than this; else it is precise.
_NARROW, _NARROW_GPU = 64, 56
# Fewest gradients to add up at a time in float32, unless they are all; for fewer, float64 is as
# fast.
_FEWEST = 16
# Entries of tokens that are looked up, held in float64 at a time.
_LOOKED_UP = 1 << 22
# Tokens whose sums by index are taken at a time, at least: fewer in a row round less.
_ADDED = 1 << 14
# Entries of the wider side of a product from which on its rows are divided among a CPU's cores.
_DIVIDED = 1 << 16


class Term:
    """A part of the clipped sum.

    ``checked`` says whether a quick sum and its check are cheaper than a precise sum. The error
    of the precise sum is at most ``error`` times ``sum_i c_i m_i``, where ``m_i`` (``terms``, if
    known) bounds the sizes of what is added up for example i: at most ``cancelled`` times what is
    taken for its norm. If ``cancelled`` is 1, ``m_i`` is what this term adds to the norm.
    """

    checked = False
    error = 0.0
    cancelled = 1.0
    terms: Tensor | None = None

    def of_shared(self, like: Tensor) -> Term:
        """This term as one of several of the same parameter, which may cancel each other."""
        self.terms, self.cancelled = None, cancelled(like)
        return self

    def relax(self, error: float) -> None:
        """Allow the precise sum an ``error`` of this size, if it is faster then.

        Factors must be zero or within ``certified.TAME``, which keeps float32 from losing them.
        """
        del error

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

    def relax(self, error: float) -> None:
        """Add up some gradients at a time in float32, and what comes out in float64.

        A factor is rounded, a product is rounded, and as many sums as there are gradients, so that
        the error is ``gamma(stretch + 1)`` for each stretch (docs/rounding.md, lemma 7).
        """
        if self.cancelled != 1.0 or self.rows.is_cuda or self.rows.dtype is not torch.float32:
            return
        examples, rough = len(self.factors), unit(self.rows)
        stretch = min(examples, math.floor(error / (rough * (1 + error))) - 2)
        if stretch >= min(examples, _FEWEST):
            self._stretch = stretch
            self.error = gamma(stretch + 2, rough) + DOUBLE * (examples // stretch + 8)

    def precise(self) -> Tensor:
        flat, factors = self.rows.flatten(1), self.factors
        if self._stretch:
            step, dtype = self._stretch, flat.dtype
            factors = factors.to(dtype)
        else:
            step, dtype = cached(flat), torch.float64
        if step >= len(flat):
            with few(flat.numel()):
                return torch.mv(flat.to(dtype).t(), factors).view(self.rows.shape[1:])
        total = flat.new_zeros(flat.shape[1], dtype=torch.float64)
        for part, some in zip(torch.split(flat, step), torch.split(factors, step), strict=True):
            if self._stretch:
                total.add_(torch.mv(part.t(), some))
            else:
                total.addmv_(part.double().t(), some)
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
        count, each = self.indices.numel(), max(1, self.indices[0].numel())
        most = min(_LOOKED_UP // max(1, self.tokens.shape[2]), max(_ADDED, math.isqrt(count)))
        self._step = max(1, most // each)
        self.error = DOUBLE * (min(count, self._step * each) + count // (self._step * each) + 9)
        self.cancelled = cancelled(self.tokens)

    def precise(self) -> Tensor:
        parts = [
            torch.split(part, self._step) for part in (self.tokens, self.indices, self.factors)
        ]
        total: Tensor | None = None
        for tokens, indices, factors in zip(*parts, strict=True):
            sums = self._added(tokens.double().mul_(spread(factors, tokens)), indices)
            total = sums if total is None else total.add_(sums)
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
        self._quick: Tensor | None = None
        self._exact: Tensor | None = None
        self._vectors: Tensor | None = None
        self.factors = factors
        self.weights: Tensor | None = factors
        if coarse(u):
            u, self.weights = to_tf32(u * spread(factors.to(u.dtype), u)), None
        elif many:
            self.weights = factors.repeat_interleave(u.shape[1])
        u, v = u.flatten(0, -2), v.flatten(0, -2)
        self.turned = u.shape[1] > v.shape[1]
        self.narrow, self.wide = (v, u) if self.turned else (u, v)
        narrow = _NARROW_GPU if u.is_cuda else _NARROW
        self.checked = self.narrow.shape[1] > narrow and u.dtype is not torch.float64
        self.pieces = self._divided()
        length = u.shape[0]
        self.block = max(64, cached(self.wide), math.isqrt(length))
        added = min(length, self.block) + length // self.block + len(self.pieces)
        self.error = DOUBLE * (added + 8)

    def _divided(self) -> list[slice]:
        """Rows for each core of a CPU, where the sums of all cores together are small beside them.

        What a core converts to float64 is then in its own cache when it multiplies.
        """
        length, width = self.narrow.shape
        small = self.wide.is_cuda or self.wide.numel() < _DIVIDED
        return pieces(length, 1 if small else length // max(1, 2 * width))

    def lighten(self, part: float) -> None:
        """Have the first core take this part less than its even share of the rows."""
        length, count = self.narrow.shape[0], len(self.pieces)
        first = max(1, int(self.pieces[0].stop * (1 - part)))
        rest = pieces(length - first, count - 1)
        self.pieces = [slice(0, first)] + [slice(first + r.start, first + r.stop) for r in rest]

    def _shaped(self, total: Tensor) -> Tensor:
        return total.t() if self.turned else total

    def exact_piece(self, number: int, vectors: Tensor | None) -> Tensor:
        """What some of the rows add to the sum in float64, or to its product with the vectors; the
        column below it."""
        rows, total = self.pieces[number], None
        weights = None if self.weights is None else self.weights[rows].unsqueeze(1)
        if vectors is None:
            count = self.narrow.shape[1]
            shape = rows.stop - rows.start, _liked(count + 1)
            left = self.factors.new_empty(shape, dtype=torch.float64)
            left[:, :count] = self.narrow[rows]
            left[:, count:] = 0.0
        else:
            count = vectors.shape[1]
            padded = F.pad(vectors, (0, _liked(count + 1) - count))
            left = torch.mm(self.narrow[rows].double(), padded)
        left[:, count] = 1.0
        if weights is not None:
            left.mul_(weights)
        parts = torch.split(left, self.block), torch.split(self.wide[rows], self.block)
        for part, wide in zip(*parts, strict=True):
            if total is None:
                total = torch.mm(part.t(), wide.double())
            else:
                total.addmm_(part.t(), wide.double())
        assert total is not None
        return total

    def quick_piece(self, number: int) -> Tensor:
        """What some of the rows add to the quick sum."""
        rows, total = self.pieces[number], None
        narrow = self.narrow[rows]
        if self.weights is not None:
            narrow = narrow * self.weights[rows].to(narrow.dtype).unsqueeze(1)
        sides = narrow, self.wide[rows]
        for part, wide in zip(*[torch.split(side, _QUICK) for side in sides], strict=True):
            product = torch.mm(part.t(), wide)
            total = product if total is None else total.double().add_(product)
        assert total is not None
        return total

    def take(self, job: Job, totals: list[Tensor]) -> None:
        """Remember what came of a job until ``precise``, ``quick`` or ``probe`` asks for it."""
        if job.quick:
            self._quick = totals.pop()
        if job.exact:
            self._exact, self._vectors = totals.pop(), job.vectors

    def _exactly(self, vectors: Tensor | None) -> Tensor:
        """The sum, or its product with the vectors, in float64."""
        if self._exact is None or self._vectors is not vectors:
            multiply([Job(self, vectors)])
        assert self._exact is not None
        total, self._exact = self._exact, None
        count = self.narrow.shape[1] if vectors is None else vectors.shape[1]
        self.column = total[count]
        return total[:count]

    def precise(self) -> Tensor:
        return self._shaped(self._exactly(None))

    def quick(self) -> Tensor:
        if self._quick is None:
            multiply([Job(self, None, exact=False, quick=True)])
        assert self._quick is not None
        total, self._quick = self._quick, None
        return self._shaped(total)

    def probes(self) -> int:
        return self.narrow.shape[1]

    def probe_error(self) -> float:
        return self.error + 3 * DOUBLE * self.probes()

    def probe(self, total: Tensor, vectors: Tensor) -> Tensor:
        exact = self._exactly(vectors)
        ours = torch.mm(vectors.t(), self._shaped(total).double())
        return ours.sub_(exact).square_().sum()


def _liked(width: int) -> int:
    """The next width that kernels like."""
    return width + -width % 4


class Job(NamedTuple):
    """What is to be multiplied for a product: the exact sum (or its product with ``vectors``), the
    quick sum, or both."""

    product: Product
    vectors: Tensor | None
    exact: bool = True
    quick: bool = False

    def piece(self, number: int) -> list[Tensor]:
        """The sums over some of the rows."""
        product, found = self.product, []
        if self.exact:
            found.append(product.exact_piece(number, self.vectors))
        if self.quick:
            found.append(product.quick_piece(number))
        return found


def multiply(jobs: Sequence[Job], beside: Beside | None = None) -> None:
    """Have the cores multiply for several products at once, so that they wait for each other once.

    The products remember the results. One core does ``beside`` first and takes fewer rows; with a
    single core, or nothing to multiply, it is left undone.
    """
    count = max([len(job.product.pieces) for job in jobs], default=0)
    if count < 2:
        beside = None
    if beside is not None:
        _make_room(jobs, beside.cost)

    def pieces_of_all(number: int) -> list[list[Tensor] | None]:
        if number == 0 and beside is not None:
            beside.call()
        return [job.piece(number) if number < len(job.product.pieces) else None for job in jobs]

    found = side_by_side(pieces_of_all, count)
    for place, job in enumerate(jobs):
        totals: list[Tensor] = []
        for parts in found:
            for at, part in enumerate(parts[place] or ()):
                if at == len(totals):
                    totals.append(part)
                else:
                    with few(part.numel()):
                        totals[at] = totals[at].double().add_(part)
        job.product.take(job, totals)


def _make_room(jobs: Sequence[Job], cost: float) -> None:
    """Leave the first core as many multiplications less as it has other work."""
    divided = [job.product for job in jobs if len(job.product.pieces) > 1]
    whole = sum(product.narrow.numel() * product.wide.shape[1] for product in divided)
    for product in divided:
        product.lighten(min(0.9, cost * (len(product.pieces) - 1) / whole))


@dataclass
class Column(Rows):
    """Rows ``(N, d)`` that are the wider side of a product with the same factors."""

    product: Product

    def precise(self) -> Tensor:
        column = self.product.column
        return super().precise() if column is None else column

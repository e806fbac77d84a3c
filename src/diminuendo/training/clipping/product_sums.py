"""Sums of products, ``sum_i c_i U_i^T V_i``, multiplied by all cores of a CPU side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    to_tf32,
)
from diminuendo.training.clipping.stretch import Stretch, out_of_range
from diminuendo.training.clipping.sums import Rows, Term
from diminuendo.training.cores import Beside, few, pieces, side_by_side

# Rows of a matrix product that are added up at a time in the type of the data.
_QUICK = 1024
# A product is summed and checked if its narrower side is wider than this; else it is precise.
_NARROW, _NARROW_GPU = 64, 56
# Fewest rows to add up at a time in float32, unless they are all: float64 takes twice as long. And
# fewest multiplications.
_FEWEST_OF_PRODUCT, _LARGE = 32, 1 << 20
# Entries of float32 sums over stretches that are held at a time.
_HELD = 1 << 21
# Entries of the wider side of a product from which on its rows are divided among a CPU's cores.
_DIVIDED = 1 << 16


class Product(Term):
    """Tokens u and v, ``(N, T, *)`` or ``(N, *)``, whose products are added up.

    Sums are kept as (narrower side) x (wider side), which is how matrix products are fastest.
    Where a GPU multiplies in TF32, u has been scaled and rounded, v has been rounded, and the
    products are those of the rounded numbers. ``column`` is ``sum_i c_i w_i`` over the wider side
    w, a by-product of ``precise`` and ``probe``: as exact as ``precise``, or as float64.

    ``longest`` are bounds for the lengths of the rows of both sides, where an example has one token
    and they are known: then a precise sum may be relaxed.
    """

    def __init__(
        self,
        u: Tensor,
        v: Tensor,
        factors: Tensor,
        terms: Tensor | None,
        longest: Tensor | None = None,
    ) -> None:
        many = u.dim() == 3
        self.terms = terms if many else None
        self.cancelled = cancelled(u) if many else 1.0
        self.column: Tensor | None = None
        self._quick: Tensor | None = None
        self._exact: Tensor | None = None
        self._vectors: Tensor | None = None
        self.factors = factors
        self.weights: Tensor | None = factors
        self._longest = None if many or u.is_cuda else longest
        self._stretch = 0
        self._scaled: Tensor | None = None
        """Of a relaxed sum, the narrower side and ones, times the factors."""
        self._apart: Tensor | None = None
        """Of a relaxed sum, the examples that float32 has not the range for."""
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

    def relax(self, error: float, placed: bool) -> None:
        """Add up some products at a time in float32, each times its factor."""
        if self._longest is None or self.checked or self.cancelled != 1.0:
            return
        if self.narrow.dtype is not torch.float32 or self.cost < _LARGE:
            return
        stretch, examples = Stretch.of(self.narrow, error, placed), len(self.factors)
        if stretch.length >= min(examples, _FEWEST_OF_PRODUCT):
            self._stretch = stretch.length
            self.error, self.stretch_error = stretch.errors(examples)
            self._apart = out_of_range(self.factors, self._longest)
            factors = self.factors
            if self._apart is not None:
                factors = torch.where(self._apart, 0.0, factors)
            with few(self.narrow.numel()):
                self._scaled = self._left(slice(None), torch.float32, factors)
            self.pieces = self._divided()

    @property
    def relaxed(self) -> bool:
        """Whether the precise sum is float32 for each stretch."""
        return self._stretch > 0

    @property
    def cost(self) -> float:
        """How long the precise sum takes: as long as so many multiplications in float64."""
        return self.narrow.numel() * self.wide.shape[1] * (0.6 if self._stretch else 1.0)

    def _divided(self) -> list[slice]:
        """Rows for each core of a CPU, where the sums of all cores together are small beside them.

        What a core converts to float64 is then in its own cache when it multiplies.
        """
        length, width = self.narrow.shape
        small = self.wide.is_cuda or self.wide.numel() < _DIVIDED
        return self._whole(pieces(self._units, 1 if small else length // max(1, 2 * width)))

    def lighten(self, part: float) -> None:
        """Have the first core take this part less than its even share of the rows."""
        count, grain = len(self.pieces), self._stretch or 1
        first = max(1, int(self.pieces[0].stop // grain * (1 - part)))
        rest = pieces(self._units - first, count - 1)
        self.pieces = self._whole(
            [slice(0, first)] + [slice(first + r.start, first + r.stop) for r in rest]
        )

    @property
    def _units(self) -> int:
        """Into how many pieces the rows may be divided: no stretch is torn apart."""
        return -(-self.narrow.shape[0] // (self._stretch or 1))

    def _whole(self, units: list[slice]) -> list[slice]:
        length, grain = self.narrow.shape[0], self._stretch or 1
        return [slice(p.start * grain, min(p.stop * grain, length)) for p in units]

    def _shaped(self, total: Tensor) -> Tensor:
        return total.t() if self.turned else total

    def exact_piece(self, number: int, vectors: Tensor | None) -> Tensor:
        """What some of the rows add to the precise sum, or to its product with the vectors; the
        column below it."""
        rows = self.pieces[number]
        if self._scaled is None or vectors is not None:
            return self._in_double(rows, vectors, self.weights)
        total = self._in_stretches(self._scaled[rows], self.wide[rows].contiguous())
        if self._apart is None:
            return total
        return total.add_(self._in_double(rows, None, torch.where(self._apart, self.factors, 0.0)))

    def _in_stretches(self, *sides: Tensor) -> Tensor:
        """Float32 for each stretch of rows, and what comes out in float64."""
        size = sides[0].shape[1] * sides[1].shape[1]
        at_once = self._stretch * max(1, _HELD // size)
        total: Tensor | None = None
        for part, other in zip(*[torch.split(side, at_once) for side in sides], strict=True):
            if len(part) % self._stretch:  # the last ones
                whole = len(part) - len(part) % self._stretch
                sums = torch.mm(part[whole:].t(), other[whole:]).double()
                part, other = part[:whole], other[:whole]
                total = sums if total is None else total.add_(sums)
            if len(part):
                narrow, wide = (x.view(-1, self._stretch, x.shape[1]) for x in (part, other))
                sums = torch.bmm(narrow.mT, wide).sum(0, dtype=torch.float64)
                total = sums if total is None else total.add_(sums)
        assert total is not None
        return total

    def _left(self, rows: slice, dtype: torch.dtype, weights: Tensor | None) -> Tensor:
        """The narrower side and a column of ones, times the weights."""
        count = self.narrow.shape[1]
        narrow = self.narrow[rows]
        left = narrow.new_empty(len(narrow), _liked(count + 1), dtype=dtype)
        left[:, :count] = narrow
        left[:, count:] = 0.0
        left[:, count] = 1.0
        if weights is not None:
            left.mul_(weights[rows].unsqueeze(1).to(dtype))
        return left

    def _in_double(self, rows: slice, vectors: Tensor | None, weights: Tensor | None) -> Tensor:
        """Some of the rows in float64."""
        total = None
        if vectors is None:
            left = self._left(rows, torch.float64, weights)
        else:
            count = vectors.shape[1]
            padded = F.pad(vectors, (0, _liked(count + 1) - count))
            left = torch.mm(self.narrow[rows].double(), padded)
            left[:, count] = 1.0
            if weights is not None:
                left.mul_(weights[rows].unsqueeze(1))
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
    whole = sum(product.cost for product in divided)
    for product in divided:
        product.lighten(min(0.9, cost * (len(product.pieces) - 1) / whole))


@dataclass
class Column(Rows):
    """Rows ``(N, d)`` that are the wider side of a product with the same factors."""

    product: Product

    def relax(self, error: float, placed: bool) -> None:
        """As the product does, of which this is a by-product."""
        super().relax(error, placed)
        if not self.product.relaxed:
            self.product.relax(error, placed)
        if self._served:
            self.error, self.stretch_error = self.product.error, self.product.stretch_error

    @property
    def _served(self) -> bool:
        """Whether the product may give this sum: gradients that others may cancel need float64."""
        return self.cancelled == 1.0 or not self.product.relaxed

    def precise(self) -> Tensor:
        column = self.product.column
        return column if column is not None and self._served else super().precise()

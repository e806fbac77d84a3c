"""Products ``G_i = U_i^T V_i`` summed over tokens: their norms without (or with) forming them.

A linear map applied to T tokens of example i has the weight gradient ``sum_t u_t v_t^T`` with
``u_t`` the gradient of output token t and ``v_t`` its input. Three ways lead to its norm:

* T = 1: ``||G|| = ||u|| ||v||``;
* Gram: ``||G||^2 = sum_{s,t} (u_s . u_t)(v_s . v_t)``, about ``T^2 (r + c)`` multiplications;
* instantiate G, ``T r c`` multiplications, and keep it: the clipped sum is then ``sum_i c_i G_i``
  and needs no further product over tokens.

By Gram matrices, what is left of terms that cancel is known only to rounding errors of the terms:
``Gamma (sum_t ||u_t|| ||v_t||)^2`` (docs/rounding.md, lemma 3). That much is added to the squared
norm, so that an example is never taken to be smaller than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diminuendo.training.clipping import kernels
from diminuendo.training.clipping.rounding import (
    DOUBLE,
    TF32,
    above,
    cancelled,
    coarse,
    gamma,
    row_norm,
    single_unit,
    smallest,
    unit,
)

# Reading and writing one stored entry of G costs about as much as this many multiplications.
_TRAFFIC = 24
# G may take this many times the memory of the U and V it replaces.
_MEMORY = 1.0
# Most entries of one block of Gram matrices held at a time.
_BLOCK = 1 << 23
# Lengths of the longest rows and columns of an example for which float32 has the range.
_TAME = 2.0**-30, 2.0**50
# Inner products with a larger relative error than this are taken in float64.
LOOSE = 2.0**-7
# Entries that a matrix product adds up at a time for an inner product.
_WIDE = 1 << 12


def upcast(tensor: Tensor) -> Tensor:
    """Half-precision tensors as float32; float32, float64 and complex ones as they are."""
    if tensor.dtype is torch.float32 or tensor.dtype is torch.float64 or tensor.is_complex():
        return tensor
    return tensor.float()


def spread(factors: Tensor, like: Tensor) -> Tensor:
    """The factors ``(N,)`` shaped so that they multiply the examples of ``like``."""
    if like.dim() == 2:
        return factors.unsqueeze(1)
    return factors.view(-1, *([1] * (like.dim() - 1)))


def scaled(x: Tensor, factors: Tensor) -> Tensor:
    """``factors[i] x[i]``; on a GPU rounded to TF32 where it multiplies in TF32, and zero where the
    factor is."""
    if kernels.serves(x) or kernels.halved(x):
        return kernels.scale_rows(x, factors, rounded=coarse(x))
    return x * spread(factors.to(x.dtype), x)


def weighted(factors: Tensor, per_example: Tensor) -> Tensor:
    """``sum_i factors[i] * per_example[i]``."""
    if per_example.dim() == 2:
        return torch.mv(per_example.t(), factors)
    return torch.mv(per_example.flatten(1).t(), factors).view(per_example.shape[1:])


def instantiating_pays(tokens: int, rows: int, cols: int) -> bool:
    """Whether to form the per-example products rather than use Gram matrices."""
    size, width = rows * cols, rows + cols
    return _TRAFFIC * size <= tokens * tokens * width and size <= _MEMORY * tokens * width


class Size(NamedTuple):
    """Upper bounds ``(N,)`` in float64: of the norm, and of ``sum_t ||u_t|| ||v_t||``, which is
    what the norm would be if no term cancelled another."""

    norm: Tensor
    terms: Tensor

    def rounded(self) -> Size:
        """For products of which one factor is rounded to TF32 after it has been scaled."""
        return Size(self.norm.add(self.terms, alpha=1.01 * TF32), self.terms)


def gram_size(u: Tensor, v: Tensor) -> Size:
    """The size of ``U_i^T V_i`` by Gram matrices, in blocks of examples to bound the memory."""
    if _in_tiles(u, v):
        return _size_in_tiles(u, v)
    examples, tokens = u.shape[0], u.shape[1]
    block = max(1, _BLOCK // max(1, 2 * tokens * tokens))
    if block >= examples:
        return shared_size([Factor(u, v)])
    parts = [
        shared_size([Factor(u[start : start + block], v[start : start + block])])
        for start in range(0, examples, block)
    ]
    return joined(parts)


def _in_tiles(u: Tensor, v: Tensor) -> bool:
    """Whether a kernel forms Gram matrices a tile at a time: of tokens one after the other."""
    fits = u.dim() == 3 and u.dtype is v.dtype and (kernels.serves(u) or kernels.halved(u))
    return fits and u.stride(2) == v.stride(2) == 1


def _size_in_tiles(u: Tensor, v: Tensor) -> Size:
    rough, single, part = unit(u), single_unit(u), kernels.width_of(u)

    def of(width: int) -> float:
        short, long = gamma(part, rough), gamma(width // part + 2, single)
        return short + long + short * long

    tokens, rows, cols = u.shape[1], u.shape[2], v.shape[2]
    bound = _bound(u, tokens, (rows, cols), (of(rows), of(cols)), rough)
    return Size(*kernels.gram_size(u, v, bound, rounded=rough != single))


def _bound(
    like: Tensor, tokens: int, widths: Sequence[int], gammas: Sequence[float], rough: float
) -> kernels.Bound:
    """The numbers of docs/rounding.md, lemma 3, for inner products of these widths."""
    lost, (of_rows, of_cols) = smallest(like), gammas
    under = [3.0 * width * lost for width in widths]
    return kernels.Bound(
        row_scale=1 + 2 * of_rows + 4 * rough,
        row_loss=2 * widths[0] * lost,
        col_scale=1 + 2 * of_cols + 4 * rough,
        col_loss=2 * widths[1] * lost,
        terms=above(tokens),
        slack=of_rows + of_cols + of_rows * of_cols + 4 * rough + 4 * tokens * tokens * DOUBLE,
        under_rows=under[0],
        under_cols=under[1],
        rest=tokens * tokens * (under[0] * under[1] + lost),
        norm=above(8),
        floor=1 / cancelled(like),
    )


def joined(parts: list[Size]) -> Size:
    """The sizes of blocks of examples, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Size(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def product_size(u: Tensor, v: Tensor) -> tuple[Size | None, Tensor | None]:
    """The size of ``U_i^T V_i`` by Gram matrices, or the products where forming them is cheaper."""
    tokens, rows, cols = u.shape[1], u.shape[2], v.shape[2]
    if tokens > 1 and instantiating_pays(tokens, rows, cols):
        return None, _bmm(u.mT, v)
    return gram_size(u, v), None


def product_weighted(u: Tensor, v: Tensor, factors: Tensor) -> Tensor:
    """``sum_i factors[i] U_i^T V_i`` as one matrix product over examples and tokens.

    ``u`` and ``v`` are ``(N, T, *)``, or ``(N, *)`` where each example has one token.
    """
    left, right = _folded(u, v, factors)
    if kernels.halved(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """Products that are added up, and kept, in float32 at least."""
    if kernels.halved(left):
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right)


def add_product_weighted(
    total: Tensor, u: Tensor, v: Tensor, factors: Tensor, scale: float
) -> None:
    """Add ``scale`` times :func:`product_weighted` to ``total`` within the same kernel."""
    total.addmm_(*_folded(u, v, factors), alpha=scale)


def _folded(u: Tensor, v: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices whose product is the weighted sum; the narrower one carries the factors."""
    if u.shape[-1] <= v.shape[-1]:
        u = scaled(u, factors)
    else:
        v = scaled(v, factors)
    if u.dim() == 3:
        u, v = u.reshape(-1, u.shape[2]), v.reshape(-1, v.shape[2])
    return u.t(), v


@dataclass
class Factor:
    """A per-example gradient in the form ``G_i = R_i^T C_i``.

    ``rows`` is ``(N, T, r)``, or an integer tensor ``(N, T)`` that stands for the one-hot rows
    of an embedding's indices; ``cols`` is ``(N, T, c)``.
    """

    rows: Tensor
    cols: Tensor

    @property
    def indexed(self) -> bool:
        """Whether ``rows`` holds indices."""
        return self.rows.dim() == 2

    @property
    def widths(self) -> tuple[int, int]:
        """Lengths of the inner products of rows and of columns; 1 for indices, which are exact."""
        return (1 if self.indexed else self.rows.shape[2]), self.cols.shape[2]

    def some(self, which: Tensor) -> Factor:
        """The gradients of some examples."""
        return Factor(self.rows[which], self.cols[which])

    def double(self) -> Factor:
        """The same gradient, to be multiplied in float64."""
        return Factor(self.rows if self.indexed else self.rows.double(), self.cols.double())

    def inner(self, other: Factor) -> Tensor:
        """``<G_i, G'_i>`` for each example, by the Gram identity."""
        return (
            self._row_products(other)
            .mul_(_inner_products(self.cols, other.cols))
            .sum((1, 2), dtype=torch.float64)
        )

    def gram(self) -> tuple[Tensor, Tensor]:
        """Inner products of the rows of each example, and of its columns, ``(N, T, T)`` each."""
        return self._row_products(self), _inner_products(self.cols, self.cols)

    def _row_products(self, other: Factor) -> Tensor:
        if self.indexed and other.indexed:
            same = self.rows.unsqueeze(2) == other.rows.unsqueeze(1)
            return same.to(upcast(self.cols[:0]).dtype)
        if other.indexed:
            index = other.rows.unsqueeze(1).expand(-1, self.rows.shape[1], -1)
            return upcast(self.rows.gather(2, index))
        if self.indexed:
            return other._row_products(self).mT.contiguous()
        return _inner_products(self.rows, other.rows)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Upper bounds of ``||r_t||`` and ``||c_t||``, ``(N, T)`` in float64."""
        cols = _lengths(self.cols)
        return (torch.ones_like(cols) if self.indexed else _lengths(self.rows)), cols

    def bulk(self) -> Tensor:
        """An upper bound of ``sum_t ||r_t|| ||c_t||``, ``(N,)`` in float64."""
        rows, cols = self.lengths()
        return (rows * cols).sum(1).mul_(above(cols.shape[1]))


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Of the tokens of each example, ``(N, T, T')``; of wide ones a part of the width at a time."""
    width = left.shape[2]
    if left.dtype is not right.dtype:
        left, right = upcast(left), upcast(right)
    if width <= _WIDE:
        return _bmm(left, right.mT)
    total: Tensor | None = None
    for part, other in zip(torch.split(left, _WIDE, 2), torch.split(right, _WIDE, 2), strict=True):
        product = _bmm(part, other.mT)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _of_inner(width: int, factors: Sequence[Factor]) -> float:
    """The relative error of inner products of this width."""
    rough = max(unit(factor.cols) for factor in factors)
    if width <= _WIDE:
        return gamma(width, rough)
    short, long = gamma(_WIDE, rough), gamma(width // _WIDE + 2, single_unit(factors[0].cols))
    return short + long + short * long


def _lengths(tokens: Tensor) -> Tensor:
    return row_norm(tokens.reshape(-1, tokens.shape[2])).view(tokens.shape[:2])


def shared_size(factors: list[Factor]) -> Size:
    """The size of ``sum_k G_i^(k)`` of a parameter that several maps share, cross terms included.

    Docs/rounding.md, lemma 3: with a_t and b_t the lengths of the tokens' rows and columns, the
    computed square is off by at most ``Gamma (sum a b)^2`` and what underflow takes.
    """
    dense = [factor for factor in factors if not factor.indexed]
    if len(dense) > 1:
        joined = Factor(
            torch.cat([factor.rows for factor in dense], 1),
            torch.cat([factor.cols for factor in dense], 1),
        )
        factors = [factor for factor in factors if factor.indexed] + [joined]
    cols = factors[0].cols
    widths = [max(sizes) for sizes in zip(*[factor.widths for factor in factors], strict=True)]
    if sum(_of_inner(width, factors) for width in widths) > LOOSE:
        factors = [factor.double() for factor in factors]
        cols = factors[0].cols
    rough = max(unit(factor.cols) for factor in factors)
    tokens = sum(factor.cols.shape[1] for factor in factors)
    gammas = [_of_inner(width, factors) for width in widths]
    bound = _bound(cols, tokens, widths, gammas, rough)
    if len(factors) == 1 and not factors[0].indexed and kernels.serves(cols):
        return Size(*kernels.gram_size_of_matrices(*factors[0].gram(), bound))
    lengths = [factor.lengths() for factor in factors]
    a, b = (torch.cat(sides, 1) for sides in zip(*lengths, strict=True))
    terms = (a * b).sum(1).mul_(bound.terms)
    total = factors[0].inner(factors[0])
    for position, factor in enumerate(factors[1:], 1):
        total = total + factor.inner(factor)
        for earlier in factors[:position]:
            total = total + 2 * factor.inner(earlier)
    square = terms.square().mul_(bound.slack)
    square.add_(b.sum(1).square_(), alpha=bound.under_rows)
    square.add_(a.sum(1).square_(), alpha=bound.under_cols)
    square.add_(bound.rest)
    square.add_(total.clamp(min=0.0))
    norm = square.sqrt_().mul_(bound.norm)
    norm = torch.where(total.isfinite(), norm, torch.inf)
    if cols.dtype is torch.float32 and not cols.is_cuda:
        _measure_odd(factors, a, b, norm)
    return Size(torch.where(terms == 0, 0.0, norm.maximum(terms * bound.floor)), terms)


def _measure_odd(factors: list[Factor], a: Tensor, b: Tensor, norm: Tensor) -> None:
    """Put norms taken in float64 for the examples whose inner products float32 cannot hold.

    Which ones, each example decides for itself: its norm must not depend on the others.
    """
    longest = torch.stack((a.amax(1), b.amax(1)))
    tame = ((longest > _TAME[0]) & (longest < _TAME[1])).all(0) | (longest == 0).any(0)
    if bool(tame.all()):
        return
    which = (~tame).nonzero().squeeze(1)
    norm[which] = shared_size([factor.some(which).double() for factor in factors]).norm

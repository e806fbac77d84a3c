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
    gamma,
    row_norm,
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


def upcast(tensor: Tensor) -> Tensor:
    """Half-precision tensors as float32; float32 and float64 as they are."""
    if tensor.dtype is torch.float32 or tensor.dtype is torch.float64:
        return tensor
    return tensor.float()


def spread(factors: Tensor, like: Tensor) -> Tensor:
    """The factors ``(N,)`` shaped so that they multiply the examples of ``like``."""
    if like.dim() == 2:
        return factors.unsqueeze(1)
    return factors.view(-1, *([1] * (like.dim() - 1)))


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
    examples, tokens = u.shape[0], u.shape[1]
    block = max(1, _BLOCK // max(1, 2 * tokens * tokens))
    if block >= examples:
        return shared_size([Factor(u, v)])
    parts = [
        shared_size([Factor(u[start : start + block], v[start : start + block])])
        for start in range(0, examples, block)
    ]
    return joined(parts)


def joined(parts: list[Size]) -> Size:
    """The sizes of blocks of examples, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Size(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def product_size(u: Tensor, v: Tensor) -> tuple[Size | None, Tensor | None]:
    """The size of ``U_i^T V_i`` by Gram matrices, or the products where forming them is cheaper."""
    tokens, rows, cols = u.shape[1], u.shape[2], v.shape[2]
    if tokens > 1 and instantiating_pays(tokens, rows, cols):
        return None, torch.bmm(u.mT, v)
    return gram_size(u, v), None


def product_weighted(u: Tensor, v: Tensor, factors: Tensor) -> Tensor:
    """``sum_i factors[i] U_i^T V_i`` as one matrix product over examples and tokens.

    ``u`` and ``v`` are ``(N, T, *)``, or ``(N, *)`` where each example has one token.
    """
    return torch.mm(*_folded(u, v, factors))


def add_product_weighted(
    total: Tensor, u: Tensor, v: Tensor, factors: Tensor, scale: float
) -> None:
    """Add ``scale`` times :func:`product_weighted` to ``total`` within the same kernel."""
    total.addmm_(*_folded(u, v, factors), alpha=scale)


def _folded(u: Tensor, v: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices whose product is the weighted sum; the narrower one carries the factors."""
    if u.shape[-1] <= v.shape[-1]:
        u = u * spread(factors, u)
    else:
        v = v * spread(factors, v)
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
            .mul_(torch.bmm(self.cols, other.cols.mT))
            .sum((1, 2), dtype=torch.float64)
        )

    def gram(self) -> tuple[Tensor, Tensor]:
        """Inner products of the rows of each example, and of its columns, ``(N, T, T)`` each."""
        return self._row_products(self), torch.bmm(self.cols, self.cols.mT)

    def _row_products(self, other: Factor) -> Tensor:
        if self.indexed and other.indexed:
            same = self.rows.unsqueeze(2) == other.rows.unsqueeze(1)
            return same.to(self.cols.dtype)
        if other.indexed:
            index = other.rows.unsqueeze(1).expand(-1, self.rows.shape[1], -1)
            return self.rows.gather(2, index)
        if self.indexed:
            return other._row_products(self).mT.contiguous()
        return torch.bmm(self.rows, other.rows.mT)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Upper bounds of ``||r_t||`` and ``||c_t||``, ``(N, T)`` in float64."""
        cols = _lengths(self.cols)
        return (torch.ones_like(cols) if self.indexed else _lengths(self.rows)), cols

    def bulk(self) -> Tensor:
        """An upper bound of ``sum_t ||r_t|| ||c_t||``, ``(N,)`` in float64."""
        rows, cols = self.lengths()
        return (rows * cols).sum(1).mul_(above(cols.shape[1]))


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
    floor = 1 / cancelled(cols)
    widths = [max(sizes) for sizes in zip(*[factor.widths for factor in factors], strict=True)]
    if sum(gamma(width, unit(cols)) for width in widths) > LOOSE:
        factors = [factor.double() for factor in factors]
        cols = factors[0].cols
    rough, lost = unit(cols), smallest(cols)
    tokens = sum(factor.cols.shape[1] for factor in factors)
    of_rows, of_cols = (gamma(width, rough) for width in widths)
    slack = of_rows + of_cols + of_rows * of_cols + 4 * rough + 4 * tokens * tokens * DOUBLE
    under = [3.0 * width * lost for width in widths]
    rest = tokens * tokens * (under[0] * under[1] + lost)
    if len(factors) == 1 and not factors[0].indexed and kernels.serves(cols):
        bound = kernels.Bound(
            row_scale=1 + 2 * of_rows + 4 * rough,
            row_loss=2 * widths[0] * lost,
            col_scale=1 + 2 * of_cols + 4 * rough,
            col_loss=2 * widths[1] * lost,
            terms=above(tokens),
            slack=slack,
            under_rows=under[0],
            under_cols=under[1],
            rest=rest,
            norm=above(8),
            floor=floor,
        )
        return Size(*kernels.gram_size(*factors[0].gram(), bound))
    lengths = [factor.lengths() for factor in factors]
    a, b = (torch.cat(sides, 1) for sides in zip(*lengths, strict=True))
    terms = (a * b).sum(1).mul_(above(tokens))
    total = factors[0].inner(factors[0])
    for position, factor in enumerate(factors[1:], 1):
        total = total + factor.inner(factor)
        for earlier in factors[:position]:
            total = total + 2 * factor.inner(earlier)
    square = terms.square().mul_(slack)
    square.add_(b.sum(1).square_(), alpha=under[0]).add_(a.sum(1).square_(), alpha=under[1])
    square.add_(rest)
    square.add_(total.clamp(min=0.0))
    norm = square.sqrt_().mul_(above(8))
    norm = torch.where(total.isfinite(), norm, torch.inf)
    if cols.dtype is torch.float32 and not cols.is_cuda:
        _measure_odd(factors, a, b, norm)
    return Size(torch.where(terms == 0, 0.0, norm.maximum(terms * floor)), terms)


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

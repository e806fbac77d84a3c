"""Products ``G_i = U_i^T V_i`` summed over tokens: their norms without (or with) forming them.

A linear map applied to T tokens of example i has the weight gradient ``sum_t u_t v_t^T`` with
``u_t`` the gradient of output token t and ``v_t`` its input. Three ways lead to its norm:

* T = 1: ``||G||^2 = ||u||^2 ||v||^2``;
* Gram: ``||G||^2 = sum_{s,t} (u_s . u_t)(v_s . v_t)``, about ``T^2 (r + c)`` multiplications;
* instantiate G, ``T r c`` multiplications, and keep it: the clipped sum is then ``sum_i c_i G_i``
  and needs no further product over tokens.

By Gram matrices, what is left of terms that cancel is known only to rounding errors of the terms:
``gamma (sum_t ||u_t|| ||v_t||)^2`` (see :func:`rounding`). That much is added to the squared norm,
so that an example is never taken to be smaller than it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Reading and writing one stored entry of G costs about as much as this many multiplications.
_TRAFFIC = 24
# G may take this many times the memory of the U and V it replaces.
_MEMORY = 1.0
# Most entries of one block of Gram matrices held at a time.
_BLOCK = 1 << 23


def upcast(tensor: Tensor) -> Tensor:
    """Half-precision tensors as float32; float32 and float64 as they are."""
    if tensor.dtype is torch.float32 or tensor.dtype is torch.float64:
        return tensor
    return tensor.float()


def row_norm(per_example: Tensor) -> Tensor:
    """Norm of each ``per_example[i]``, shape ``(N,)``."""
    flat = per_example if per_example.dim() == 2 else per_example.flatten(1)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1)
    return norms


def square_norm(per_example: Tensor) -> Tensor:
    """Squared norm of each ``per_example[i]``, shape ``(N,)``."""
    return row_norm(per_example).square_()


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


def gram_square_norm(u: Tensor, v: Tensor, convolved: bool = False) -> Tensor:
    """``||U_i^T V_i||^2`` by Gram matrices, in blocks of examples to bound the memory.

    ``convolved`` says that the sum is not a matrix product and may be coarser than the norm.
    """
    examples, tokens = u.shape[0], u.shape[1]
    block = max(1, _BLOCK // max(1, 2 * tokens * tokens))
    if block >= examples:
        return _gram_block(u, v, convolved)
    parts = [
        _gram_block(u[start : start + block], v[start : start + block], convolved)
        for start in range(0, examples, block)
    ]
    return torch.cat(parts)


def _gram_block(u: Tensor, v: Tensor, convolved: bool) -> Tensor:
    rows, cols = torch.bmm(u, u.mT), torch.bmm(v, v.mT)
    largest = (_diagonal(rows) * _diagonal(cols)).sqrt_().sum(1)
    slack = rounding(u, u.shape[2] + v.shape[2])
    squares = rows.mul_(cols).sum((1, 2)).add_(largest.square(), alpha=slack)
    if coarse(u, convolved) and not coarse(u):
        return squares.clamp_(min=0.0).sqrt_().add_(largest, alpha=2 * TF32).square_()
    return squares


def _diagonal(gram: Tensor) -> Tensor:
    return torch.diagonal(gram, dim1=1, dim2=2)


def rounding(like: Tensor, length: int, convolved: bool = False) -> float:
    """gamma: what sums of ``length`` products of this precision may be off by, relative to the sum
    of the terms' sizes; twice that, for the clipped sum is rounded too."""
    exact = torch.finfo(like.dtype).eps / 2
    return 2 * (exact * (length + 64) + (2 * TF32 if coarse(like, convolved) else 0.0))


TF32 = 2.0**-10
"""What a factor may be off by where a GPU multiplies float32 with ten bits."""


def coarse(like: Tensor, convolved: bool = False) -> bool:
    """Whether a GPU may multiply in TF32."""
    if not like.is_cuda or like.dtype is not torch.float32:
        return False
    cuda: Any = torch.backends.cuda.matmul
    try:
        return bool(cuda.allow_tf32 or (convolved and torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # set by two interfaces at once, of which one may allow it
        return True


def product_square_norm(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """``||U_i^T V_i||^2`` by the cheapest way, and the products where they were formed."""
    tokens, rows, cols = u.shape[1], u.shape[2], v.shape[2]
    if tokens == 1:
        norms = torch.linalg.vector_norm(u.flatten(1), dim=1)
        return norms.mul_(torch.linalg.vector_norm(v.flatten(1), dim=1)).square_(), None
    if instantiating_pays(tokens, rows, cols):
        products = torch.bmm(u.mT, v)
        return square_norm(products), products
    return gram_square_norm(u, v), None


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

    def inner(self, other: Factor) -> Tensor:
        """``<G_i, G'_i>`` for each example, by the Gram identity."""
        if self.indexed and other.indexed:
            rows = (self.rows.unsqueeze(2) == other.rows.unsqueeze(1)).to(self.cols.dtype)
        elif other.indexed:
            index = other.rows.unsqueeze(1).expand(-1, self.rows.shape[1], -1)
            rows = self.rows.gather(2, index)
        elif self.indexed:
            return other.inner(self)
        else:
            rows = torch.bmm(self.rows, other.rows.mT)
        return rows.mul_(torch.bmm(self.cols, other.cols.mT)).sum((1, 2))

    @property
    def largest(self) -> Tensor:
        """``sum_t ||r_t|| ||c_t||``: what the norm would be if no term cancelled another."""
        cols: Tensor = torch.linalg.vector_norm(self.cols, dim=2)
        if self.indexed:
            return cols.sum(1)
        return cols.mul_(torch.linalg.vector_norm(self.rows, dim=2)).sum(1)

    @property
    def width(self) -> int:
        return self.cols.shape[2] + (0 if self.indexed else self.rows.shape[2])


def shared_square_norm(factors: list[Factor]) -> Tensor:
    """``||sum_k G_i^(k)||^2`` of a parameter that several maps share, cross terms included."""
    dense = [factor for factor in factors if not factor.indexed]
    if len(dense) > 1:
        joined = Factor(
            torch.cat([factor.rows for factor in dense], 1),
            torch.cat([factor.cols for factor in dense], 1),
        )
        factors = [factor for factor in factors if factor.indexed] + [joined]
    if len(factors) == 1 and not factors[0].indexed:
        return product_square_norm(factors[0].rows, factors[0].cols)[0]
    slack = max(rounding(factor.cols, factor.width) for factor in factors)
    largest = sum([factor.largest for factor in factors[1:]], factors[0].largest)
    total = factors[0].inner(factors[0]).add_(largest.square_(), alpha=slack)
    for position, factor in enumerate(factors[1:], 1):
        total = total + factor.inner(factor)
        for earlier in factors[:position]:
            total = total + 2 * factor.inner(earlier)
    return total

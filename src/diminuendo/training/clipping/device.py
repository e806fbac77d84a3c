"""Terms of a clipped sum on a GPU: quick, checked there, and repaired there if need be.

The host waits for nothing: whether quick sums are close enough is a flag in the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from diminuendo.training.clipping import kernels, products
from diminuendo.training.clipping.contract import scaled
from diminuendo.training.clipping.products import Sides
from diminuendo.training.clipping.rounding import DOUBLE, cancelled, coarse
from diminuendo.training.clipping.sums import Term

# Products whose narrower side is at most this wide are summed in float64 at once.
_NARROW = 56
# Tokens that a product in TF32 adds up before float32 goes on, and entries of such parts held.
_SHORT, _HELD = 256, 1 << 26
# Fewest channels of both sides of a convolution for which it is worthwhile.
_CHANNELS = 16
# Fewest tokens of an example for which half precision is kept as it is.
_LEAST_TOKENS = 16


def serves(u: Tensor, v: Tensor) -> bool:
    """Whether tokens ``(N, T, *)`` are summed quickly and checked on their GPU."""
    if u.dim() != 3 or u.dtype is not v.dtype:
        return False
    if kernels.halved(u):
        return u.stride(2) == v.stride(2) == 1
    return kernels.serves(u) and coarse(u) and min(u.shape[2], v.shape[2]) > _NARROW


def keeps_half(grad: Tensor, tokens: int) -> bool:
    """Whether tokens in half precision are kept as they are, rather than in float32."""
    wide_sums = grad.dtype is not torch.float16 or not _adds_up_in_half()
    return kernels.halved(grad) and tokens >= _LEAST_TOKENS and wide_sums


def _adds_up_in_half() -> bool:
    """Whether PyTorch's products of float16 may add up in float16 (newer versions can be told)."""
    return bool(getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False))


class DeviceTerm(Term):
    """A term that is summed quickly, and measured without a wait."""

    checked = True

    def quick_into(self, out: Tensor | None, vectors: Tensor) -> Tensor:
        """The quick sum in float32, in ``out`` if that is given; `measure` with these vectors
        comes next."""
        raise NotImplementedError

    def measure(self, total: Tensor, vectors: Tensor, into: Tensor) -> None:
        """Add ``||(total - the exact sum)^T vectors||_F^2`` to ``into``."""
        raise NotImplementedError

    def repair(self, total: Tensor, holds: Tensor) -> None:
        """Take the sum again in float64 unless ``holds`` is true."""
        raise NotImplementedError


class DeviceProduct(DeviceTerm):
    """Tokens u and v, ``(N, T, *)``, whose products are added up, each example times its factor.

    In half precision they are multiplied as they are, and a factor meets the sum over some of an
    example's tokens. In TF32 the narrower side is scaled and rounded, and the products are those of
    the rounded numbers.
    """

    def __init__(self, u: Tensor, v: Tensor, factors: Tensor, terms: Tensor | None) -> None:
        self.terms, self.cancelled, self.factors = terms, cancelled(u), factors
        narrow = 1 if u.shape[2] <= v.shape[2] else 2
        self.sides = Sides(u, v, 0 if kernels.halved(u) else narrow)
        self.error = DOUBLE * (u.shape[:2].numel() + 8)

    def precise(self) -> Tensor:
        _, _, rows, cols = self.sides.sizes
        total = self.factors.new_empty(rows, cols, dtype=torch.float64)
        self.repair(total, torch.zeros(1, dtype=torch.bool, device=total.device))
        return total

    def quick_into(self, out: Tensor | None, vectors: Tensor) -> Tensor:  # noqa: ARG002
        u, v, which = self.sides
        if not which:
            return products.weighted(self.sides, self.factors.float(), out)
        u = scaled(u, self.factors) if which == 1 else u
        v = scaled(v, self.factors) if which == 2 else v
        return _in_short_parts(u.flatten(0, 1), v.flatten(0, 1), out)

    def probes(self) -> int:
        return self.sides.u.shape[2]

    def probe_error(self) -> float:
        tokens = self.sides.u.shape[:2].numel()
        return DOUBLE * (tokens + 3 * self.probes() + 8)

    def measure(self, total: Tensor, vectors: Tensor, into: Tensor) -> None:
        products.add_squares(self.sides, self.factors, total, vectors, into)

    def repair(self, total: Tensor, holds: Tensor) -> None:
        products.repair(self.sides, self.factors, total, holds)


def serves_convolutions(grads: Tensor, x: Tensor, groups: int) -> bool:
    """Whether a convolution's sum is quick and checked on its GPU: in TF32, of pictures."""
    wide = min(grads.shape[1], x.shape[1]) >= _CHANNELS
    return groups == 1 and x.dim() == 4 and kernels.serves(grads) and coarse(grads, True) and wide


class Patches(Protocol):
    """What makes patches of pictures."""

    def unfolded(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """``(N, entries, positions)``; memory that holds anything where ``skip`` is true."""
        ...


class DeviceConvolved(DeviceTerm):
    """Output gradients and inputs of a convolution, both rounded to TF32: products over positions
    of gradients and patches, some examples at a time."""

    def __init__(
        self, patches: Patches, grads: Tensor, x: Tensor, factors: Tensor, terms: Tensor | None
    ) -> None:
        self.terms, self.cancelled, self.factors = terms, cancelled(x), factors
        self.patches, self.grads, self.x = patches, grads, x
        self.error = DOUBLE * (grads.numel() // grads.shape[1] + 8)
        self._exact: list[Tensor] = []

    def _sides(self, skip: Tensor | None = None) -> Iterator[tuple[Sides, Tensor]]:
        entries = self.patches.unfolded(self.x[:1]).numel()
        step = max(1, _HELD // entries)
        given = self.grads, self.x, self.factors
        blocks = zip(*[torch.split(part, step) for part in given], strict=True)
        for grads, x, factors in blocks:
            yield Sides(grads.flatten(2).mT, self.patches.unfolded(x, skip).mT), factors

    def quick_into(self, out: Tensor | None, vectors: Tensor) -> Tensor:
        total: Tensor | None = None
        self._exact = []
        for sides, factors in self._sides():
            self._exact.append(products.mixed(sides, factors, vectors))
            part = products.weighted(sides, factors.float())
            total = part if total is None else total.add_(part)
        assert total is not None
        return total if out is None else out.view(total.shape).copy_(total)

    def precise(self) -> Tensor:
        return self._repaired(torch.zeros(1, dtype=torch.bool, device=self.x.device))

    def probes(self) -> int:
        return self.grads.shape[1]

    def probe_error(self) -> float:
        return DOUBLE * (self.grads.numel() // self.grads.shape[1] + 3 * self.probes() + 8)

    def measure(self, total: Tensor, vectors: Tensor, into: Tensor) -> None:
        # `_exact` stays: what a lane reads is not to be written over before all lanes have met
        products.square_of_difference(torch.cat(self._exact), total, vectors, into)

    def repair(self, total: Tensor, holds: Tensor) -> None:
        total.copy_(torch.where(holds, total, self._repaired(holds)))

    def _repaired(self, holds: Tensor) -> Tensor:
        """The sum in float64, or anything where the quick one holds."""
        rows, entries = self.grads.shape[1], self.patches.unfolded(self.x[:1]).shape[1]
        total = self.factors.new_zeros(rows, entries, dtype=torch.float64)
        for sides, factors in self._sides(holds):
            products.repair(sides, factors, total, holds, added=True)
        return total


def _in_short_parts(u: Tensor, v: Tensor, out: Tensor | None) -> Tensor:
    """``u^T v`` of ``(rows, *)`` in TF32, a few hundred rows at a time, those added in float32."""
    rows = u.shape[0] // _SHORT * _SHORT
    total = out
    fresh = True
    step = max(1, _HELD // (u.shape[1] * v.shape[1]))
    left = torch.split(u[:rows].view(-1, _SHORT, u.shape[1]), step)
    right = torch.split(v[:rows].view(-1, _SHORT, v.shape[1]), step)
    for some, others in zip(left, right, strict=True) if rows else ():
        part = torch.bmm(some.mT, others)
        if fresh:
            total = part.sum(0) if total is None else torch.sum(part, 0, out=total)
        else:
            assert total is not None
            total.add_(part.sum(0))
        fresh = False
    if rows < u.shape[0]:
        part = torch.mm(u[rows:].t(), v[rows:])
        if total is None:
            total = part
        else:
            total.copy_(part) if fresh else total.add_(part)
    assert total is not None
    return total

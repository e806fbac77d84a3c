"""Floating-point bounds: norms that are never too small, and units of error.

Everything here is proven in docs/rounding.md, which names what is assumed of the hardware. Norms
are float64 whatever the type of the data: the square of a float32 number is exact in float64, and
neither overflows nor underflows there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from diminuendo.training.clipping import kernels
from diminuendo.training.cores import few

DOUBLE = 2.0**-53
"""Unit roundoff of float64."""
TF32 = 2.0**-11
"""Largest relative error of a float32 number rounded to TF32, with its ten stored bits."""
_UNITS = {torch.float32: 2.0**-24, torch.float64: DOUBLE}
_SMALLEST = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022}
_CANCELLED = {torch.float32: 2.0**11, torch.float64: 2.0**16}
_CACHED, _PER_KERNEL = 1 << 17, 1 << 26
# Entries whose squares may be added up in float32, and the norms for which that is safe.
_STRETCH = 1024
_TAME = 2.0**-40, 2.0**60
_HALF = 2.0**-7
_TENSOR_CORE = 2.0**-22  # they cut bits off a sum instead of rounding it


def cached(like: Tensor) -> int:
    """How many rows of a matrix to convert to float64 at a time: what stays in a CPU's cache, and
    on a GPU what is worth a kernel."""
    return max(1, (_PER_KERNEL if like.is_cuda else _CACHED) // max(1, like.shape[1]))


def unit(like: Tensor) -> float:
    """Unit roundoff of one addition in a matrix product of this type."""
    if coarse(like) or kernels.halved(like):
        return _TENSOR_CORE
    return _HALF if _reduced(like) else _UNITS[like.dtype]


def single_unit(like: Tensor) -> float:
    """Unit roundoff of an addition outside of matrix products."""
    return _UNITS[_summed(like)]


def _reduced(like: Tensor) -> bool:
    """Whether a CPU may multiply float32 matrices with fewer bits (bfloat16, if asked to)."""
    if like.is_cuda or like.dtype is not torch.float32:
        return False
    backends: Any = torch.backends
    try:
        chosen = [
            backends.mkldnn.matmul.fp32_precision,
            backends.mkldnn.fp32_precision,
            backends.fp32_precision,
        ]
    except AttributeError:  # an older torch
        return torch.get_float32_matmul_precision() != "highest"
    decided = next((precision for precision in chosen if precision != "none"), "ieee")
    return bool(decided != "ieee")


def smallest(like: Tensor) -> float:
    """What one operation may lose to underflow, absolutely."""
    return _SMALLEST[_summed(like)]


def cancelled(like: Tensor) -> float:
    """How many times what is taken for the norm ``sum_t ||u_t|| ||v_t||`` is at most: an example
    whose terms cancel further is clipped as if they did not."""
    return _CANCELLED[_summed(like)]


def _summed(like: Tensor) -> torch.dtype:
    """The type in which products of such numbers are added up."""
    return torch.float32 if kernels.halved(like) else like.dtype


def gamma(length: int, unit_: float) -> float:
    """``n u / (1 - n u)``: the relative error of a sum of n products, in any order."""
    product = length * unit_
    return product / (1 - product) if product < 0.5 else math.inf


def above(length: int) -> float:
    """A factor above 1 that outweighs ``length`` roundings in float64."""
    return 1.0 + 1.01 * (length + 8) * DOUBLE


def row_norm(per_example: Tensor) -> Tensor:
    """An upper bound for the norm of each ``per_example[i]``, float64, shape ``(N,)``.

    Too large by at most 2^-13 of the norm (docs/rounding.md, lemma 1).
    """
    flat = per_example if per_example.dim() == 2 else per_example.flatten(1)
    if (kernels.serves(flat) or kernels.halved(flat)) and flat.numel():
        return kernels.row_squares(flat).sqrt_().mul_(above(flat.shape[1]))
    if flat.dtype is torch.float64 or flat.is_cuda or not flat.numel():
        return _double_norm(flat)
    with few(flat.numel()):
        norms = _single_norm(flat)
    shortest, longest = torch.aminmax(norms)
    if not (shortest.item() > _TAME[0] and longest.item() < _TAME[1]):  # NaN: some are odd
        odd = ~((norms > _TAME[0]) & (norms < _TAME[1]))
        which = odd.nonzero().squeeze(1)
        norms[which] = _double_norm(flat[which])
    return norms


def _single_norm(flat: Tensor) -> Tensor:
    """Squares added up in float32 for short stretches, and those in float64.

    Not to be used where squares could overflow, or where enough of them underflow to matter.
    """
    length = flat.shape[1]
    short = min(length, _STRETCH)
    whole = length - length % short
    measured = flat if whole == length else flat[:, :whole]
    measured = measured.view(len(flat), -1, short)
    parts = [torch.linalg.vector_norm(measured, dim=2).double()]
    if whole < length:
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
        parts.append(rest.double())
    joint = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    norms = joint.squeeze(1) if joint.shape[1] == 1 else torch.linalg.vector_norm(joint, dim=1)
    lost = length * _SMALLEST[torch.float32] / _TAME[0] ** 2
    return norms.mul_(above(length) + gamma(short + 4, _UNITS[torch.float32]) + lost)


def _double_norm(flat: Tensor) -> Tensor:
    parts = [
        torch.linalg.vector_norm(part.double(), dim=1) for part in torch.split(flat, cached(flat))
    ]
    norms: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    norms.mul_(above(flat.shape[1]))
    if flat.dtype is torch.float64 and flat.shape[1]:
        # Squares of numbers under 1e-154 underflow; zeros stay zeros.
        floor = math.sqrt(flat.shape[1] * _SMALLEST[torch.float64])
        norms.add_(flat.abs().amax(1).clamp_(max=floor))
        norms.add_(torch.where(norms > 0, floor, 0.0))
    return norms


def joint_norm(parts: list[Tensor]) -> Tensor:
    """An upper bound for the norm of each example over all parts, each ``(N,)`` in float64."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return torch.hypot(*parts).mul_(above(4))
    stacked = torch.cat(parts).view(len(parts), -1)
    with few(stacked.numel()):
        # torch.linalg.vector_norm takes six times as long for a few parts of many examples.
        return stacked.square_().sum(0).sqrt_().mul_(above(len(parts)))


def coarse(like: Tensor, convolved: bool = False) -> bool:
    """Whether a GPU may multiply matrices (or, if ``convolved``, convolve) in TF32."""
    if not like.is_cuda or like.dtype is not torch.float32:
        return False
    cuda: Any = torch.backends.cuda.matmul
    try:
        return bool(cuda.allow_tf32 or (convolved and torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # set by two interfaces at once, of which one may allow it
        return True


def to_tf32(tensor: Tensor) -> Tensor:
    """Each float32 entry rounded to the nearest TF32 number, so that TF32 products are exact.

    Numbers above 2^64, or that are not finite, become infinite, so that their examples are left
    out: their factors would underflow.
    """
    if kernels.serves(tensor) and tensor.numel():
        return kernels.to_tf32(tensor)
    bits = tensor.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(tensor.abs() < 2.0**64, rounded, torch.inf)

"""GPU kernels that pass over the activations once instead of several times, and draw noise.

They need Triton, which comes with PyTorch's CUDA builds; `available` says whether it is installed.

Most memory traffic is at a wide layer before a narrow one (a hidden layer before the classes).
`rectified_product` applies its activation while the product is written; `backward` computes the
derivatives with respect to it, masks them and takes both norms; `add_sums` adds up the narrow
layer's clipped gradients. `Philox` draws what `normal_` of a newly seeded generator draws, for many
seeds in one kernel.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

available = importlib.util.find_spec("triton") is not None
NARROW = 16
"""The largest number of outputs for which `backward` and `add_sums` can serve a layer."""

if available:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _backward(  # type: ignore[no-untyped-def]
        slope,
        w,
        value,
        out,
        value_norms,
        norms,
        n,
        K_STRIDE: tl.constexpr,
        N_STRIDE: tl.constexpr,
        H: tl.constexpr,
        C: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        k = tl.program_id(1).to(tl.int64)
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        norm = tl.zeros((ROWS, COLS), tl.float32)
        value_norm = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, H, COLS):
            cols = start + tl.arange(0, COLS)
            inside = (rows[:, None] < n) & (cols[None, :] < H)
            old = value + k * K_STRIDE + rows[:, None].to(tl.int64) * N_STRIDE + cols[None, :]
            active = tl.load(old, inside, 0.0)
            value_norm += active * active
            total = tl.zeros((ROWS, COLS), tl.float32)
            for c in tl.static_range(C):
                left = tl.load(slope + k * n * C + rows * C + c, rows < n, 0.0)
                right = tl.load(w + k * C * H + c * H + cols, cols < H, 0.0)
                total += left[:, None] * right[None, :]
            total = tl.where(active > 0, total, 0.0)
            norm += total * total
            tl.store(out + k * n * H + rows[:, None] * H + cols[None, :], total, inside)
        tl.store(norms + k * n + rows, tl.sqrt(tl.sum(norm, 1)), rows < n)
        tl.store(value_norms + k * n + rows, tl.sqrt(tl.sum(value_norm, 1)), rows < n)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_sums(  # type: ignore[no-untyped-def]
        slope,
        factors,
        value,
        sums,
        n,
        K_STRIDE: tl.constexpr,
        N_STRIDE: tl.constexpr,
        H: tl.constexpr,
        C: tl.constexpr,
        WIDE: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        k = tl.program_id(1).to(tl.int64)
        cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
        classes = tl.arange(0, WIDE)
        total = tl.zeros((WIDE, COLS), tl.float32)
        for start in range(0, n, ROWS):
            rows = start + tl.arange(0, ROWS)
            left = slope + k * n * C + rows[None, :] * C + classes[:, None]
            weights = tl.load(left, (classes[:, None] < C) & (rows[None, :] < n), 0.0)
            weights *= tl.load(factors + k * n + rows, rows < n, 0.0)[None, :]
            place = value + k * K_STRIDE + rows[:, None].to(tl.int64) * N_STRIDE + cols[None, :]
            active = tl.load(place, (rows[:, None] < n) & (cols[None, :] < H), 0.0)
            total += tl.dot(weights, active, input_precision="ieee")
        place = sums + k * C * H + classes[:, None] * H + cols[None, :]
        inside = (classes[:, None] < C) & (cols[None, :] < H)
        tl.store(place, tl.load(place, inside, 0.0) + total, inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _normal(seeds, stds, order, out, size, threads, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        k = tl.program_id(1)
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(order + place, place < size, 0)
        cycle = number // threads
        thread = number % threads
        zero = thread * 0
        a, b, c, d = tl.philox(tl.load(seeds + k), cycle // 4, zero, thread, zero)
        second = cycle % 4 >= 2
        first, angle = tl.where(second, c, a), tl.where(second, d, b)
        unit = 2.3283064365386963e-10
        u = first.to(tl.uint32, bitcast=True).to(tl.float32) * unit + unit / 2
        v = angle.to(tl.uint32, bitcast=True).to(tl.float32) * unit + unit / 2
        v *= 6.283185307179586
        radius = tl.sqrt(-2.0 * tl.log(u)) * tl.load(stds + k)
        value = tl.where(cycle % 2 == 0, tl.sin(v), tl.cos(v)) * radius
        tl.store(out + k.to(tl.int64) * size + place, value, place < size)


def serves_sums(value: Tensor, matrix: Tensor) -> bool:
    """Whether `add_sums` can serve a layer with this (in, out) matrix and these inputs."""
    return (
        available
        and value.is_cuda
        and value.dtype is torch.float32
        and value.stride(2) == 1
        and matrix.shape[2] <= NARROW
        and matrix.mT.is_contiguous()
    )


def serves_backward(value: Tensor, matrix: Tensor, activation: str) -> bool:
    """Whether `backward` can serve a layer with this (in, out) matrix after this activation."""
    return activation == "relu" and serves_sums(value, matrix)


def backward(
    slope: Tensor, matrix: Tensor, value: Tensor, out: Tensor, rows: int = 4, cols: int = 1024
) -> tuple[Tensor, Tensor]:
    """Write slope·matrixᵀ into `out` where `value` is positive, else zero; norms of value and out.

    For slopes (k, n, c), a matrix (k, h, c) that is stored transposed, and values (k, n, h).
    """
    k, n, h = value.shape
    norms, value_norms = value.new_empty(k, n), value.new_empty(k, n)
    sizes = (value.stride(0), value.stride(1), h, slope.shape[2], rows, cols)
    grid = (triton.cdiv(n, rows), k)
    _backward[grid](slope.contiguous(), matrix.mT, value, out, value_norms, norms, n, *sizes)
    return value_norms, norms


def add_sums(
    slope: Tensor, factors: Tensor, value: Tensor, sums: Tensor, rows: int = 32, cols: int = 128
) -> None:
    """Add Σ_i c_i g_i a_iᵀ to `sums` (k, c, h), for slopes (k, n, c) and values (k, n, h)."""
    k, n, h = value.shape
    sizes = (value.stride(0), value.stride(1), h, slope.shape[2], NARROW, rows, cols)
    _add_sums[(triton.cdiv(h, cols), k)](slope.contiguous(), factors, value, sums, n, *sizes)


def serves_product(inputs: Tensor, activation: str) -> bool:
    """Whether `rectified_product` serves a first layer: all replicas share inputs (k, n, d)."""
    return (
        hasattr(torch, "_addmm_activation")
        and inputs.is_cuda
        and activation == "relu"
        and (inputs.stride(0) == 0 or len(inputs) == 1)
    )


def rectified_product(inputs: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
    """relu(inputs·matrix) of shared inputs (n, d) for matrices (k, d, h), in one operation.

    The last input is a constant one. The result (k, n, h) is a view of (n, k, h).
    """
    k, d, h = matrix.shape
    wide = matrix.transpose(0, 1).reshape(d, k * h)
    flat = out.view(len(inputs), k * h)
    torch._addmm_activation(wide[-1], inputs[:, :-1], wide[:-1], out=flat)
    return flat.view(len(inputs), k, h).transpose(0, 1)


@cache
def philox(size: int, device: torch.device) -> Philox | None:
    """A `Philox` for rows of this size, or None where it does not draw what `normal_` draws."""
    if not (available and device.type == "cuda"):
        return None
    generator = Philox(size, device)
    return generator if generator.exact else None


class Philox:
    """Rows of normal numbers as `normal_` draws them from newly seeded CUDA generators.

    How PyTorch maps elements to counters may change, so it is compared once with `normal_` itself:
    `exact` says whether they agree.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.order = torch.arange(size, dtype=torch.int32, device=device)
        facts: Any = torch.cuda.get_device_properties(device)
        most = facts.multi_processor_count * (facts.max_threads_per_multi_processor // 256)
        self.threads = 256 * min(most, -(-size // 256))
        seed = torch.tensor([1234567890123456789], device=device)
        own = torch.empty(1, size, device=device)
        self.fill(own, self.order, seed, torch.ones(1, device=device))
        generator = torch.Generator(device).manual_seed(int(seed))
        true = torch.empty(size, device=device).normal_(generator=generator)
        self.exact = bool(torch.allclose(own[0], true, rtol=1e-4, atol=1e-5))

    def fill(self, rows: Tensor, order: Tensor, seeds: Tensor, stds: Tensor) -> None:
        """Fill rows, one for each seed: entry j becomes number order[j] of the row's generator."""
        block, size = 1024, order.numel()
        grid = (triton.cdiv(size, block), rows.shape[0])
        _normal[grid](seeds, stds, order, rows, size, self.threads, block)

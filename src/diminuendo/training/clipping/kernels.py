"""Norms and roundings on a GPU, each in one pass over the data and without a wait for the host.

Needs Triton, which comes with PyTorch's CUDA builds; `available` says whether it is there. Sums are
float64, as docs/rounding.md assumes.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

available = importlib.util.find_spec("triton") is not None
_BLOCK = 1024
# Entries of a row that one program adds up: rows that are longer go to several programs.
_CHUNK = 1 << 14

if available:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _to_tf32(x, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, at < size, 0.0)
        bits = (value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        rounded = bits.to(tl.float32, bitcast=True)
        tl.store(
            out + at,
            tl.where(tl.abs(value) < 18446744073709551616.0, rounded, float("inf")),
            at < size,
        )

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _squares(x, out, length, parts, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        total = tl.zeros([BLOCK], tl.float64)
        first = part * CHUNK
        for offset in range(0, min(CHUNK, length - first), BLOCK):
            at = first + offset + tl.arange(0, BLOCK)
            value = tl.load(x + row * length + at, at < length, 0.0).to(tl.float64)
            total += value * value
        tl.store(out + row * parts + part, tl.sum(total))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _gram(r, c, numbers, norms, terms, tokens, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """One example: `Bound`'s numbers, in their order, are in float64 behind `numbers`."""
        example = tl.program_id(0).to(tl.int64)
        start, size = example * tokens * tokens, tokens * tokens
        products = tl.zeros([BLOCK], tl.float64)
        for offset in range(0, size, BLOCK):
            at = offset + tl.arange(0, BLOCK)
            left = tl.load(r + start + at, at < size, 0.0).to(tl.float64)
            products += left * tl.load(c + start + at, at < size, 0.0).to(tl.float64)
        total = tl.sum(products)
        row_scale, row_loss = tl.load(numbers + 0), tl.load(numbers + 1)
        col_scale, col_loss = tl.load(numbers + 2), tl.load(numbers + 3)
        sum_a = tl.zeros([BLOCK], tl.float64)
        sum_b = tl.zeros([BLOCK], tl.float64)
        sum_ab = tl.zeros([BLOCK], tl.float64)
        for offset in range(0, tokens, BLOCK):
            t = offset + tl.arange(0, BLOCK)
            own = start + t * (tokens + 1)
            inside = t < tokens
            a = tl.load(r + own, inside, 0.0).to(tl.float64)
            b = tl.load(c + own, inside, 0.0).to(tl.float64)
            a = tl.where(inside, tl.sqrt((a + row_loss) * row_scale), 0.0)
            b = tl.where(inside, tl.sqrt((b + col_loss) * col_scale), 0.0)
            sum_a += a
            sum_b += b
            sum_ab += a * b
        a, b = tl.sum(sum_a), tl.sum(sum_b)
        bulk = tl.sum(sum_ab) * tl.load(numbers + 4)
        square = tl.where(total > 0.0, total, 0.0) + bulk * bulk * tl.load(numbers + 5)
        square += b * b * tl.load(numbers + 6) + a * a * tl.load(numbers + 7)
        square += tl.load(numbers + 8)
        norm = tl.sqrt(square) * tl.load(numbers + 9)
        least = bulk * tl.load(numbers + 10)
        norm = tl.where(norm > least, norm, least)
        tl.store(norms + example, tl.where(total - total == 0.0, norm, float("inf")))
        tl.store(terms + example, bulk)


class Bound(NamedTuple):
    """The numbers of docs/rounding.md, lemma 3, in the order in which the kernel reads them.

    A length is the root of (diagonal entry + loss) x scale; `terms` and `norm` enlarge the results,
    `slack`, `under_rows` and `under_cols` multiply (Σab)², (Σb)² and (Σa)², `rest` is added to the
    square, and `floor` times Σab is the least norm.
    """

    row_scale: float
    row_loss: float
    col_scale: float
    col_loss: float
    terms: float
    slack: float
    under_rows: float
    under_cols: float
    rest: float
    norm: float
    floor: float


def serves(like: Tensor) -> bool:
    """Whether the kernels are for this tensor: float32 on a GPU."""
    return available and like.is_cuda and like.dtype is torch.float32


def to_tf32(x: Tensor) -> Tensor:
    """Each entry rounded to TF32, in one pass; `rounding.to_tf32` says how."""
    x = x.contiguous()
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _to_tf32[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), BLOCK=_BLOCK)
    return out


def row_squares(flat: Tensor) -> Tensor:
    """The sum of squares of each row ``(N, length)``, added up in float64, shape ``(N,)``."""
    flat = flat.contiguous()
    rows, length = flat.shape
    parts = triton.cdiv(length, _CHUNK)
    out = torch.empty(rows, parts, dtype=torch.float64, device=flat.device)
    block = min(_BLOCK, triton.next_power_of_2(length))
    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        _squares[(rows, parts)](flat, out, length, parts, CHUNK=_CHUNK, BLOCK=block)
    return out.squeeze(1) if parts == 1 else out.sum(1)


def gram_size(rows: Tensor, cols: Tensor, bound: Bound) -> tuple[Tensor, Tensor]:
    """Norm and Σab for each example, from its Gram matrices ``(N, T, T)``; both ``(N,)``."""
    examples, tokens = rows.shape[:2]
    out = torch.empty(2, examples, dtype=torch.float64, device=rows.device)
    block = min(_BLOCK, triton.next_power_of_2(tokens * tokens))
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _gram[(examples,)](
            rows.contiguous(),
            cols.contiguous(),
            _numbers(bound, rows.device),
            out[0],
            out[1],
            tokens,
            BLOCK=block,
        )
    return out[0], out[1]


@cache
def _numbers(bound: Bound, device: torch.device) -> Tensor:
    return torch.tensor(bound, dtype=torch.float64, device=device)

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
# Tokens in a tile of a Gram matrix, examples of a program that finishes norms, numbers that a
# program scales.
_TOKENS, _LANES, _SPAN = 64, 32, 1 << 12

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
    def _inner(  # type: ignore[no-untyped-def]
        x,
        s,
        t,
        tokens,
        width,
        of_token,
        TOKENS: tl.constexpr,
        WIDTH: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """Inner products of tokens: short sums in matrix units, and of those in float32."""
        k = tl.arange(0, WIDTH)
        total = tl.zeros([TOKENS, TOKENS], tl.float32)
        for start in range(0, width, WIDTH):
            at = start + k
            a = x + s.to(tl.int64)[:, None] * of_token + at[None, :]
            b = x + t.to(tl.int64)[None, :] * of_token + at[:, None]
            a = tl.load(a, (s[:, None] < tokens) & (at[None, :] < width), 0.0)
            b = tl.load(b, (t[None, :] < tokens) & (at[:, None] < width), 0.0)
            total += tl.dot(a, b, input_precision=PRECISION)
        return total

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _lengths(own, inside, loss, scale):  # type: ignore[no-untyped-def]
        """Upper bounds of the tokens' lengths, from their inner products with themselves."""
        return tl.where(inside, tl.sqrt((own.to(tl.float64) + loss) * scale), 0.0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _gram_of_tokens(  # type: ignore[no-untyped-def]
        u,
        v,
        numbers,
        out,
        tokens,
        rows,
        cols,
        u_example,
        u_token,
        v_example,
        v_token,
        pairs,
        TOKENS: tl.constexpr,
        WIDTH: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """One example, some tokens against some: their part of the four sums behind a `Bound`."""
        pair, example = tl.program_id(0) % pairs, (tl.program_id(0) // pairs).to(tl.int64)
        first, second = 0, pair
        while second > first:
            first += 1
            second -= first
        s = first * TOKENS + tl.arange(0, TOKENS)
        t = second * TOKENS + tl.arange(0, TOKENS)
        r = _inner(u + example * u_example, s, t, tokens, rows, u_token, TOKENS, WIDTH, PRECISION)
        c = _inner(v + example * v_example, s, t, tokens, cols, v_token, TOKENS, WIDTH, PRECISION)
        total = tl.sum(r.to(tl.float64) * c.to(tl.float64))
        at = out + (example * pairs + pair) * 4
        if first == second:
            diagonal = s[:, None] == t[None, :]
            own_r = tl.sum(tl.where(diagonal, r, 0.0), 1)
            own_c = tl.sum(tl.where(diagonal, c, 0.0), 1)
            a = _lengths(own_r, s < tokens, tl.load(numbers + 1), tl.load(numbers + 0))
            b = _lengths(own_c, s < tokens, tl.load(numbers + 3), tl.load(numbers + 2))
            tl.store(at, total)
            tl.store(at + 1, tl.sum(a * b))
            tl.store(at + 2, tl.sum(a))
            tl.store(at + 3, tl.sum(b))
        else:
            tl.store(at, 2.0 * total)
            for k in tl.static_range(1, 4):
                tl.store(at + k, total * 0.0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _gram_of_matrices(r, c, numbers, out, tokens, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The same from an example's two Gram matrices, all of it."""
        example = tl.program_id(0).to(tl.int64)
        start, size = example * tokens * tokens, tokens * tokens
        products = tl.zeros([BLOCK], tl.float64)
        for offset in range(0, size, BLOCK):
            at = offset + tl.arange(0, BLOCK)
            left = tl.load(r + start + at, at < size, 0.0).to(tl.float64)
            products += left * tl.load(c + start + at, at < size, 0.0).to(tl.float64)
        sum_a = tl.zeros([BLOCK], tl.float64)
        sum_b = tl.zeros([BLOCK], tl.float64)
        sum_ab = tl.zeros([BLOCK], tl.float64)
        for offset in range(0, tokens, BLOCK):
            t = offset + tl.arange(0, BLOCK)
            own = start + t * (tokens + 1)
            inside = t < tokens
            a = tl.load(r + own, inside, 0.0)
            b = tl.load(c + own, inside, 0.0)
            a = _lengths(a, inside, tl.load(numbers + 1), tl.load(numbers + 0))
            b = _lengths(b, inside, tl.load(numbers + 3), tl.load(numbers + 2))
            sum_a += a
            sum_b += b
            sum_ab += a * b
        at = out + example * 4
        tl.store(at, tl.sum(products))
        tl.store(at + 1, tl.sum(sum_ab))
        tl.store(at + 2, tl.sum(sum_a))
        tl.store(at + 3, tl.sum(sum_b))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _finish(sums, numbers, norms, terms, examples, pairs, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
        """Norm and Σab of each example; `Bound`'s numbers, in their order, are float64."""
        example = tl.program_id(0) * LANES + tl.arange(0, LANES)
        inside = example < examples
        total = tl.zeros([LANES], tl.float64)
        sum_ab, sum_a, sum_b = total, total, total
        for pair in range(pairs):
            at = sums + (example.to(tl.int64) * pairs + pair) * 4
            total += tl.load(at, inside, 0.0)
            sum_ab += tl.load(at + 1, inside, 0.0)
            sum_a += tl.load(at + 2, inside, 0.0)
            sum_b += tl.load(at + 3, inside, 0.0)
        bulk = sum_ab * tl.load(numbers + 4)
        square = tl.where(total > 0.0, total, 0.0) + bulk * bulk * tl.load(numbers + 5)
        square += sum_b * sum_b * tl.load(numbers + 6) + sum_a * sum_a * tl.load(numbers + 7)
        square += tl.load(numbers + 8)
        norm = tl.sqrt(square) * tl.load(numbers + 9)
        least = bulk * tl.load(numbers + 10)
        norm = tl.where(norm > least, norm, least)
        norm = tl.where(bulk == 0.0, 0.0, norm)
        finite = (tl.abs(total) < float("inf")) & (bulk < float("inf"))
        tl.store(norms + example, tl.where(finite, norm, float("inf")), inside)
        tl.store(terms + example, bulk, inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _zero_rows(x, keep, length, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Zeros over the rows that are not kept; programs of the others end at once."""
        row = tl.program_id(0).to(tl.int64)
        if tl.load(keep + row) == 0:
            at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
            zeros = tl.zeros([CHUNK], tl.float32).to(x.dtype.element_ty)
            tl.store(x + row * length + at, zeros, at < length)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _scale_rows(x, factors, out, length, ROUND: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        factor = tl.load(factors + row).to(tl.float32)
        value = tl.load(x + row * length + at, at < length, 0.0).to(tl.float32) * factor
        if ROUND:
            bits = (value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
            value = bits.to(tl.float32, bitcast=True)
        value = tl.where(factor != 0.0, value, 0.0)
        tl.store(out + row * length + at, value.to(out.dtype.element_ty), at < length)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _measured(x, out, row, length, ROUND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """The sum of a row's squares; the row goes to ``out``, rounded to TF32 if ``ROUND``."""
        total = tl.zeros([BLOCK], tl.float64)
        for start in range(0, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * length + at, at < length, 0.0)
            if ROUND:
                bits = (value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
                small = tl.abs(value) < 18446744073709551616.0
                value = tl.where(small, bits.to(tl.float32, bitcast=True), float("inf"))
                tl.store(out + row * length + at, value, at < length)
            wide = value.to(tl.float64)
            total += wide * wide
        return tl.sum(total)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _row_pair(  # type: ignore[no-untyped-def]
        u,
        v,
        u_out,
        v_out,
        norms,
        products,
        rows,
        cols,
        numbers,
        ROUND: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        left = tl.sqrt(_measured(u, u_out, row, rows, ROUND, BLOCK)) * tl.load(numbers)
        right = tl.sqrt(_measured(v, v_out, row, cols, ROUND, BLOCK)) * tl.load(numbers + 1)
        tl.store(norms + row, left)
        tl.store(products + row, left * right * tl.load(numbers + 2))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _clip(  # type: ignore[no-untyped-def]
        parts,
        count,
        real,
        norms,
        finite,
        factors,
        lower,
        examples,
        numbers,
        REAL: tl.constexpr,
        LANES: tl.constexpr,
    ):
        """Joint norms and their factors; `clip_norms` says which."""
        at = tl.program_id(0) * LANES + tl.arange(0, LANES)
        inside = at < examples
        square = tl.zeros([LANES], tl.float64)
        for part in range(count):
            value = tl.load(parts + part * examples + at, inside, 0.0)
            square += value * value
        norm = tl.sqrt(square) * tl.load(numbers)
        fine = norm < float("inf")
        factor = tl.load(numbers + 1) / (norm + tl.load(numbers + 2))
        most = tl.load(numbers + 3)
        factor = tl.where(factor < most, factor, most)
        keep = fine
        if REAL:
            keep = keep & (tl.load(real + at, inside, 0) != 0)
        factor = tl.where(keep, factor, 0.0)
        tl.store(norms + at, norm, inside)
        tl.store(finite + at, fine, inside)
        tl.store(factors + at, factor, inside)
        tl.store(lower + at, (factor * tl.load(numbers + 4)).to(tl.float32), inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _unfold(  # type: ignore[no-untyped-def]
        x,
        out,
        skip,
        high,
        wide,
        positions,
        across,
        stride_h,
        stride_w,
        pad_h,
        pad_w,
        dilation_h,
        dilation_w,
        SKIPS: tl.constexpr,
        TAPS_H: tl.constexpr,
        TAPS_W: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """The patches of one channel of one picture; nothing if it is to be skipped."""
        if SKIPS:  # noqa: SIM102  otherwise there is nothing to load
            if tl.load(skip) != 0:
                return
        plane = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row, col = (at // across) * stride_h - pad_h, (at % across) * stride_w - pad_w
        x += plane * high * wide
        out += plane * (TAPS_H * TAPS_W) * positions
        for tap in tl.static_range(TAPS_H * TAPS_W):
            h = row + (tap // TAPS_W) * dilation_h
            w = col + (tap % TAPS_W) * dilation_w
            inside = (h >= 0) & (h < high) & (w >= 0) & (w < wide) & (at < positions)
            tl.store(
                out + tap * positions + at, tl.load(x + h * wide + w, inside, 0.0), at < positions
            )


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


def halved(like: Tensor) -> bool:
    """Whether a tensor of half precision may stay as it is: on a GPU, whose matrix units multiply
    such numbers exactly and add up in float32."""
    return available and like.is_cuda and like.dtype in (torch.bfloat16, torch.float16)


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


def width_of(like: Tensor) -> int:
    """Columns whose products matrix units add up before the sum goes on in float32."""
    return 128 if like.element_size() == 2 else 64


def gram_size(u: Tensor, v: Tensor, bound: Bound, *, rounded: bool) -> tuple[Tensor, Tensor]:
    """Norm of ``U_i^T V_i`` and Σab for each example, ``(N,)`` each, from its tokens ``(N, T, *)``.

    Gram matrices are formed a tile at a time and not kept. Inner products are sums of
    `width_of` products in a matrix unit, and of those in float32. ``rounded`` says whether the
    numbers are TF32.
    """
    examples, tokens, rows = u.shape
    tiles = triton.cdiv(tokens, _TOKENS)
    pairs = tiles * (tiles + 1) // 2
    numbers = _doubles(bound, u.device)
    sums = torch.empty(examples, pairs, 4, dtype=torch.float64, device=u.device)
    with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]
        _gram_of_tokens[(pairs * examples,)](
            u,
            v,
            numbers,
            sums,
            tokens,
            rows,
            v.shape[2],
            *u.stride()[:2],
            *v.stride()[:2],
            pairs,
            TOKENS=_TOKENS,
            WIDTH=width_of(u),
            PRECISION="tf32" if rounded else "ieee",
            num_warps=4,
            num_stages=3,
        )
    return _finished(sums, numbers)


def gram_size_of_matrices(rows: Tensor, cols: Tensor, bound: Bound) -> tuple[Tensor, Tensor]:
    """The same from Gram matrices ``(N, T, T)`` of the two sides."""
    examples, tokens = rows.shape[:2]
    numbers = _doubles(bound, rows.device)
    sums = torch.empty(examples, 1, 4, dtype=torch.float64, device=rows.device)
    block = min(_BLOCK, triton.next_power_of_2(tokens * tokens))
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _gram_of_matrices[(examples,)](
            rows.contiguous(), cols.contiguous(), numbers, sums, tokens, BLOCK=block
        )
    return _finished(sums, numbers)


def _finished(sums: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    examples, pairs = sums.shape[:2]
    out = torch.empty(2, examples, dtype=torch.float64, device=sums.device)
    with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
        _finish[(triton.cdiv(examples, _LANES),)](
            sums, numbers, out[0], out[1], examples, pairs, LANES=_LANES, num_warps=1
        )
    return out[0], out[1]


class Clipped(NamedTuple):
    """Norms of the examples, which are finite, and their factors: zero for the others."""

    norms: Tensor
    finite: Tensor
    factors: Tensor
    """In float64."""
    lower: Tensor
    """In float32, not above what they are in float64."""


def row_pair(
    u: Tensor, v: Tensor, above: tuple[float, float, float], *, rounded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows u and v, rounded to TF32 if ``rounded``, the norms of u, and of ``u_i v_i^T``.

    ``above`` enlarges the two lengths and their product.
    """
    u, v = u.contiguous(), v.contiguous()
    left, right = (torch.empty_like(u), torch.empty_like(v)) if rounded else (u, v)
    found = torch.empty(2, len(u), dtype=torch.float64, device=u.device)
    block = min(_BLOCK, triton.next_power_of_2(max(u.shape[1], v.shape[1])))
    with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]
        _row_pair[(len(u),)](
            u,
            v,
            left,
            right,
            found[0],
            found[1],
            u.shape[1],
            v.shape[1],
            _doubles(above, u.device),
            ROUND=rounded,
            BLOCK=block,
        )
    return left, right, found[0], found[1]


def clip_norms(
    parts: Tensor, real: Tensor | None, numbers: tuple[float, float, float, float, float]
) -> Clipped:
    """Factors for examples whose norms consist of ``parts``, ``(P, N)`` in float64.

    With the numbers (above, bound, shift, most, down), n the root of the parts' squares times
    ``above``: the factor is ``bound / (n + shift)``, at most ``most``; times ``down`` in float32.
    """
    count, examples = parts.shape
    doubles = torch.empty(2, examples, dtype=torch.float64, device=parts.device)
    finite = torch.empty(examples, dtype=torch.bool, device=parts.device)
    lower = torch.empty(examples, dtype=torch.float32, device=parts.device)
    with torch.cuda.device_of(parts):  # type: ignore[no-untyped-call]
        _clip[(triton.cdiv(examples, 128),)](
            parts,
            count,
            finite if real is None else real,
            doubles[0],
            finite,
            doubles[1],
            lower,
            examples,
            _doubles(numbers, parts.device),
            REAL=real is not None,
            LANES=128,
        )
    return Clipped(doubles[0], finite, doubles[1], lower)


class Window(NamedTuple):
    """A convolution's window in two dimensions: size, stride, padding and dilation of each."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def unfold(x: Tensor, window: Window, skip: Tensor | None = None) -> Tensor:
    """The patches ``(N, C k_1 k_2, positions)`` of pictures ``(N, C, H, W)``, in the order of a
    convolution's weight; where ``skip`` is true, memory that holds anything."""
    examples, channels, high, wide = x.shape
    sides = zip(x.shape[2:], *window, strict=True)
    down, across = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    taps = window.size[0] * window.size[1]
    out = x.new_empty(examples, channels * taps, down * across)
    block = min(_BLOCK, triton.next_power_of_2(down * across))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _unfold[(examples * channels, triton.cdiv(down * across, block))](
            x.contiguous(),
            out,
            x if skip is None else skip,
            high,
            wide,
            down * across,
            across,
            *window.stride,
            *window.padding,
            *window.dilation,
            SKIPS=skip is not None,
            TAPS_H=window.size[0],
            TAPS_W=window.size[1],
            BLOCK=block,
        )
    return out


def zero_rows(x: Tensor, keep: Tensor) -> None:
    """Write zeros over the rows ``x[i]`` with ``keep[i]`` False; ``x`` is contiguous."""
    length = x[0].numel()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _zero_rows[(len(x), triton.cdiv(length, _CHUNK))](x, keep, length, CHUNK=_CHUNK)


def scale_rows(x: Tensor, factors: Tensor, *, rounded: bool) -> Tensor:
    """``factors[i] * x[i]`` in the type of ``x``, and zeros where the factor is zero, whatever the
    row holds; to the precision of TF32 if ``rounded``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    length = x[0].numel()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _scale_rows[(len(x), triton.cdiv(length, _SPAN))](
            x, factors, out, length, ROUND=rounded, CHUNK=_SPAN
        )
    return out


@cache
def _doubles(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)

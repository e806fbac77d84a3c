"""Sums of products over examples on a GPU, so accurate that a check need not repeat them.

``weighted`` adds up ``sum_i c_i U_i^T V_i``: matrix units multiply a few tokens of one example, and
what comes out is scaled by the example's factor and added in float32. So nothing is rounded before
it is multiplied, and a tensor core's short sums are all that is added without rounding to nearest.
An example with factor zero adds nothing, whatever its numbers are.

``mixed`` and ``add_squares`` measure how far such a sum is off, in float64 (docs/rounding.md,
lemma 5), and ``repair`` takes it again in float64 where a flag on the device says so. Nothing here
lets the host wait for the device. Needs Triton; see :mod:`~diminuendo.training.clipping.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diminuendo.training.clipping.kernels import available

VECTORS = 16
"""Random vectors of a check on a GPU: a width that matrix units take."""
# Tokens of a product in matrix units, and of those that add up there before factor and float32.
_TOKENS, _SHORT = 64, 256
_TILE, _PRECISE_TILE = 128, 64
# Tokens and columns of a thin product in float64.
_THIN, _COLUMNS = 32, 32
_PROGRAMS = 132

if available:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _tile(x, example, token, column, tokens, columns, of_example, of_token, of_column):  # type: ignore[no-untyped-def]
        """Some tokens (or columns) of an example, in the shape in which they are given."""
        # the tokens of one example may lie more than 2³¹ entries apart
        x += example.to(tl.int64) * of_example
        at = x + token.to(tl.int64) * of_token + column.to(tl.int64) * of_column
        return tl.load(at, (token < tokens) & (column < columns), 0.0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _wide(x, factor, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
        """In float64; zeros where the factor is zero. If ``SCALED``, times the factor and rounded
        to TF32, as `kernels.scale_rows` makes it.

        Triton lays an operand out by the type it was loaded in, and has no way for bfloat16 here:
        a sum over one number makes it forget.
        """
        x = x.to(tl.float32)
        if SCALED:
            bits = ((x * factor.to(tl.float32)).to(tl.int32, bitcast=True) + 0x1000) & -0x2000
            x = bits.to(tl.float32, bitcast=True)
        x = tl.where(factor != 0.0, x, 0.0)
        return tl.sum(x[:, :, None], 2).to(tl.float64)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _weighted(  # type: ignore[no-untyped-def]
        u,
        v,
        factors,
        out,
        examples,
        tokens,
        rows,
        cols,
        u_example,
        u_token,
        u_column,
        v_example,
        v_token,
        v_column,
        each,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        TOKENS: tl.constexpr,
        SHORT: tl.constexpr,
    ):
        tiles = tl.cdiv(rows, ROWS)
        row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
        col = (tl.program_id(0) // tiles) * COLS + tl.arange(0, COLS)
        part = tl.program_id(1)
        token = tl.arange(0, TOKENS)
        blocks = tl.cdiv(tokens, TOKENS)
        first = part * each
        total = tl.zeros([ROWS, COLS], tl.float32)
        short = tl.zeros([ROWS, COLS], tl.float32)
        for number in range(tl.minimum(each, examples - first) * blocks):
            example = first + number // blocks
            t = (number % blocks) * TOKENS + token
            a = _tile(
                u, example, t[:, None], row[None, :], tokens, rows, u_example, u_token, u_column
            )
            b = _tile(
                v, example, t[:, None], col[None, :], tokens, cols, v_example, v_token, v_column
            )
            short = tl.dot(tl.trans(a), b, short, input_precision="tf32")
            if (number % SHORT == SHORT - 1) | (number % blocks == blocks - 1):
                factor = tl.load(factors + example)
                total += tl.where(factor != 0.0, factor * short, 0.0)
                short = tl.zeros([ROWS, COLS], tl.float32)
        at = (part.to(tl.int64) * rows + row[:, None]) * cols + col[None, :]
        tl.store(out + at, total, (row[:, None] < rows) & (col[None, :] < cols))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _weighted_tiles(  # type: ignore[no-untyped-def]
        u,
        v,
        factors,
        out,
        examples,
        tokens,
        rows,
        cols,
        each,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        TOKENS: tl.constexpr,
        SHORT: tl.constexpr,
    ):
        """`_weighted` for sides that the GPU's copy engine reads, by descriptors."""
        tiles = tl.cdiv(rows, ROWS)
        row, col = (tl.program_id(0) % tiles) * ROWS, (tl.program_id(0) // tiles) * COLS
        part = tl.program_id(1)
        blocks = tl.cdiv(tokens, TOKENS)
        first = part * each
        total = tl.zeros([ROWS, COLS], tl.float32)
        short = tl.zeros([ROWS, COLS], tl.float32)
        for number in range(tl.minimum(each, examples - first) * blocks):
            example = first + number // blocks
            t = (number % blocks) * TOKENS
            a = tl.reshape(u.load([example, t, row]), (TOKENS, ROWS))
            b = tl.reshape(v.load([example, t, col]), (TOKENS, COLS))
            short = tl.dot(tl.trans(a), b, short)
            if (number % SHORT == SHORT - 1) | (number % blocks == blocks - 1):
                factor = tl.load(factors + example)
                total += tl.where(factor != 0.0, factor * short, 0.0)
                short = tl.zeros([ROWS, COLS], tl.float32)
        r, c = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        at = (part.to(tl.int64) * rows + r[:, None]) * cols + c[None, :]
        tl.store(out + at, total, (r[:, None] < rows) & (c[None, :] < cols))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _projected(  # type: ignore[no-untyped-def]
        u,
        vectors,
        factors,
        out,
        tokens,
        rows,
        u_example,
        u_token,
        u_column,
        each,
        SCALED: tl.constexpr,
        VECTORS: tl.constexpr,
        TOKENS: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        """``U_i R`` for some columns of each example's tokens, in float64: with the factor if
        ``SCALED`` is 1 (in u, rounded) or 0, without if it is 2."""
        blocks, part = tl.cdiv(tokens, TOKENS), tl.program_id(1)
        example = tl.program_id(0) // blocks
        token = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
        k = tl.arange(0, VECTORS)
        factor = tl.load(factors + example)
        total = tl.zeros([TOKENS, VECTORS], tl.float64)
        last = tl.minimum(rows, (part + 1) * each)
        for start in range(part * each, last, ROWS):
            row = start + tl.arange(0, ROWS)
            a = _tile(
                u, example, token[:, None], row[None, :], tokens, last, u_example, u_token, u_column
            )
            a = _wide(a, factor, SCALED == 1)
            b = tl.load(vectors + row[:, None] * VECTORS + k[None, :], row[:, None] < last, 0.0)
            total = tl.dot(a, b, total, out_dtype=tl.float64)
        if SCALED == 0:
            total *= factor
        lines = (part * (tl.num_programs(0) // blocks) + example).to(tl.int64) * tokens
        at = (lines + token[:, None]) * VECTORS + k[None, :]
        tl.store(out + at, total, token[:, None] < tokens)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _mixed(  # type: ignore[no-untyped-def]
        projected,
        v,
        factors,
        out,
        examples,
        tokens,
        cols,
        v_example,
        v_token,
        v_column,
        each,
        SCALED: tl.constexpr,
        VECTORS: tl.constexpr,
        TOKENS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """``sum_i P_i^T V_i`` over some of the examples, in float64."""
        col = tl.program_id(0) * COLS + tl.arange(0, COLS)
        first = tl.program_id(1) * each
        k = tl.arange(0, VECTORS)
        token = tl.arange(0, TOKENS)
        blocks = tl.cdiv(tokens, TOKENS)
        total = tl.zeros([VECTORS, COLS], tl.float64)
        for number in range(tl.minimum(each, examples - first) * blocks):
            example = first + number // blocks
            t = (number % blocks) * TOKENS + token
            factor = tl.load(factors + example)
            at = (example.to(tl.int64) * tokens + t[None, :]) * VECTORS + k[:, None]
            a = tl.load(projected + at, t[None, :] < tokens, 0.0)
            b = _tile(
                v, example, t[:, None], col[None, :], tokens, cols, v_example, v_token, v_column
            )
            b = _wide(b, factor, SCALED == 2)
            total = tl.dot(a, b, total, out_dtype=tl.float64)
        at = (tl.program_id(1) * VECTORS + k[:, None].to(tl.int64)) * cols + col[None, :]
        tl.store(out + at, total, col[None, :] < cols)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _turned(  # type: ignore[no-untyped-def]
        total,
        vectors,
        out,
        rows,
        cols,
        each,
        VECTORS: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """``-R^T S`` over some of the rows, in float64."""
        col = tl.program_id(0) * COLS + tl.arange(0, COLS)
        part = tl.program_id(1)
        k = tl.arange(0, VECTORS)
        found = tl.zeros([VECTORS, COLS], tl.float64)
        last = tl.minimum(rows, (part + 1) * each)
        for start in range(part * each, last, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row[:, None] < last) & (col[None, :] < cols)
            s = tl.load(total + row[:, None].to(tl.int64) * cols + col[None, :], inside, 0.0)
            a = tl.load(vectors + row[None, :] * VECTORS + k[:, None], row[None, :] < last, 0.0)
            found = tl.dot(a, s.to(tl.float64), found, out_dtype=tl.float64)
        at = (part * VECTORS + k[:, None].to(tl.int64)) * cols + col[None, :]
        tl.store(out + at, -found, col[None, :] < cols)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _squares(parts, count, others, other_count, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add the square of the sum of all parts to ``out``."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float64)
        for part in range(count):
            total += tl.load(parts + part * size + at, at < size, 0.0)
        for part in range(other_count):
            total += tl.load(others + part * size + at, at < size, 0.0)
        tl.atomic_add(out, tl.sum(total * total), sem="relaxed")

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _repair(  # type: ignore[no-untyped-def]
        u,
        v,
        factors,
        out,
        holds,
        examples,
        tokens,
        rows,
        cols,
        u_example,
        u_token,
        u_column,
        v_example,
        v_token,
        v_column,
        SCALED: tl.constexpr,
        ADDED: tl.constexpr,
        TILE: tl.constexpr,
        TOKENS: tl.constexpr,
    ):
        if tl.load(holds) == 0:
            tiles = tl.cdiv(rows, TILE)
            row = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
            col = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
            token = tl.arange(0, TOKENS)
            blocks = tl.cdiv(tokens, TOKENS)
            total = tl.zeros([TILE, TILE], tl.float64)
            for number in range(examples * blocks):
                example = number // blocks
                t = (number % blocks) * TOKENS + token
                factor = tl.load(factors + example)
                a = _tile(
                    u, example, t[:, None], row[None, :], tokens, rows, u_example, u_token, u_column
                )
                b = _tile(
                    v, example, t[:, None], col[None, :], tokens, cols, v_example, v_token, v_column
                )
                a, b = _wide(a, factor, SCALED == 1), _wide(b, factor, SCALED == 2)
                if SCALED == 0:
                    a *= factor
                total = tl.dot(tl.trans(a), b, total, out_dtype=tl.float64)
            at = row[:, None].to(tl.int64) * cols + col[None, :]
            inside = (row[:, None] < rows) & (col[None, :] < cols)
            if ADDED:
                total += tl.load(out + at, inside, 0.0)
            tl.store(out + at, total.to(out.dtype.element_ty), inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _of_rows(  # type: ignore[no-untyped-def]
        u,
        v,
        factors,
        out,
        examples,
        rows,
        cols,
        u_example,
        v_example,
        each,
        DOUBLE: tl.constexpr,
        PRECISION: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        EXAMPLES: tl.constexpr,
    ):
        """``sum_i c_i u_i v_i^T``, and behind it ``sum_i c_i u_i``, over some of the examples."""
        tiles = tl.cdiv(rows, ROWS)
        row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
        col = (tl.program_id(0) // tiles) * COLS + tl.arange(0, COLS)
        part = tl.program_id(1)
        kind = tl.float64 if DOUBLE else tl.float32
        total = tl.zeros([ROWS, COLS], kind)
        column = tl.zeros([ROWS], kind)
        last = tl.minimum(examples, (part + 1) * each)
        for start in range(part * each, last, EXAMPLES):
            i = start + tl.arange(0, EXAMPLES)
            factor = tl.load(factors + i, i < last, 0.0).to(kind)
            keep = factor[:, None] != 0.0
            a = u + i[:, None].to(tl.int64) * u_example + row[None, :]
            b = v + i[:, None].to(tl.int64) * v_example + col[None, :]
            a = tl.load(a, keep & (row[None, :] < rows), 0.0).to(kind) * factor[:, None]
            b = tl.load(b, keep & (col[None, :] < cols), 0.0).to(kind)
            column += tl.sum(a, 0)
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION, out_dtype=kind)
        base = out + part.to(tl.int64) * (rows * (cols + 1))
        at = row[:, None].to(tl.int64) * cols + col[None, :]
        tl.store(base + at, total, (row[:, None] < rows) & (col[None, :] < cols))
        if tl.program_id(0) < tiles:
            tl.store(base + rows * cols + row, column, row < rows)


class Sides(NamedTuple):
    """Tokens ``(N, T, rows)`` and ``(N, T, cols)`` in half precision or rounded to TF32.

    ``scaled`` says what is multiplied: 0, what is there, and each product is scaled; 1 or 2, the
    first or second side times the factor, rounded to TF32 again, and the other one.
    """

    u: Tensor
    v: Tensor
    scaled: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Examples, tokens, rows, columns."""
        examples, tokens, rows = self.u.shape
        return examples, tokens, rows, self.v.shape[2]


def weighted(sides: Sides, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """``sum_i factors[i] U_i^T V_i``, float32, ``(rows, cols)``; ``factors`` are float32."""
    examples, _, rows, cols = sides.sizes
    described = _describable(sides.u) and _describable(sides.v)
    wide = described and triton.cdiv(rows, _TILE) * triton.cdiv(cols, 2 * _TILE) >= _PROGRAMS // 2
    across, span = (2 * _TILE if wide else _TILE), (128 if described and not wide else _TOKENS)
    tiles = triton.cdiv(rows, _TILE) * triton.cdiv(cols, across)
    each, parts = _shared_out(examples, _PROGRAMS // tiles)
    direct = parts == 1 and out is not None and out.is_contiguous()
    shape = (rows, cols) if parts == 1 else (parts, rows, cols)
    device = factors.device
    total = out if direct else torch.empty(shape, dtype=torch.float32, device=device)
    assert total is not None
    sizes = {"ROWS": _TILE, "COLS": across, "TOKENS": span, "SHORT": _SHORT // span}
    with torch.cuda.device_of(factors):  # type: ignore[no-untyped-call]
        if described:
            u = TensorDescriptor(sides.u, sides.u.shape, sides.u.stride(), [1, span, _TILE])
            v = TensorDescriptor(sides.v, sides.v.shape, sides.v.stride(), [1, span, across])
            _weighted_tiles[(tiles, parts)](
                u, v, factors, total, *sides.sizes, each, **sizes, num_warps=8, num_stages=3
            )
        else:
            strides = *sides.u.stride(), *sides.v.stride()
            stages = 4 if sides.u.element_size() == 2 else 3
            _weighted[(tiles, parts)](
                sides.u,
                sides.v,
                factors,
                total,
                *sides.sizes,
                *strides,
                each,
                **sizes,
                num_warps=8,
                num_stages=stages,
            )
    if direct:
        return total
    if parts > 1:
        return torch.sum(total, 0) if out is None else torch.sum(total, 0, out=out)
    return total if out is None else out.copy_(total)


def _describable(x: Tensor) -> bool:
    """Whether a GPU's copy engine can read it: half precision, and steps of 16 bytes."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    steps = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:2])
    return x.element_size() == 2 and x.stride(2) == 1 and steps


def of_rows(
    u: Tensor, v: Tensor, factors: Tensor, *, double: bool, rounded: bool
) -> tuple[Tensor, Tensor]:
    """``sum_i factors[i] u_i v_i^T`` and ``sum_i factors[i] u_i`` for float32 rows ``(N, *)``, in
    the type of the factors.

    Added up in float64 if ``double``; else in float32, where ``rounded`` allows TF32.
    """
    (examples, rows), cols = u.shape, v.shape[1]
    tile = 64
    tiles = triton.cdiv(rows, tile) * triton.cdiv(cols, tile)
    each, parts = _shared_out(examples, max(1, 2 * _PROGRAMS // tiles))
    kind = torch.float64 if double else torch.float32
    out = torch.empty(parts, rows * (cols + 1), dtype=kind, device=u.device)
    with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]
        _of_rows[(tiles, parts)](
            u,
            v,
            factors,
            out,
            examples,
            rows,
            cols,
            u.stride(0),
            v.stride(0),
            each,
            DOUBLE=double,
            PRECISION="tf32" if rounded else "ieee",
            ROWS=tile,
            COLS=tile,
            EXAMPLES=16 if double else 32,
        )
    total = (out[0] if parts == 1 else out.sum(0)).to(factors.dtype)
    return total[: rows * cols].view(rows, cols), total[rows * cols :]


def add_squares(
    sides: Sides, factors: Tensor, total: Tensor, vectors: Tensor, into: Tensor
) -> None:
    """Add ``||(total - exact sum)^T vectors||^2`` to ``into``, to float64 rounding.

    ``factors`` and the ``(rows, VECTORS)`` vectors are float64.
    """
    parts = mixed(sides, factors, vectors)
    square_of_difference(parts, total, vectors, into)


def mixed(sides: Sides, factors: Tensor, vectors: Tensor) -> Tensor:
    """``vectors^T`` times the exact sum in float64: ``(parts, VECTORS, cols)``, to be added up."""
    examples, tokens, rows, cols = sides.sizes
    device = factors.device
    turned = sides.u.stride(2) != 1
    line = 16 if turned else _THIN
    programs = triton.cdiv(tokens, line) * examples
    span, thin_parts = _shared_out(triton.cdiv(rows, _COLUMNS), 8 * _PROGRAMS // programs)
    shape = thin_parts, examples, tokens, VECTORS
    thin = torch.empty(shape, dtype=torch.float64, device=device)
    columns = triton.cdiv(cols, 2 * _COLUMNS)
    each, parts = _shared_out(examples, 16 * _PROGRAMS // columns)
    found = torch.empty(parts, VECTORS, cols, dtype=torch.float64, device=device)
    with torch.cuda.device_of(factors):  # type: ignore[no-untyped-call]
        _projected[(programs, thin_parts)](
            sides.u,
            vectors,
            factors,
            thin,
            tokens,
            rows,
            *sides.u.stride(),
            span * _COLUMNS,
            SCALED=sides.scaled,
            VECTORS=VECTORS,
            TOKENS=line,
            ROWS=_COLUMNS,
            num_warps=1 if turned else 2,
        )
        _mixed[(columns, parts)](
            thin[0] if thin_parts == 1 else thin.sum(0),
            sides.v,
            factors,
            found,
            examples,
            tokens,
            cols,
            *sides.v.stride(),
            each,
            SCALED=sides.scaled,
            VECTORS=VECTORS,
            TOKENS=_THIN,
            COLS=2 * _COLUMNS,
            num_warps=2,
        )
    return found


def square_of_difference(exact: Tensor, total: Tensor, vectors: Tensor, into: Tensor) -> None:
    """Add ``||sum of exact - vectors^T total||^2`` to ``into``; ``total`` is ``(rows, cols)``."""
    assert total.is_contiguous()
    rows, cols = total.shape
    columns = triton.cdiv(cols, _COLUMNS)
    span, parts = _shared_out(triton.cdiv(rows, _COLUMNS), 4 * _PROGRAMS // columns)
    turned = exact.new_empty(parts, VECTORS, cols)
    with torch.cuda.device_of(total):  # type: ignore[no-untyped-call]
        _turned[(columns, parts)](
            total,
            vectors,
            turned,
            rows,
            cols,
            span * _COLUMNS,
            VECTORS=VECTORS,
            ROWS=_COLUMNS,
            COLS=_COLUMNS,
            num_warps=2,
        )
        size = VECTORS * cols
        _squares[(triton.cdiv(size, 256),)](
            exact, len(exact), turned, parts, into, size, BLOCK=256, num_warps=2
        )


def repair(
    sides: Sides, factors: Tensor, total: Tensor, holds: Tensor, *, added: bool = False
) -> None:
    """Take ``total``, float32 or float64, again in float64, unless ``holds`` is true; nothing else
    happens then. If ``added``, add to what is there."""
    assert total.is_contiguous()
    _, _, rows, cols = sides.sizes
    tiles = triton.cdiv(rows, _PRECISE_TILE) * triton.cdiv(cols, _PRECISE_TILE)
    with torch.cuda.device_of(factors):  # type: ignore[no-untyped-call]
        _repair[(tiles,)](
            sides.u,
            sides.v,
            factors,
            total,
            holds,
            *sides.sizes,
            *sides.u.stride(),
            *sides.v.stride(),
            SCALED=sides.scaled,
            ADDED=added,
            TILE=_PRECISE_TILE,
            TOKENS=16,
        )


def _shared_out(examples: int, parts: int) -> tuple[int, int]:
    """How many examples a part takes, and how many parts there are: about so many."""
    each = triton.cdiv(examples, max(1, min(examples, parts)))
    return each, triton.cdiv(examples, each)

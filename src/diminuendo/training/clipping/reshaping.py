"""Where the examples are after operations that move, split, join or drop dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diminuendo.training.clipping.rows import Rows, default, guess, settled, varying


def reshaped(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """The order of the entries stays, so the entries before the examples' dimension do too."""
    del args, kwargs, nr
    if not 0 <= rows.dim < source.dim():
        return guess(out, rows.examples)
    before, size = source.shape[: rows.dim].numel(), source.shape[rows.dim]
    passed = 1
    for dim, extent in enumerate(out.shape):
        if passed == before:
            if rows.owner is None:
                if extent % rows.examples == 0 and (extent or not size):
                    return rows.moved(dim)
            elif extent == size:
                return rows.moved(dim)
            elif size and extent % size == 0:
                return Rows(rows.examples, dim, rows.owner.repeat_interleave(extent // size))
        passed *= extent
        if passed > before:
            break
    return _split_up(source, rows, out) if rows.owner is not None else Rows(rows.examples, -1)


def _split_up(source: Tensor, rows: Rows, out: Tensor) -> Rows:
    """A dimension with an index of its examples becomes several, of which one may hold them."""
    assert rows.owner is not None
    before, size = source.shape[: rows.dim].numel(), source.shape[rows.dim]
    first = next((d for d in range(out.dim()) if out.shape[:d].numel() == before), None)
    for last in range((first or 0) + 1, out.dim() + 1):
        if first is not None and out.shape[first:last].numel() == size:
            return varying(rows.examples, rows.owner.reshape(out.shape[first:last]), first)
    plain = settled(rows, source)  # blocks in order may be taken apart within
    if plain.owner is None:
        return reshaped((), {}, source, plain, out, 0)
    if before == 1 and out.dim() and out.shape[0] and size % out.shape[0] == 0:
        return varying(rows.examples, rows.owner.reshape(out.shape[0], -1), 0, most=1)
    return Rows(rows.examples, -1)


def dims_of(args: Sequence[Any], start: int) -> list[int]:
    """The dimensions among an operation's arguments, from ``start`` on, as one list."""
    rest = args[start:]
    if len(rest) == 1 and isinstance(rest[0], (list, tuple)):
        rest = rest[0]
    return [int(d) for d in rest]


def permuted(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``permute``."""
    del out, nr
    dims = dims_of(args, 1) if len(args) > 1 else list(kwargs["dims"])
    order = [d % source.dim() for d in dims]
    return rows.moved(order.index(rows.dim)) if rows.dim in order else rows


def transposed(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After two dimensions were exchanged."""
    del out, nr
    dims = [*args[1:3], *(kwargs[k] for k in ("dim0", "dim1", "axis0", "axis1") if k in kwargs)]
    first, second = (int(d) % source.dim() for d in dims)
    return rows.moved({first: second, second: first}.get(rows.dim, rows.dim))


def flipped(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After the dimensions were put in the opposite order."""
    del args, kwargs, out, nr
    return rows.moved(source.dim() - 1 - rows.dim) if rows.dim >= 0 else rows


def last_two(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After the last two dimensions were exchanged."""
    del args, kwargs, out, nr
    last = source.dim() - 1
    return rows.moved({last: last - 1, last - 1: last}.get(rows.dim, rows.dim))


def moved(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``movedim``."""
    del out, nr
    probe = torch.empty([d + 2 for d in range(source.dim())], device="meta")
    shape = torch.movedim(probe, *args[1:], **kwargs).shape
    return rows.moved(list(shape).index(rows.dim + 2)) if rows.dim >= 0 else rows


def reduced(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After some dimensions were reduced: those before which they stood move up."""
    del nr
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None or out.dim() == source.dim() or isinstance(dim, Tensor):
        return default(source, rows, out)
    gone = {
        int(d) % max(1, source.dim()) for d in (dim if isinstance(dim, (list, tuple)) else [dim])
    }
    if rows.dim in gone:
        return Rows(rows.examples, -1)
    return rows.moved(rows.dim - sum(d < rows.dim for d in gone))


def equation(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``einsum``: the examples are where their letter is."""
    del kwargs, nr
    text = args[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if isinstance(text, str) and "->" in text and "." not in text:
        left, right = text.replace(" ", "").split("->")
        for labels, operand in zip(left.split(","), operands, strict=False):
            if operand is source and 0 <= rows.dim < len(labels) and labels[rows.dim] in right:
                return rows.moved(right.index(labels[rows.dim]))
    return default(source, rows, out)

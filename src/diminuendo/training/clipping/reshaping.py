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
    return _merged(source, rows, out) or (
        _split_up(source, rows, out) if rows.owner is not None else Rows(rows.examples, -1)
    )


def _merged(source: Tensor, rows: Rows, out: Tensor) -> Rows | None:
    """The dimension of the examples became part of one with others before it, such as time."""
    before, size = source.shape[: rows.dim].numel(), source.shape[rows.dim]
    passed = 1
    for dim, extent in enumerate(out.shape):
        if passed >= before or not size:
            return None
        if before % passed == 0 and extent and passed * extent % (before * size) == 0:
            within = passed * extent // (before * size)
            owners = rows.owners(size).repeat_interleave(within).repeat(before // passed)
            return Rows(rows.examples, dim, owners)
        passed *= extent
    return None


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
    return _without(
        kwargs.get("axis", args[1] if len(args) > 1 else None), kwargs, source, rows, out
    )


def measured(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """The same for norms and quantiles, whose second argument is their order."""
    del nr
    return _without(args[2] if len(args) > 2 else None, kwargs, source, rows, out)


def _without(given: Any, kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor) -> Rows:
    dim = kwargs.get("dim", given)
    if dim is None or out.dim() == source.dim() or isinstance(dim, Tensor):
        return default(source, rows, out)
    gone = {
        int(d) % max(1, source.dim()) for d in (dim if isinstance(dim, (list, tuple)) else [dim])
    }
    if rows.dim in gone:
        return Rows(rows.examples, -1)
    return rows.moved(rows.dim - sum(d < rows.dim for d in gone))


def diagonal(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``diagonal``: two dimensions become the last."""
    del out, nr
    given = [*args[2:4], *(0, 1)[len(args[2:4]) :]]
    gone = {
        kwargs.get(name, dim) % source.dim()
        for name, dim in zip(("dim1", "dim2"), given, strict=True)
    }
    if rows.dim in gone:
        return Rows(rows.examples, -1)
    return rows.moved(rows.dim - sum(d < rows.dim for d in gone))


def kept(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """The first dimensions stay, others come or go behind them."""
    del args, kwargs, source, nr
    return rows if rows.dim < out.dim() else Rows(rows.examples, -1)


def strided(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``as_strided``: the dimension that is left as it was."""
    if 0 <= rows.dim < out.dim() and (
        (out.shape[rows.dim], out.stride(rows.dim))
        == (source.shape[rows.dim], source.stride(rows.dim))
    ):
        return rows
    del args, kwargs, nr
    return default(source, rows, out)


def unfolded(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``Tensor.unfold`` or the function ``unfold``."""
    del nr
    if out.dim() == source.dim() + 1:
        dim = kwargs.get("dimension", args[1] if len(args) > 1 else 0) % source.dim()
        return Rows(rows.examples, -1) if dim == rows.dim else rows
    return rows if rows.dim == 0 else Rows(rows.examples, -1)


def multiplied(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``matmul``: a vector takes a dimension away."""
    del nr
    left, right = (*args, *kwargs.values())[:2]
    lost = -1
    if source is left and right.dim() == 1:
        lost = source.dim() - 1
    elif source is right and left.dim() == 1:
        lost = max(0, source.dim() - 2)
    if lost < 0 or rows.dim < 0:
        return default(source, rows, out)
    if rows.dim == lost:
        return Rows(rows.examples, -1)
    return rows.moved(rows.dim - (lost < rows.dim))


def contracted(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``tensordot``: what is left of the first tensor, then of the second."""
    del nr
    first = args[0]
    dims = kwargs.get("dims", args[2] if len(args) > 2 else 2)
    if isinstance(dims, Tensor) or rows.dim < 0:
        return default(source, rows, out)
    if isinstance(dims, int):
        dims = [*range(first.dim() - dims, first.dim())], [*range(dims)]
    gone = [[given] if isinstance(given, int) else list(given) for given in dims]
    own = [d % source.dim() for d in gone[source is not first]]
    if rows.dim in own:
        return Rows(rows.examples, -1)
    before = 0 if source is first else first.dim() - len(gone[0])
    return rows.moved(before + rows.dim - sum(d < rows.dim for d in own))


def recurrent(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After a recurrent layer: its states have the examples second, whatever its outputs have."""
    del kwargs
    if len(args) < 9 or out.dim() != 3:  # one sequence alone
        return default(source, rows, out)
    return rows.moved(0 if args[8] and nr == 0 else 1)


def attended(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``multi_head_attention_forward``: (T, N, d), and weights (N, ...)."""
    del args, kwargs
    return rows.moved(0) if nr and rows.dim == 1 else default(source, rows, out)


def equation(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``einsum``: the examples are where their letter is."""
    del kwargs, nr
    text = args[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(text, str) or rows.dim < 0:
        return default(source, rows, out)
    left, arrow, right = text.replace(" ", "").replace("...", ".").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = "." * ("." in left) + "".join(
            sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        )
    ends = range(out.dim())[_span(right, out.dim())][::-1]
    for labels, operand in zip(left.split(","), operands, strict=False):
        if operand is source:
            among = range(operand.dim())[_span(labels, operand.dim())]
            if rows.dim in among and len(ends) < len(among):  # what the dots stand for is summed
                return Rows(rows.examples, -1)
            if rows.dim in among:
                return rows.moved(ends[among[-1] - rows.dim])
            place = rows.dim if not among or rows.dim < among[0] else rows.dim - len(among) + 1
            known = labels[place] if place < len(labels) else ""
            if known and known in right:
                at = right.index(known)
                dots = "." in right[:at]
                return rows.moved(at + (len(ends) - 1 if dots else 0))
            return Rows(rows.examples, -1)
    return default(source, rows, out)


def _span(labels: str, dims: int) -> slice:
    """The dimensions that the dots of an equation stand for."""
    at = labels.find(".")
    return slice(0, 0) if at < 0 else slice(at, at + dims - len(labels) + 1)

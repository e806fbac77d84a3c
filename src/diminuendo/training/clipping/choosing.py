"""Where the examples are after operations that choose, repeat, join or write rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diminuendo.training.clipping.reshaping import dims_of
from diminuendo.training.clipping.rows import TAG, Rows, default, guess, varying


def _dim_of(args: Sequence[Any], kwargs: dict[str, Any], position: int, like: Tensor) -> int | None:
    dim = kwargs.get("dim", args[position] if len(args) > position else None)
    return dim % max(1, like.dim()) if isinstance(dim, int) and not isinstance(dim, bool) else None


def joined(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After tensors were joined; along the examples, each brings its own."""
    del nr
    parts = args[0] if args else kwargs["tensors"]
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)) % out.dim()
    if dim != rows.dim:
        return default(source, rows, out)
    owners = []
    for part in parts:
        known = getattr(part, TAG, None)
        size = part.shape[dim] if part.dim() > dim else 0
        if isinstance(known, Rows) and known.dim == dim and known.fits(part):
            owners.append(known.owners(size).to(out.device))
        else:  # rows of nobody; the probe sees it if a gradient comes back through them
            owners.append(torch.zeros(size, dtype=torch.long, device=out.device))
    return Rows(rows.examples, dim, torch.cat(owners))


def split(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """A part of a tensor that was split."""
    dim = _dim_of(args, kwargs, 2, source) or 0
    if dim != rows.dim:
        return default(source, rows, out)
    owners = rows.owners(source.shape[dim])
    size, parts = out.shape[dim], args[1] if len(args) > 1 else None
    if isinstance(parts, (list, tuple)):
        start = sum(parts[:nr])
    else:  # all are as long as the first, but for the last
        start = min(nr * size, owners.numel() - size) if nr else 0
        start = owners.numel() - size if start + 2 * size > owners.numel() and nr else start
    return Rows(rows.examples, dim, owners[start : start + size].to(out.device))


def unbound(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """One of the slices along a dimension."""
    del nr
    dim = _dim_of(args, kwargs, 1, source) or 0
    if dim == rows.dim:
        return Rows(rows.examples, -1)
    return default(source, rows, out) if rows.dim < 0 else rows.moved(rows.dim - (dim < rows.dim))


def selected(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``index_select``, of rows or by a batch of indices."""
    del nr, out
    dim = _dim_of(args, kwargs, 1, source)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    if source is not args[0]:  # a batch of indices into something that holds no examples
        return rows.moved(dim or 0) if rows.dim == 0 else Rows(rows.examples, -1)
    if dim != rows.dim or not isinstance(index, Tensor):
        return rows
    owners = rows.owners(source.shape[rows.dim]).to(index.device)
    return Rows(rows.examples, rows.dim, owners[index.reshape(-1)])


def repeated(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``repeat``."""
    del kwargs, nr
    times = dims_of(args, 1)
    dim = rows.dim + out.dim() - source.dim()
    if rows.dim < 0 or times[dim] == 1:
        return rows.moved(dim)
    owners = rows.owners(source.shape[rows.dim]).repeat(times[dim])
    return Rows(rows.examples, dim, owners.to(out.device))


def interleaved(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``repeat_interleave``."""
    del nr
    dim = _dim_of(args, kwargs, 2, source)
    if dim != rows.dim:
        return default(source, rows, out)
    times = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    if rows.owner is None and isinstance(times, int):
        return rows
    owners = rows.owners(source.shape[dim]).to(out.device)
    if not isinstance(times, (int, Tensor)):
        return Rows(rows.examples, -1)
    return Rows(rows.examples, dim, owners.repeat_interleave(torch.as_tensor(times)))


def ordered(rows: Rows, source: Tensor, indices: Tensor) -> Rows:
    """After a sort along the dimension of the examples, by the ``indices`` it returned."""
    if source.dim() != 1 or rows.dim != 0:
        return Rows(rows.examples, -1)
    owners = rows.owners(source.shape[0]).to(indices.device)
    return Rows(rows.examples, 0, owners[indices])


def indexed(source: Tensor, rows: Rows, index: Any, out_dims: int) -> Rows:
    """The rows of ``source[index]``."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(item) if isinstance(item, list) else item for item in items]
    if any(isinstance(item, range) for item in items):
        return Rows(rows.examples, -1)
    used = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1
        for item in items
        if item is not None and item is not Ellipsis
    )
    if any(item is Ellipsis for item in items):
        at = next(k for k, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (source.dim() - used)
        used = source.dim()
    if rows.dim < 0:
        return rows
    if not any(isinstance(item, Tensor) and item.dim() for item in items):
        return _sliced(source, rows, items)
    if rows.dim >= used:
        return rows.moved(rows.dim + out_dims - source.dim())
    shape = source.shape[:used]
    device = next(item.device for item in items if isinstance(item, Tensor))
    lines = [1] * used
    lines[rows.dim] = shape[rows.dim]
    owners = rows.owners(shape[rows.dim]).to(device).view(lines).expand(shape)[tuple(items)]
    if owners.dim() == 1:
        return Rows(rows.examples, 0, owners)
    return varying(rows.examples, owners, 0)


def _sliced(source: Tensor, rows: Rows, items: list[Any]) -> Rows:
    dim, place = 0, 0
    for item in items:
        if item is None:
            place += 1
            continue
        if dim == rows.dim:
            if not isinstance(item, slice):
                return Rows(rows.examples, -1)
            size = source.shape[dim]
            if len(range(*item.indices(size))) == size and (item.step or 1) == 1:
                return rows.moved(place)
            return Rows(rows.examples, place, rows.owners(size)[item])
        dim += 1
        place += isinstance(item, slice)
    return rows.moved(rows.dim - dim + place)


def looked_up(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """New dimensions come last."""
    del args, kwargs, source, out, nr
    return rows


def got(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``tensor[index]``."""
    del kwargs, nr
    if source is not args[0]:  # a batch of indices into something that holds no examples
        index = args[1]
        first = index[0] if isinstance(index, tuple) else index
        return rows if isinstance(first, Tensor) else guess(out, rows.examples)
    return indexed(source, rows, args[1], out.dim())


def masked(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``masked_select``."""
    del out, nr
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    if rows.dim < 0 or not isinstance(mask, Tensor):
        return rows
    lines = [1] * source.dim()
    lines[rows.dim] = source.shape[rows.dim]
    owners = rows.owners(source.shape[rows.dim]).to(mask.device).view(lines)
    return Rows(rows.examples, 0, owners.expand(source.shape).masked_select(mask))


def written(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """What was written into keeps its own examples; else they are looked for in front."""
    del kwargs, nr
    if args and source is args[0]:
        return rows
    if rows.owner is None and out.shape == source.shape:
        return rows
    return guess(out, rows.examples)

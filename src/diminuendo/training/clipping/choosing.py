"""Where the examples are after operations that choose, repeat, join or write rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diminuendo.training.clipping.reshaping import dims_of
from diminuendo.training.clipping.rows import TAG, One, Rows, default, guess, single, varying


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
    if dim != rows.dim and type(rows) is not One:
        return default(source, rows, out)
    owners = []
    for part in parts:
        known = getattr(part, TAG, None)
        size = part.shape[dim] if part.dim() > dim else 0
        if type(known) is One:
            owners.append(torch.full((size,), known.example, device=out.device))
        elif isinstance(known, Rows) and known.dim == dim and known.fits(part):
            owners.append(known.owners(size).to(out.device))
        else:  # rows of nobody, or of the only example; the probe sees it if that is wrong
            nobody = rows.example if type(rows) is One else 0
            owners.append(torch.full((size,), nobody, device=out.device))
    whole = Rows(rows.examples, dim, torch.cat(owners))
    return _of_one(whole, out) if type(rows) is One else whole


def _of_one(rows: Rows, out: Tensor) -> Rows:
    """``rows``, or the one example that all of them belong to."""
    owner = rows.owner
    if owner is None or not owner.numel() or bool((owner != owner[0]).any()):
        return rows
    return One(rows.examples, int(owner[0]), out.shape)


def stacked(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After tensors were stacked along a new dimension; if each is one example's, along it."""
    del nr
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.dim()
    parts = args[0] if args else kwargs["tensors"]
    if type(rows) is One:
        known = [getattr(part, TAG, None) for part in parts]
        owners = [tag.example if type(tag) is One else rows.example for tag in known]
        return _of_one(Rows(rows.examples, dim, torch.tensor(owners, device=out.device)), out)
    return rows.moved(rows.dim + (dim <= rows.dim)) if source.dim() else rows


def split(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """A part of a tensor that was split: a view, whose place in memory says which."""
    del nr
    dim = _dim_of(args, kwargs, 2, source) or 0
    if dim != rows.dim:
        return rows
    step = source.stride(dim)
    start = (out.storage_offset() - source.storage_offset()) // step if step else 0
    return _part(rows, source, dim, start, out)


def narrowed(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``narrow``."""
    del nr
    dim = _dim_of(args, kwargs, 1, source)
    start = kwargs.get("start", args[2] if len(args) > 2 else None)
    if dim != rows.dim:
        return rows
    if not isinstance(start, int):
        return Rows(rows.examples, -1)
    return _part(rows, source, rows.dim, start % max(1, source.shape[rows.dim]), out)


def _part(rows: Rows, source: Tensor, dim: int, start: int, out: Tensor) -> Rows:
    """A stretch of the dimension of the examples."""
    owners = rows.owners(source.shape[dim])[start : start + out.shape[dim]]
    return _of_one(Rows(rows.examples, dim, owners.to(out.device)), out)


def unbound(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """One of the slices along a dimension."""
    dim = _dim_of(args, kwargs, 1, source) or 0
    if dim == rows.dim:
        return single(rows, nr, source, out)
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
    """After ``repeat`` or ``tile``."""
    del nr
    given = dims_of(args, 1) or list(kwargs.get("repeats", kwargs.get("dims", ())))
    times = [1] * (out.dim() - len(given)) + given
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


def taken(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``select``."""
    del nr
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % source.dim()
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    if dim == rows.dim:
        if not isinstance(index, int):
            return Rows(rows.examples, -1)
        return single(rows, index, source, out)
    return rows.moved(rows.dim - (dim < rows.dim)) if rows.dim >= 0 else rows


def indexed(source: Tensor, rows: Rows, index: Any, out: Tensor) -> Rows:
    """The rows of ``out = source[index]``."""
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
        return _sliced(source, rows, items, out)
    if rows.dim >= used:
        return rows.moved(rows.dim + out.dim() - source.dim())
    shape = source.shape[:used]
    device = next(item.device for item in items if isinstance(item, Tensor))
    lines = [1] * used
    lines[rows.dim] = shape[rows.dim]
    owners = rows.owners(shape[rows.dim]).to(device).view(lines).expand(shape)[tuple(items)]
    if owners.dim() == 1:
        return Rows(rows.examples, 0, owners)
    return varying(rows.examples, owners, 0)


def _sliced(source: Tensor, rows: Rows, items: list[Any], out: Tensor) -> Rows:
    dim, place = 0, 0
    for item in items:
        if item is None:
            place += 1
            continue
        if dim == rows.dim:
            if not isinstance(item, slice):
                known = isinstance(item, int)
                return single(rows, item, source, out) if known else Rows(rows.examples, -1)
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
    if source is args[0]:
        return indexed(source, rows, args[1], out)
    return _placed(args[0], source, rows, args[1], out)  # into something that holds no examples


def _placed(table: Tensor, source: Tensor, rows: Rows, index: Any, out: Tensor) -> Rows:
    """The rows of ``out = table[index]`` where ``source``, a tensor of the index, has examples.

    What indices choose comes where they stand, or in front if something stands between them.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(item is source for item in items) or any(
        isinstance(item, list) or (isinstance(item, Tensor) and item.dtype is torch.bool)
        for item in items
    ):
        return guess(out, rows.examples)
    used = sum(item is not None and item is not Ellipsis for item in items)
    passed, places, most = 0, set(), 0
    for item in items:
        if item is Ellipsis:
            passed += table.dim() - used
        elif isinstance(item, Tensor) and item.dim():
            places.add(passed)
            most = max(most, item.dim())
        elif item is None or isinstance(item, slice):
            passed += 1
    start = places.pop() if len(places) == 1 else 0
    return rows.moved(start + most - source.dim() + rows.dim)


def found(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``nonzero``: each row holds the place of an entry, and so its example."""
    del args, nr
    if kwargs.get("as_tuple") or not rows.fits(source):
        return guess(out, rows.examples)
    owners = rows.owners(source.shape[rows.dim]).to(out.device)
    return Rows(rows.examples, 0, owners[out[:, rows.dim]])


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
    along = args[1] % max(1, out.dim()) if len(args) > 1 and type(args[1]) is int else rows.dim
    if type(rows) is Rows and along != rows.dim and out.dim() == source.dim():
        return rows
    return guess(out, rows.examples)


def put(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``out[index] = source``: the examples are in the dimension that was written on."""
    if source is args[0] or type(rows) is not Rows or rows.dim < 0:
        return written(args, kwargs, source, rows, out, nr)
    index = args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    dims: list[int] = []
    passed, used = 0, sum(item is not None and item is not Ellipsis for item in items)
    for item in items:
        if item is Ellipsis:
            dims += range(passed, passed + out.dim() - used)
            passed += out.dim() - used
        elif item is None:
            dims.append(-1)
        elif isinstance(item, (int, slice)) and not isinstance(item, bool):
            dims += [passed] if isinstance(item, slice) else []
            passed += 1
        else:
            return written(args, kwargs, source, rows, out, nr)
    dims += range(passed, out.dim())
    place = len(dims) - source.dim() + rows.dim
    dim = dims[place] if 0 <= place < len(dims) else -1
    if dim < 0 or out.shape[dim] != source.shape[rows.dim]:
        return guess(out, rows.examples)
    return rows.moved(dim)


def scattered(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """After ``select_scatter``."""
    del out, nr
    if source is args[0]:
        return rows
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % args[0].dim()
    return rows.moved(rows.dim + (dim <= rows.dim))


def piled(along: int) -> Callable[..., Rows]:
    """After ``vstack`` (0), ``hstack`` (1) or ``dstack`` (2)."""

    def rule(
        args: Sequence[Any],
        kwargs: dict[str, Any],
        source: Tensor,
        rows: Rows,
        out: Tensor,
        nr: int,
    ) -> Rows:
        parts = args[0] if args else kwargs["tensors"]
        if min(part.dim() for part in parts) > along:
            return joined((parts, along), {}, source, rows, out, nr)
        if along == 0 or source.dim() != 1:
            return default(source, rows, out)
        return joined((parts, 0), {}, source, rows, out, nr)

    return rule

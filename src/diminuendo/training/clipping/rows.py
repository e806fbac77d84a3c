"""Where a tensor holds its examples, and how operations move them.

``Rows`` says which dimension of a tensor runs over the examples. It starts at the model's inputs
and follows every operation of the forward pass, so that a dimension is known for the examples'
because of where the tensor comes from, not because of its size. What is stated here is checked by
the probe (see :mod:`~diminuendo.training.clipping.probe`) wherever a gradient depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diminuendo.training.clipping.errors import EngineError


class Rows:
    """The examples of a tensor: dimension ``dim``, in ``examples`` equal blocks in their order, or,
    if ``owner`` is given, the example of each index along that dimension."""

    __slots__ = ("_places", "dim", "examples", "owner")

    def __init__(self, examples: int, dim: int = 0, owner: Tensor | None = None) -> None:
        self.examples, self.dim, self.owner = examples, dim, owner
        self._places: tuple[Tensor, Tensor, int] | None = None

    def __repr__(self) -> str:
        routed = "" if self.owner is None else ", routed"
        return f"Rows({self.examples} examples in dimension {self.dim}{routed})"

    def moved(self, dim: int) -> Rows:
        """The same examples in another dimension."""
        return self if dim == self.dim else type(self)(self.examples, dim, self.owner)

    def regular(self, tensor: Tensor) -> bool:
        """Whether row i of ``tensor`` is example i."""
        return (
            self.dim == 0
            and self.owner is None
            and tensor.dim() > 0
            and tensor.shape[0] == self.examples
        )

    def fits(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` can hold its examples this way."""
        if not 0 <= self.dim < tensor.dim():
            return False
        size = tensor.shape[self.dim]
        return size % self.examples == 0 if self.owner is None else size == self.owner.numel()

    def owners(self, size: int) -> Tensor:
        """The example of each of ``size`` indices along the dimension."""
        if self.owner is not None:
            return self.owner
        return torch.arange(self.examples).repeat_interleave(size // self.examples)

    def grouped(self, tensor: Tensor) -> Tensor:
        """As ``(N, k, *rest)``: the rows of each example, those of shorter ones padded by zeros."""
        if not self.fits(tensor):
            raise EngineError(
                f"lost sight of the examples of a tensor of shape {tuple(tensor.shape)} "
                f"({self!r}); keep the example as the first dimension"
            )
        front = tensor.movedim(self.dim, 0)
        if self.owner is None:
            return front.reshape(self.examples, len(front) // self.examples, *front.shape[1:])
        owner, place, most = self._find_places(tensor.device)
        full = front.new_zeros(self.examples, most, *front.shape[1:])
        full[owner, place] = front
        return full

    def summed(self, values: Tensor) -> Tensor:
        """``(N, *rest)``: the sums of the rows ``(R, *rest)`` of each example."""
        if self.owner is None:
            if values.shape[0] == self.examples:
                return values
            each = len(values) // self.examples
            return values.reshape(self.examples, each, *values.shape[1:]).sum(1)
        total = values.new_zeros(self.examples, *values.shape[1:])
        return total.index_add_(0, self.owner.to(values.device), values)

    def _find_places(self, device: torch.device) -> tuple[Tensor, Tensor, int]:
        if self._places is None:
            assert self.owner is not None
            owner = self.owner.to(device)
            counts = torch.bincount(owner, minlength=self.examples)
            order = torch.argsort(owner, stable=True)
            starts = counts.cumsum(0) - counts
            place = torch.empty_like(owner)
            place[order] = torch.arange(owner.numel(), device=device) - starts[owner[order]]
            self._places = owner, place, max(1, int(counts.max()) if counts.numel() else 1)
        return self._places


class Copies(Rows):
    """The same constant once for each example. A part of it is a constant again."""

    __slots__ = ()


def settled(rows: Rows, tensor: Tensor) -> Rows:
    """``rows`` without its index where that says no more than the order of the examples."""
    owner = rows.owner
    if owner is None or not rows.fits(tensor) or owner.numel() % rows.examples:
        return rows
    blocks = torch.arange(rows.examples, device=owner.device)
    if torch.equal(owner, blocks.repeat_interleave(owner.numel() // rows.examples)):
        return Rows(rows.examples, rows.dim)
    return rows


def guess(out: Tensor, examples: int) -> Rows:
    """Where examples are looked for when nothing else is known: in front, as blocks."""
    shape = out.shape
    if out.dim() and shape[0] % examples == 0:
        return Rows(examples)
    dim = next((d for d, size in enumerate(shape) if size == examples), -1)
    return Rows(examples, dim)


def default(source: Tensor, rows: Rows, out: Tensor) -> Rows:
    """After an operation that leaves dimensions in their order."""
    if not 0 <= rows.dim < source.dim():
        return guess(out, rows.examples)
    size = source.shape[rows.dim]
    aligned = rows.dim + out.dim() - source.dim()
    for dim in (aligned, rows.dim):
        if 0 <= dim < out.dim() and out.shape[dim] == size:
            return rows.moved(dim)
    return guess(out, rows.examples)


Rule = Callable[[Sequence[Any], dict[str, Any], Tensor, Rows, Tensor, int], Rows]
"""(args, kwargs, source, its rows, output, number of the output) -> the output's rows."""


def _reshaped(
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
            return _varying(rows.examples, rows.owner.reshape(out.shape[first:last]), first)
    plain = settled(rows, source)  # blocks in order may be taken apart within
    if plain.owner is None:
        return _reshaped((), {}, source, plain, out, 0)
    if before == 1 and out.dim() and out.shape[0] and size % out.shape[0] == 0:
        return _varying(rows.examples, rows.owner.reshape(out.shape[0], -1), 0, most=1)
    return Rows(rows.examples, -1)


def _varying(examples: int, owners: Tensor, start: int, most: int | None = None) -> Rows:
    """The one dimension of ``owners`` along which examples change; ``start`` is the first's."""
    for dim in range(owners.dim() if most is None else most):
        line = owners.movedim(dim, 0).flatten(1)
        if bool((line == line[:, :1]).all()):
            return Rows(examples, start + dim, line[:, 0])
    return Rows(examples, -1)


def _dims(args: Sequence[Any], start: int) -> list[int]:
    rest = args[start:]
    if len(rest) == 1 and isinstance(rest[0], (list, tuple)):
        rest = rest[0]
    return [int(d) for d in rest]


def _permuted(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del out, nr
    dims = _dims(args, 1) if len(args) > 1 else list(kwargs["dims"])
    order = [d % source.dim() for d in dims]
    return rows.moved(order.index(rows.dim)) if rows.dim in order else rows


def _transposed(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del out, nr
    dims = [*args[1:3], *(kwargs[k] for k in ("dim0", "dim1", "axis0", "axis1") if k in kwargs)]
    first, second = (int(d) % source.dim() for d in dims)
    return rows.moved({first: second, second: first}.get(rows.dim, rows.dim))


def _flipped(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del args, kwargs, out, nr
    return rows.moved(source.dim() - 1 - rows.dim) if rows.dim >= 0 else rows


def _last_two(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del args, kwargs, out, nr
    last = source.dim() - 1
    return rows.moved({last: last - 1, last - 1: last}.get(rows.dim, rows.dim))


def _moved(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del out, nr
    probe = torch.empty([d + 2 for d in range(source.dim())], device="meta")
    shape = torch.movedim(probe, *args[1:], **kwargs).shape
    return rows.moved(list(shape).index(rows.dim + 2)) if rows.dim >= 0 else rows


def _dim_of(args: Sequence[Any], kwargs: dict[str, Any], position: int, like: Tensor) -> int | None:
    dim = kwargs.get("dim", args[position] if len(args) > position else None)
    return dim % max(1, like.dim()) if isinstance(dim, int) and not isinstance(dim, bool) else None


def _reduced(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
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


def _stacked(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del nr
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.dim()
    return rows.moved(rows.dim + (dim <= rows.dim)) if source.dim() else rows


def _joined(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
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


def _split(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
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


def _unbound(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del nr
    dim = _dim_of(args, kwargs, 1, source) or 0
    if dim == rows.dim:
        return Rows(rows.examples, -1)
    return default(source, rows, out) if rows.dim < 0 else rows.moved(rows.dim - (dim < rows.dim))


def _selected(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del nr, out
    dim = _dim_of(args, kwargs, 1, source)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    if source is not args[0]:  # a batch of indices into something that holds no examples
        return rows.moved(dim or 0) if rows.dim == 0 else Rows(rows.examples, -1)
    if dim != rows.dim or not isinstance(index, Tensor):
        return rows
    owners = rows.owners(source.shape[rows.dim]).to(index.device)
    return Rows(rows.examples, rows.dim, owners[index.reshape(-1)])


def _repeated(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del kwargs, nr
    times = _dims(args, 1)
    dim = rows.dim + out.dim() - source.dim()
    if rows.dim < 0 or times[dim] == 1:
        return rows.moved(dim)
    owners = rows.owners(source.shape[rows.dim]).repeat(times[dim])
    return Rows(rows.examples, dim, owners.to(out.device))


def _interleaved(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
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


def _equation(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del kwargs, nr
    text = args[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if isinstance(text, str) and "->" in text and "." not in text:
        left, right = text.replace(" ", "").split("->")
        for labels, operand in zip(left.split(","), operands, strict=False):
            if operand is source and 0 <= rows.dim < len(labels) and labels[rows.dim] in right:
                return rows.moved(right.index(labels[rows.dim]))
    return default(source, rows, out)


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
    return _varying(rows.examples, owners, 0)


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


def _looked_up(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """New dimensions come last."""
    del args, kwargs, source, out, nr
    return rows


def _got(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del kwargs, nr
    if source is not args[0]:  # a batch of indices into something that holds no examples
        index = args[1]
        first = index[0] if isinstance(index, tuple) else index
        return rows if isinstance(first, Tensor) else guess(out, rows.examples)
    return indexed(source, rows, args[1], out.dim())


def _masked(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    del out, nr
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    if rows.dim < 0 or not isinstance(mask, Tensor):
        return rows
    lines = [1] * source.dim()
    lines[rows.dim] = source.shape[rows.dim]
    owners = rows.owners(source.shape[rows.dim]).to(mask.device).view(lines)
    return Rows(rows.examples, 0, owners.expand(source.shape).masked_select(mask))


def _written(
    args: Sequence[Any], kwargs: dict[str, Any], source: Tensor, rows: Rows, out: Tensor, nr: int
) -> Rows:
    """What was written into keeps its own examples; else they are looked for in front."""
    del kwargs, nr
    if args and source is args[0]:
        return rows
    if rows.owner is None and out.shape == source.shape:
        return rows
    return guess(out, rows.examples)


TAG = "_per_example"
"""The attribute of a tensor that holds its ``Rows``, or what it is made of."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
            "view_as",
            "reshape_as",
            "_unsafe_view",
            "ravel",
            "squeeze_",
            "unsqueeze_",
        ),
        _reshaped,
    ),
    "permute": _permuted,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "transpose_"), _transposed),
    **dict.fromkeys(("t", "T", "t_"), _flipped),
    **dict.fromkeys(("mT", "mH", "adjoint"), _last_two),
    **dict.fromkeys(("movedim", "moveaxis"), _moved),
    **dict.fromkeys(
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "max",
            "min",
            "any",
            "all",
            "argmax",
            "argmin",
            "norm",
            "logsumexp",
            "prod",
            "std",
            "var",
            "median",
            "mode",
            "select",
            "vector_norm",
            "nansum",
            "nanmean",
            "count_nonzero",
            "aminmax",
        ),
        _reduced,
    ),
    "stack": _stacked,
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined),
    **dict.fromkeys(
        ("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split"),
        _split,
    ),
    "unbind": _unbound,
    "index_select": _selected,
    "repeat": _repeated,
    "repeat_interleave": _interleaved,
    "einsum": _equation,
    "__getitem__": _got,
    "masked_select": _masked,
    "embedding": _looked_up,
    "one_hot": _looked_up,
    **dict.fromkeys(
        (
            "__setitem__",
            "index_add",
            "index_add_",
            "index_put",
            "index_put_",
            "index_copy",
            "index_copy_",
            "scatter",
            "scatter_",
            "scatter_add",
            "scatter_add_",
            "scatter_reduce",
            "scatter_reduce_",
            "masked_scatter",
            "masked_scatter_",
            "copy_",
        ),
        _written,
    ),
}

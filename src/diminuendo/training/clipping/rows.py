"""Where a tensor holds its examples, and how operations move them.

``Rows`` says which dimension of a tensor runs over the examples. It starts at the model's inputs
and follows every operation of the forward pass, so that a dimension is known for the examples'
because of where the tensor comes from, not because of its size. What is stated here is checked by
the probe (see :mod:`~diminuendo.training.clipping.probe`) wherever a gradient depends on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diminuendo.training.clipping.errors import EngineError

TAG = "_per_example"
"""The attribute of a tensor that holds its ``Rows``, or what it is made of."""


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


class One(Rows):
    """A tensor of one example alone, such as ``x[i]``, and what is computed from it."""

    __slots__ = ("example",)

    def __init__(self, examples: int, example: int, shape: torch.Size) -> None:
        owner = torch.full((shape[0],), example) if shape else None
        super().__init__(examples, 0 if shape else -1, owner)
        self.example = example

    def moved(self, dim: int) -> Rows:
        return self if dim == self.dim else Rows(self.examples, dim, self.owner)

    def over(self, shape: torch.Size) -> One:
        """The same example's, in another shape."""
        return One(self.examples, self.example, shape)


class Pieces(Rows):
    """An input of real numbers with another number of rows than there are examples.

    It may be a constant, such as a mask, or hold several rows for each example, such as the pieces
    of pictures. Where a parameter meets it, it is taken for equal blocks in the examples' order,
    and the probe finds out whether that is so.
    """

    __slots__ = ()


def single(rows: Rows, index: int, source: Tensor, out: Tensor) -> Rows:
    """What was taken from ``source`` at one index along the dimension of its examples."""
    if not rows.fits(source):
        return Rows(rows.examples, -1)
    return One(rows.examples, int(rows.owners(source.shape[rows.dim])[index]), out.shape)


def readable(tensor: Tensor) -> bool:
    """Whether the host may look at values: not while a GPU's step is recorded."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def settled(rows: Rows, tensor: Tensor) -> Rows:
    """``rows`` without its index where that says no more than the order of the examples."""
    owner = rows.owner
    if owner is None or not rows.fits(tensor) or owner.numel() % rows.examples:
        return rows
    if not readable(owner):
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


def seen_from(view: Tensor, rows: Rows, base: Tensor) -> Rows:
    """The rows of a tensor of which a part with the examples in ``rows`` is a view."""
    if type(rows) is Rows and rows.owner is None and 0 <= rows.dim < view.dim():
        place = view.stride(rows.dim), view.shape[rows.dim]
        same = [d for d in range(base.dim()) if (base.stride(d), base.shape[d]) == place]
        if len(same) == 1:
            return rows.moved(same[0])
    return guess(base, rows.examples)


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


def varying(examples: int, owners: Tensor, start: int, most: int | None = None) -> Rows:
    """The one dimension of ``owners`` along which examples change; ``start`` is the first's."""
    if not readable(owners):
        return Rows(examples, -1)
    for dim in range(owners.dim() if most is None else most):
        line = owners.movedim(dim, 0).flatten(1)
        if bool((line == line[:, :1]).all()):
            return Rows(examples, start + dim, line[:, 0])
    return Rows(examples, -1)

"""Poisson draws in static shapes: a batch is filled up with blank rows to one of a few sizes.

Formal guarantee: every row that was drawn is in exactly one part of its step's batch, whatever was
drawn; blank rows are zeros and depend on no example; the sizes follow from the plan alone. That
blank rows add exactly nothing to a sum is the engine's part (`Engine.clipped_sum`).

Sizes are chosen so that all but one draw in a hundred fit the first of them, and all but one in
10⁹ the second. A larger draw is divided into parts. docs/how-to/static-shapes.md says what this
costs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from scipy import special
from torch import Tensor
from torch.utils import _pytree

from diminuendo.errors import InputError

OFTEN = 1e-2
"""Largest probability that a draw does not fit the main size."""
SELDOM = 1e-9
"""Largest probability that a draw does not fit the largest size, and comes in parts."""
# Sizes closer than this are one: a shape less is worth more than the rows.
_CLOSE = 1.01


def exceeds(examples: int, rate: float, size: int) -> float:
    """The probability that more than `size` of the examples are drawn."""
    if size >= examples:
        return 0.0
    return float(special.betainc(size + 1, examples - size, rate))


def enough(examples: int, rate: float, tail: float) -> int:
    """The smallest size, at least 1, that a draw exceeds with a probability of at most `tail`."""
    sizes = range(1, examples + 1)
    place = bisect_left(sizes, True, key=lambda size: exceeds(examples, rate, size) <= tail)
    return sizes[min(place, examples - 1)]


@dataclass(frozen=True)
class Buckets:
    """The sizes that parts of batches are filled up to.

    sizes  ascending; the number of rows of a part is always one of them
    parts  for each sampling rate, in how many parts a batch comes at least: blank ones follow
           where fewer were drawn
    """

    sizes: tuple[int, ...]
    parts: Mapping[float, int]

    @classmethod
    def of(
        cls, examples: int, rates: Iterable[float], *, world: int = 1, micro_batch: int | None
    ) -> Buckets:
        """The sizes for a plan's rates, of which each of `world` ranks holds its share.

        micro_batch  largest size that is allowed; None for any
        """
        distinct = set(rates)
        main = {rate: _share(enough(examples, rate, OFTEN), world) for rate in distinct}
        wanted = {_share(enough(examples, rate, SELDOM), world) for rate in distinct}
        wanted |= set(main.values())
        if micro_batch is None or micro_batch >= max(wanted):
            return cls(_apart(wanted), dict.fromkeys(distinct, 1))
        largest = max(main.values())
        size = math.ceil(largest / math.ceil(largest / micro_batch))
        return cls((size,), {rate: math.ceil(rows / size) for rate, rows in main.items()})

    def size(self, rows: int) -> int:
        """What a part of so many rows is filled up to."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def split(self, indices: Tensor, rate: float) -> list[Tensor]:
        """A draw as parts that fit the largest size; every index is in one of them."""
        parts = list(torch.split(indices, self.sizes[-1]))
        return parts + [indices[:0]] * (self.parts[rate] - len(parts))


def _share(rows: int, world: int) -> int:
    return math.ceil(rows / world)


def _apart(wanted: set[int]) -> tuple[int, ...]:
    """The sizes without those that have a larger one close by."""
    kept: list[int] = []
    for size in sorted(wanted, reverse=True):
        if not kept or kept[-1] > _CLOSE * size:
            kept.append(size)
    return tuple(reversed(kept))


class Cost(NamedTuple):
    """What filling up costs at one rate, on average over draws."""

    main: int
    """The size that nearly all batches have."""
    more: float
    """How many rows more than were drawn are computed, relative to the expected batch."""
    leaves: float
    """The probability that a draw does not fit the main size."""


def cost(examples: int, rate: float) -> Cost:
    """The cost of filling up the draws of one process, without micro-batches."""
    buckets = Buckets.of(examples, [rate], micro_batch=None)
    sizes = buckets.sizes
    rows, reached = 0.0, 1.0
    for size in sizes:
        beyond = exceeds(examples, rate, size)
        rows += size * (reached - beyond)
        reached = beyond
    rows += examples * reached  # whatever is left: less than one in 10⁹ of anything
    return Cost(sizes[0], rows / (examples * rate) - 1, exceeds(examples, rate, sizes[0]))


def filled_rows(part: Tensor, chosen: Tensor, size: int) -> Tensor:
    """The chosen rows of a tensor, then zeros."""
    rows = torch.empty((size, *part.shape[1:]), dtype=part.dtype, device=part.device)
    torch.index_select(part.detach(), 0, chosen.to(part.device), out=rows[: len(chosen)])
    rows[len(chosen) :].zero_()
    return rows


class Filler:
    """Fills up what a collate function gives.

    Which tensors have a row for each example is seen from what it makes of one example (`one`) and
    of the same example twice (`two`), not from sizes that may coincide in a batch.
    """

    def __init__(self, one: Any, two: Any) -> None:
        single, self._form = _pytree.tree_flatten(one)
        double, form = _pytree.tree_flatten(two)
        if form != self._form:
            raise _not_fillable("something whose form changes with the number of examples")
        self._by_row = [_by_row(*pair) for pair in zip(single, double, strict=True)]
        self._none = [
            leaf[:0] if rows else leaf for leaf, rows in zip(single, self._by_row, strict=True)
        ]

    def empty(self) -> Any:
        """A batch of no rows."""
        return _pytree.tree_unflatten(self._none, self._form)

    def fill(self, batch: Any, rows: int, size: int) -> Any:
        """The batch of so many rows with zeros up to `size` rows."""
        leaves, form = _pytree.tree_flatten(batch)
        if form != self._form:
            raise _not_fillable("batches of different forms")
        return _pytree.tree_unflatten(
            [
                _filled(leaf, rows, size) if by_row else leaf
                for leaf, by_row in zip(leaves, self._by_row, strict=True)
            ],
            form,
        )


def _filled(leaf: Any, rows: int, size: int) -> Tensor:
    if not isinstance(leaf, Tensor) or len(leaf) != rows:
        raise _not_fillable("a tensor whose rows are not one for each example")
    return torch.cat([leaf, leaf.new_zeros((size - rows, *leaf.shape[1:]))])


def _by_row(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.shape == two.shape:
            return False
        if one.dim() and two.dim() and (len(one), len(two)) == (1, 2):
            return True
        raise _not_fillable("a tensor whose rows are not one for each example")
    if one is None or isinstance(one, (bool, int, float, str)):
        return False
    raise _not_fillable(f"a {type(one).__name__}")


def _not_fillable(value: str) -> InputError:
    return InputError(
        "tensors with one row for each example (in tuples, lists or dicts)",
        name="what collate gives",
        value=value,
        remedy="Only those can be filled up with blank rows: train with pad=False.",
    )

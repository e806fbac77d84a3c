"""Which examples take part in a step: all of them, or a Poisson sample.

Formal guarantee: at rate p every example is drawn independently with probability p, to the last
bit of the double p, in every step anew, and a draw may be empty. This is the sampler that the
accountant accounts.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.training.distributed import Group
from diminuendo.training.groups import Groups
from diminuendo.training.mechanism import bernoulli
from diminuendo.training.padding import Buckets, Filler, filled_rows
from diminuendo.training.seeds import Seeds


def draw(examples: int, rate: float, seeds: Seeds, step: int) -> Tensor:
    """The indices of the examples that take part in a step, in increasing order."""
    if rate == 1:
        return torch.arange(examples)
    return torch.from_numpy(bernoulli.chosen(examples, rate, seeds.keys.sampling(step)))


def as_trained(part: Any, precision: torch.dtype | None = None) -> Tensor:
    """A tensor as it is; of an array, fractions in the model's precision, counts as int64."""
    if isinstance(part, Tensor):
        return part
    array = np.asarray(part)
    if array.dtype.kind in "iub":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind != "f":
        raise InputError(
            "numbers",
            name="the arrays of the dataset",
            value=str(array.dtype),
            remedy="Encode names as whole numbers 0, 1, … (labels) or as columns (features).",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return torch.as_tensor(array).to(precision)  # nobody writes on it


def precision_of(model: nn.Module) -> torch.dtype:
    """The type of the model's first floating-point parameter; float32 where there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def arrays_of(data: Any) -> tuple[Any, ...] | None:
    """The arrays of a dataset that consists of arrays: tensors, numpy's, pandas', lists in a tuple.

    A list is a map-style dataset: it has a length and examples.
    """
    if isinstance(data, TensorDataset):
        return data.tensors
    if hasattr(data, "__array__"):
        return (data,)
    kinds = (list,) if isinstance(data, tuple) else ()
    whole = isinstance(data, (tuple, list)) and len(data) > 0
    if whole and all(hasattr(part, "__array__") or isinstance(part, kinds) for part in data):
        return tuple(data)
    return None


def _pictures(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == np.uint8 and part.ndim > 1


class Source:
    """A dataset as something to index with a tensor of indices: tensors, arrays or map-style."""

    def __init__(self, data: Any, precision: torch.dtype | None = None) -> None:
        self._tensors: tuple[Tensor, ...] | None = None
        self._whole: list[tuple[Tensor, int]] = []
        self._dataset: Dataset[Any] | None = None
        parts = arrays_of(data)
        if parts is not None:
            # Pictures in bytes stay bytes: as counts they would take eight times the memory.
            self._tensors = tuple(
                torch.tensor(part) if _pictures(part) else as_trained(part, precision)
                for part in parts
            )
            lengths = {len(part) for part in self._tensors}
            if len(lengths) > 1:
                raise InputError(
                    "of one length", name="the arrays of the dataset", value=sorted(lengths)
                )
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            self._dataset = cast("Dataset[Any]", data)
        else:
            raise InputError(
                "tensors, arrays or a map-style Dataset",
                name="the dataset",
                value=type(data),
                remedy="An iterable dataset cannot be Poisson-sampled.",
            )
        if len(self) == 0:
            raise InputError("at least one example", name="the dataset", value=0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of a dataset that consists of them; else none."""
        return self._tensors or ()

    def __len__(self) -> int:
        if self._tensors is not None:
            return len(self._tensors[0])
        return len(cast(Sized, self._dataset))

    def batches(
        self,
        indices: Iterator[Tensor],
        *,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        generator: torch.Generator | None = None,
        buckets: Buckets | None = None,
    ) -> Iterator[Any]:
        """One batch for each tensor of indices, empty ones included.

        `generator` seeds the workers, so that loading leaves PyTorch's own generator alone.
        With `buckets`, every batch is filled up with blank rows to one of their sizes.
        """
        if self._tensors is not None:
            for chosen in indices:
                if buckets is None and len(chosen) == len(self):
                    parts = self._all_rows()
                else:
                    parts = tuple(_rows(part, chosen, buckets) for part in self._tensors)
                yield parts if len(parts) > 1 else parts[0]
            return
        yield from self._loaded(indices, workers, pin_memory, collate, generator, buckets)

    def _all_rows(self) -> tuple[Tensor, ...]:
        """A copy of all rows: the same one every time, unless somebody wrote on it."""
        spoilt = [copy.requires_grad or copy._version != seen for copy, seen in self._whole]
        if any(spoilt) or not self._whole:
            copies = [part.detach().clone() for part in self.tensors]
            self._whole = [(copy, copy._version) for copy in copies]
        return tuple(copy for copy, _ in self._whole)

    def on(self, device: torch.device, room: float) -> tuple[Tensor, ...] | None:
        """The tensors of a dataset that consists of them, on a device; None where they take more
        bytes than `room`, or there are none."""
        size = sum(part.numel() * part.element_size() for part in self.tensors)
        if self._tensors is None or size > room:
            return None
        return tuple(part.to(device) for part in self._tensors)

    def fillable(self) -> bool:
        """Whether batches can be filled up with blank rows."""
        if self._tensors is not None:
            return True
        try:
            _Collate(
                cast("Dataset[Any]", self._dataset), default_collate, Buckets((1,), {})
            ).check()
        except Exception:  # whatever the dataset cannot do, it need not do
            return False
        return True

    def _loaded(
        self,
        indices: Iterator[Tensor],
        workers: int,
        pin_memory: bool,
        collate: Callable[[list[Any]], Any] | None,
        generator: torch.Generator | None,
        buckets: Buckets | None,
    ) -> Iterator[Any]:
        """The batches of a map-style dataset."""
        dataset = cast("Dataset[Any]", self._dataset)
        collated = _Collate(dataset, collate or default_collate, buckets)
        collated.check()
        yield from DataLoader(
            dataset,
            batch_sampler=cast(Any, _Lists(indices)),
            num_workers=workers,
            pin_memory=pin_memory,
            generator=generator,
            collate_fn=collated,
        )


def _rows(part: Tensor, chosen: Tensor, buckets: Buckets | None) -> Tensor:
    return part[chosen] if buckets is None else filled_rows(part, chosen, buckets.size(len(chosen)))


class Drawn(NamedTuple):
    """A batch, the dataset that it was drawn from, and how many of its rows are not blank."""

    source: Source
    batch: Any
    rows: int

    def other_rows(self, rows: Tensor) -> bool:
        """Whether these are rows of the dataset that are not in the batch.

        Told only of a dataset of tensors, by rows that it has once; rows that somebody changed on
        the way from the batch to the model are in neither.
        """
        parts = self.batch if isinstance(self.batch, tuple) else (self.batch,)
        for whole, part in zip(self.source.tensors, parts, strict=False):
            if rows.shape != part.shape or rows.dtype != whole.dtype:
                continue
            given = rows.detach().to(whole.device)
            off = given[_flat(given != part).any(1)][:_COMPARED]
            elsewhere = [_count(whole, row) for row in off if not _count(part, row)]
            if len(elsewhere) > 1 and set(elsewhere) == {1}:
                return True
        return False

    def out_of_order(self, rows: Tensor) -> bool:
        """Whether rows that were drawn lie where the blank ones belong, at the end.

        Told by rows that the batch has once.
        """
        for part in _pytree.tree_leaves(self.batch):
            if not isinstance(part, Tensor) or (part.shape, part.dtype) != (rows.shape, rows.dtype):
                continue
            drawn, blank = part[: self.rows], part[self.rows :]
            late = rows.detach().to(part.device)[self.rows :]
            late = late[_flat(late != blank).any(1)][:_COMPARED]
            places = [_flat(drawn == row).all(1).nonzero().flatten().tolist() for row in late]
            if all(len(found) == 1 for found in places) and len({*map(tuple, places)}) > 1:
                return True
        return False


_COMPARED = 16


def _count(rows: Tensor, row: Tensor) -> int:
    return int(_flat(rows == row).all(1).sum())


def _flat(rows: Tensor) -> Tensor:
    """As a table; a row may be one number."""
    return rows.flatten(1) if rows.dim() > 1 else rows[:, None]


class _Lists:
    """Index tensors as the lists of numbers that a DataLoader takes."""

    def __init__(self, indices: Iterator[Tensor]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        for chosen in self._indices:
            yield chosen.tolist()


class _Collate:
    """Collates examples; an empty list becomes a batch of length zero of the right shape.

    With `buckets`, blank rows follow those of the examples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        buckets: Buckets | None = None,
    ) -> None:
        self._dataset, self._collate, self._buckets = dataset, collate, buckets
        self._filler: Filler | None = None

    def check(self) -> None:
        """Raise where batches are to be filled up and cannot be."""
        if self._buckets is not None:
            with torch.random.fork_rng(devices=[]):  # a collate function may draw random numbers
                example = self._dataset[0]
                self._filler = Filler(self._collate([example]), self._collate([example, example]))

    def __call__(self, examples: list[Any]) -> Any:
        if self._filler is not None and self._buckets is not None:
            batch = self._collate(examples) if examples else self._filler.empty()
            return self._filler.fill(batch, len(examples), self._buckets.size(len(examples)))
        if examples:
            return self._collate(examples)
        return _emptied(self._collate([self._dataset[0]]))


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, dict):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_emptied(part) for part in batch)
    return batch


class Part(NamedTuple):
    """A micro-batch: of which step (0, 1, …), its place in the logical batch, and its size.

    `size` counts blank rows, too, where there are any.
    """

    step: int
    first: bool
    last: bool
    size: int
    parts: int = 1
    """Of how many micro-batches the logical batch consists on this rank."""
    place: int = 0
    """Which of them this is, from 0."""
    drawn: int | None = None
    """How many rows, the first ones, were drawn, where blank ones may follow: private."""

    def mask(self, device: torch.device) -> Tensor | None:
        """Which rows were drawn, where blank ones may follow; else None."""
        if self.drawn is None:
            return None
        return torch.arange(self.size, device=device) < self.drawn


class Sampler:
    """The plan's batches, step after step; each rank gets its share of the same sample.

    micro_batch  largest number of examples in one part of a step's batch; None for no limit
    pad          whether draws are filled up with blank rows to a few sizes (`padding`)
    """

    def __init__(
        self,
        plan: Plan,
        seeds: Seeds,
        group: Group,
        micro_batch: int | None,
        *,
        pad: bool = False,
    ) -> None:
        self._plan, self._seeds, self._group = plan, seeds, group
        self._rates: list[float] = plan.rates.tolist()
        sampled = min(self._rates) < 1  # elsewhere all batches have one size anyway
        self._pad = _validate.flag("pad", pad) and sampled
        self.smallest: int | None = None
        """The smallest limit that any part had so far; None where there was none."""
        self.micro_batch = micro_batch

    @property
    def micro_batch(self) -> int | None:
        """The largest number of examples in one part; may be changed between steps.

        Where draws are filled up, the next call of `batches` follows it.
        """
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, limit: int | None) -> None:
        self._micro_batch = None if limit is None else _validate.count("micro_batch", limit)
        self.buckets = self._sizes()
        largest = self._micro_batch if self.buckets is None else self.buckets.sizes[-1]
        if largest is not None:
            self.smallest = min(largest, self.smallest or largest)

    def _sizes(self) -> Buckets | None:
        """The sizes that draws are filled up to; None where they are not."""
        if not self._pad:
            return None
        return Buckets.of(
            self._plan.examples,
            self._rates,
            world=self._group.world,
            micro_batch=self._micro_batch,
        )

    def rate(self, step: int) -> float:
        """The sampling rate of a step, in (0, 1]; beyond the plan's last, that of the last."""
        return self._rates[min(step, len(self._rates) - 1)]

    def expected(self, step: int, *, at_least: int) -> int:
        """About how many rows a rank holds at a time in this step: public, and at most all.

        Not fewer than `at_least` where the dataset has so many; blank rows count.
        """
        if self.buckets is not None:
            return min(max(self.buckets.sizes[0], at_least), self._plan.examples)
        share = math.ceil(self._plan.examples * self.rate(step) / self._group.world)
        held = share if self.micro_batch is None else min(share, self.micro_batch)
        return min(max(held, at_least), self._plan.examples)

    def check(self, source: Source, groups: Groups | None = None) -> None:
        """Raise where the dataset, or the number of persons in it, is not of the plan's size."""
        if groups is not None and groups.rows != len(source):
            raise InputError(
                f"one for each row of the dataset ({len(source)})",
                name="the entries of groups",
                value=groups.rows,
            )
        size = len(source) if groups is None else len(groups)
        if size != self._plan.examples:
            raise InputError(
                f"the plan's examples ({self._plan.examples})",
                name="the size of the dataset" if groups is None else "the number of groups",
                value=size,
                remedy="Plan for this dataset."
                if groups is None
                else f"Plan with examples={size}: one for each person, not for each row.",
            )

    def batches(
        self,
        source: Source,
        first: int,
        last: int | None,
        *,
        groups: Groups | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[tuple[Part, Any]]:
        """Micro-batches with their places, from step `first` up to `last`, or without end."""
        self.check(source, groups)
        _validate.count("workers", workers, at_least=0)
        _validate.flag("pin_memory", pin_memory)
        if collate is not None and not callable(collate):
            raise InputError("a function of a list of examples", name="collate", value=collate)
        parts: deque[Part] = deque()
        buckets = self.buckets
        for batch in source.batches(
            self._indices(parts, first, last, groups, buckets),
            workers=workers,
            pin_memory=pin_memory,
            collate=collate,
            generator=self._seeds.generator("loading", first),
            buckets=buckets,
        ):
            yield parts.popleft(), batch

    def _indices(
        self,
        parts: deque[Part],
        first: int,
        last: int | None,
        groups: Groups | None,
        buckets: Buckets | None,
    ) -> Iterator[Tensor]:
        step = first
        while last is None or step < last:
            drawn = draw(self._plan.examples, self.rate(step), self._seeds, step)
            if groups is not None:
                drawn = groups.one_row_each(drawn, self._seeds, step)
            share = self._group.share(drawn)
            if buckets is None:
                pieces = _chunks(share, self.micro_batch)
            else:
                pieces = buckets.split(share, self.rate(step))
            for i, piece in enumerate(pieces):
                rows, size = (
                    (None, len(piece))
                    if buckets is None
                    else (len(piece), buckets.size(len(piece)))
                )
                last_one = i == len(pieces) - 1
                parts.append(Part(step, i == 0, last_one, size, len(pieces), i, rows))
                yield piece
            step += 1


def _chunks(indices: Tensor, size: int | None) -> Sequence[Tensor]:
    """A logical batch as micro-batches of at most `size`; an empty one stays one empty chunk."""
    if size is None or len(indices) <= size:
        return [indices]
    return torch.split(indices, size)

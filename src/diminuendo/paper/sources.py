"""Where the cells of the part `joint` get their private samples and their auxiliary data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from diminuendo import _extras
from diminuendo.paper import data
from diminuendo.paper.data import Labelled, Pool, Sample, Task
from diminuendo.paper.digits import Digits
from diminuendo.paper.drawn import description, drawn

_TESTS = 2000
FIRST_AUXILIARY = 50_000
"""The first seed of the auxiliary sets that settings are tuned on."""


class Source(Protocol):
    """Private samples to train on, with a test set each, and auxiliary data of the same shape."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def features(self) -> int:
        """Inputs of an example."""
        ...

    @property
    def classes(self) -> int:
        """How many classes there are."""
        ...

    @property
    def largest_norm(self) -> float:
        """The largest norm of an example."""
        ...

    @property
    def available(self) -> int:
        """The largest N."""
        ...

    @property
    def description(self) -> str:
        """Where the data come from."""
        ...

    @property
    def auxiliary_description(self) -> str:
        """What tuning sees instead."""
        ...

    def samples(self, examples: int, seeds: Sequence[int]) -> list[Sample]:
        """A training sample of N examples for each seed, with the test set."""
        ...

    def auxiliary(
        self, examples: int, count: int, *, first: int = FIRST_AUXILIARY
    ) -> tuple[list[Labelled] | None, list[Labelled] | None]:
        """Public training and test sets, or twice None: then synthetic data are used."""
        ...


@dataclass(frozen=True, eq=False)
class DigitSource:
    """MNIST or two of its digits; tuned on digits drawn from fonts, or on other images in MNIST's
    form, where they are given.
    """

    digits: Digits
    task: Task
    public: Digits | None

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def features(self) -> int:
        """Principal components."""
        return self.task.features

    @property
    def classes(self) -> int:
        """How many digits there are to tell apart."""
        return self.task.classes

    @property
    def largest_norm(self) -> float:
        """The largest norm of an example."""
        return self.task.largest_norm

    @property
    def available(self) -> int:
        """The largest N."""
        return int(self._pool.labels.size)

    @property
    def description(self) -> str:
        """Where the data come from."""
        return self.digits.source

    @property
    def auxiliary_description(self) -> str:
        """What tuning sees instead."""
        if self.public is None:
            return description()
        if self.classes == 10:
            return self.public.source
        return f"{self.public.source}; another {self.classes} of its classes in each set"

    @cached_property
    def _pool(self) -> Pool:
        return data.pool(self.digits, self.task)

    def samples(self, examples: int, seeds: Sequence[int]) -> list[Sample]:
        """Prepared as the paper does it, with the whole test set."""
        return data.draw_many(self._pool, examples, seeds)

    def auxiliary(
        self, examples: int, count: int, *, first: int = FIRST_AUXILIARY
    ) -> tuple[list[Labelled] | None, list[Labelled] | None]:
        """Samples of the public images, prepared in the same way; a part of its test set each."""
        place = examples, first
        if self._kept.get(place, (0, []))[0] < count:
            if any(other[0] != examples for other in self._kept):
                self._kept.clear()
            seeds = range(first, first + count)
            self._kept[place] = count, [self._public_sample(examples, seed) for seed in seeds]
        drawn = self._kept[place][1][:count]
        return [one.train for one in drawn], [one.test for one in drawn]

    @cached_property
    def _pools(self) -> dict[int, Pool]:
        """The last pool of public images."""
        return {}

    @cached_property
    def _kept(self) -> dict[tuple[int, int], tuple[int, list[Sample]]]:
        """The public samples of the last N, since several models are tuned on them."""
        return {}

    def _public_sample(self, examples: int, seed: int) -> Sample:
        public = drawn() if self.public is None else self.public
        chance = np.random.default_rng(seed)
        chosen = np.array(self.task.digits)
        if self.public is not None:
            chosen = np.sort(chance.permutation(np.unique(public.labels))[: self.classes])
        task = Task(name=f"public {self.name}", digits=tuple(int(c) for c in chosen))
        if self.classes not in self._pools or self._pools[self.classes].task.digits != task.digits:
            self._pools[self.classes] = data.pool(public, task)
        sample = data.draw(self._pools[self.classes], examples, seed)
        rows = torch.from_numpy(chance.permutation(len(sample.test[1]))[:_TESTS])
        return Sample(sample.train, (sample.test[0][rows], sample.test[1][rows]))


@dataclass(frozen=True, eq=False)
class TableSource:
    """Rows of numbers and labels; tuned on synthetic data of the same shape.

    A sample is N rows, standardised by its own means and deviations and scaled to a largest norm of
    10; all other rows are its test set.
    """

    name: str
    rows: NDArray[np.float64]
    labels: NDArray[np.int64]
    description: str
    largest_norm: float = data.LARGEST_NORM

    auxiliary_description = "synthetic: linear teachers, network teachers, mixtures"

    @property
    def features(self) -> int:
        """Columns."""
        return int(self.rows.shape[1])

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return int(self.labels.max()) + 1

    @property
    def available(self) -> int:
        """The largest N: a fifth of the rows are for testing."""
        return len(self.labels) * 4 // 5

    def samples(self, examples: int, seeds: Sequence[int]) -> list[Sample]:
        """Another N rows for each seed, tested on all the others."""
        return [self._sample(examples, seed) for seed in seeds]

    def _sample(self, examples: int, seed: int) -> Sample:
        order = np.random.default_rng([seed, examples]).permutation(len(self.labels))
        train, test = order[:examples], order[examples:]
        own = self.rows[train]
        spread = own.std(axis=0)
        scaled = (self.rows - own.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        scaled *= self.largest_norm / np.linalg.norm(scaled[train], axis=1).max()
        return Sample(self._labelled(scaled, train), self._labelled(scaled, test))

    def _labelled(self, rows: NDArray[np.float64], own: NDArray[np.int64]) -> Labelled:
        return (
            torch.from_numpy(rows[own].astype(np.float32)),
            torch.from_numpy(self.labels[own]),
        )

    def auxiliary(
        self, examples: int, count: int, *, first: int = FIRST_AUXILIARY
    ) -> tuple[list[Labelled] | None, list[Labelled] | None]:
        """None: synthetic data are used."""
        del examples, count, first
        return None, None


def breast_cancer() -> TableSource:
    """The Wisconsin breast cancer set inside scikit-learn: 569 rows of 30 numbers, two classes."""
    with _extras.needed("sklearn", extra="experiments", purpose="The tabular set"):
        from sklearn.datasets import load_breast_cancer
    loaded = load_breast_cancer()
    return TableSource(
        "breast cancer",
        np.asarray(loaded.data, dtype=np.float64),
        np.asarray(loaded.target, dtype=np.int64),
        "Breast Cancer Wisconsin (diagnostic), inside scikit-learn: 569 rows",
    )


def sources(digits: Digits, public: Digits | None) -> dict[str, Source]:
    """Every task of the part `joint` by its name."""
    own: list[Source] = [DigitSource(digits, task, public) for task in data.TASKS.values()]
    return {one.name: one for one in [*own, breast_cancer()]}

"""Candidates on auxiliary data: many runs as one, each part of the search with data of its own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.replicas.engine import train
from diminuendo.replicas.initial import initialise
from diminuendo.replicas.replica import Model, Outcome
from diminuendo.tuning.auxiliary import Labelled
from diminuendo.tuning.space import Candidate

Objective = Literal["train-loss", "test-loss", "test-error"]
OBJECTIVES: tuple[Objective, ...] = ("train-loss", "test-loss", "test-error")
FIRST_HELD_OUT_SEED = 1_000_000
SMALL = 4_000_000
"""Parameters × examples below which a model is trained by one thread."""


@dataclass(frozen=True)
class Sets:
    """Training sets of one size, and a test set for each (none at all for the training loss)."""

    train: Sequence[Labelled]
    test: Sequence[Labelled]

    @property
    def examples(self) -> int:
        """How many examples a training set has."""
        return len(self.train[0][0])


@dataclass(frozen=True)
class Value:
    """What one run reached: the objective (infinite if the run was not finite), test accuracy."""

    objective: float
    accuracy: float


@contextmanager
def _few_threads(work: int) -> Iterator[None]:
    """One thread for small work: several would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if work < SMALL else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Judge:
    """Trains candidates; run i of all of them has the same data, start and noise directions.

    examples   N that the budget is planned for; sets may be smaller (see `Candidate.replica`)
    search     the data that candidates are compared on
    held_out   data for the candidates that were chosen; no choice is made on it
    """

    budget: Budget
    models: Mapping[str, Model]
    examples: int
    search: Sets
    held_out: Sets
    minimise: Objective
    seed: int = 0
    device: torch.device | str | None = None
    done: dict[tuple[Candidate, int], Value] = field(default_factory=dict)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """How many parameters each model has."""
        return {
            name: sum(p.numel() for p in initialise(model, 0).parameters())
            for name, model in self.models.items()
        }

    def means(self, candidates: Sequence[Candidate], repeats: int) -> Vector:
        """The mean objective of each candidate's first `repeats` runs on the search's data."""
        self._train(candidates, range(repeats))
        return np.array([self._mean(one, repeats) for one in candidates])

    def runs(self, candidate: Candidate, repeats: int) -> Vector:
        """The objectives of a candidate's first `repeats` runs, trained before."""
        return np.array([self.done[candidate, i].objective for i in range(repeats)])

    def unseen(self, candidates: Sequence[Candidate], repeats: int) -> list[list[Value]]:
        """Each candidate's runs on held-out data."""
        numbers = range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + repeats)
        self._train(candidates, numbers)
        return [[self.done[one, i] for i in numbers] for one in candidates]

    def _mean(self, candidate: Candidate, repeats: int) -> float:
        return float(np.mean(self.runs(candidate, repeats)))

    def _train(self, candidates: Sequence[Candidate], numbers: range) -> None:
        """Train what has not been trained; runs of one model on one set as one: the data then
        stay in the cache.
        """
        sets = self.held_out if numbers.start >= FIRST_HELD_OUT_SEED else self.search
        left = defaultdict(list)
        for candidate in dict.fromkeys(candidates):
            for number in numbers:
                if (candidate, number) not in self.done:
                    place = (number - numbers.start) % len(sets.train)
                    left[candidate.model, place].append((candidate, number))
        share = sets.examples / self.examples
        for (name, place), pairs in left.items():
            replicas = [
                candidate.replica(self.budget, seed=self.seed + number, share=share)
                for candidate, number in pairs
            ]
            with _few_threads(self._sizes[name] * sets.examples):
                outcomes = train(
                    self.models[name],
                    sets.train[place],
                    replicas,
                    evaluate={"test": sets.test[place]} if sets.test else None,
                    device=self.device,
                    progress=False,
                )
            for pair, outcome in zip(pairs, outcomes, strict=True):
                self.done[pair] = self._value(outcome)

    def _value(self, outcome: Outcome) -> Value:
        test = outcome.evaluations.get("test", {})
        accuracy = test.get("accuracy")
        accuracy = math.nan if accuracy is None else accuracy
        objective: float | None = outcome.train_loss
        if self.minimise == "test-loss":
            objective = test.get("loss")
        elif self.minimise == "test-error":
            objective = 1 - accuracy
        if outcome.status != "done" or objective is None or not math.isfinite(objective):
            return Value(math.inf, accuracy)
        return Value(objective, accuracy)

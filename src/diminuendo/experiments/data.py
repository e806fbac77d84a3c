"""The paper's preparation of the digits, and what a privacy claim does not say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.experiments import digits as sources
from diminuendo.experiments.digits import Digits

NOT_COVERED = (
    "The projection onto 60 principal components is computed on the pool that samples are drawn "
    "from; mean, standard deviation and largest norm are computed on the training sample itself. "
    "The paper prepares its data so; none of it is paid for. A covered way: a public projection "
    "and a fixed scale.",
)
"""What pages must say wherever prepared digits were trained on."""

FEATURES = 60
LARGEST_NORM = 10.0

Labelled = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A problem by its public shape: its name, the digits it tells apart, and its scale."""

    name: str
    digits: tuple[int, ...]
    features: int = FEATURES
    largest_norm: float = LARGEST_NORM

    @property
    def classes(self) -> int:
        return len(self.digits)


MNIST = Task(name="MNIST", digits=tuple(range(10)))
MNIST35 = Task(name="MNIST35", digits=(3, 5))
TASKS = {task.name: task for task in (MNIST, MNIST35)}


@dataclass(frozen=True, eq=False)
class Projected:
    """A task's pool and test set in principal components, before the sample decides the scale."""

    task: Task
    pool: NDArray[np.float64]
    labels: NDArray[np.int64]
    test: NDArray[np.float64]
    test_labels: NDArray[np.int64]
    source: str


@dataclass(frozen=True, eq=False)
class Sample:
    """N examples ready for training, and the whole test set in the sample's own scale."""

    train: Labelled
    test: Labelled


def load(folder: str | Path | None = None, *, fetch: bool = False) -> Digits:
    """The digits: from a folder, from a public mirror (once), or the embedded ones."""
    if folder is not None:
        return sources.fetch(folder) if fetch else sources.from_folder(folder)
    return sources.fetch() if fetch else sources.embedded()


def project(digits: Digits, task: Task) -> Projected:
    """Vectorised images of the task's digits on the pool's first principal components."""
    kept, held = (np.isin(labels, task.digits) for labels in (digits.labels, digits.test_labels))
    images, test = (
        part.astype(np.float64) / 255 for part in (digits.images[kept], digits.test_images[held])
    )
    centre = images.mean(axis=0)
    components = principal_components(images, task.features)
    number = np.full(256, -1)
    number[list(task.digits)] = np.arange(task.classes)
    return Projected(
        task,
        (images - centre) @ components,
        number[digits.labels[kept]],
        (test - centre) @ components,
        number[digits.test_labels[held]],
        digits.source,
    )


def principal_components(rows: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """The `count` directions of largest variance, as columns, each with a settled sign."""
    centred = rows - rows.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    leading = vectors[:, ::-1][:, :count]
    signs = np.sign(leading[np.abs(leading).argmax(axis=0), np.arange(leading.shape[1])])
    return np.asarray(leading * signs)


def draw(projected: Projected, examples: int, seed: int) -> Sample:
    """N examples without replacement, centred, to deviation one by coordinate, then scaled so that
    the largest norm is 10; the test set goes through the same map."""
    available = projected.labels.size
    examples = _validate.count("examples", examples, at_least=2)
    if examples > available:
        raise InputError(
            f"at most {available}, which is what {projected.task.name} has here",
            name="examples",
            value=examples,
            remedy="The full MNIST (--data-dir or --fetch) has more than the embedded digits.",
        )
    rows = np.random.default_rng([seed, examples]).permutation(available)[:examples]
    chosen = projected.pool[rows]
    centre, spread = chosen.mean(axis=0), chosen.std(axis=0)
    spread[spread == 0] = 1.0
    scaled = (chosen - centre) / spread
    scale = projected.task.largest_norm / np.linalg.norm(scaled, axis=1).max()
    return Sample(
        _tensors(scaled * scale, projected.labels[rows]),
        _tensors((projected.test - centre) / spread * scale, projected.test_labels),
    )


def draw_many(projected: Projected, examples: int, seeds: Sequence[int]) -> list[Sample]:
    return [draw(projected, examples, seed) for seed in seeds]


def _tensors(x: NDArray[np.float64], y: NDArray[np.int64]) -> Labelled:
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))

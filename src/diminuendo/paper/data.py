"""The paper's preparation of the digits, and what a privacy claim does not say about it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.paper import digits as sources
from diminuendo.paper.digits import Digits

NOT_COVERED = (
    "The projection onto 60 principal components, the mean, the standard deviations and the "
    "largest norm are computed on the training sample itself, as the paper does it, and are not "
    "paid for. A covered way: a projection and a scale from public data.",
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
class Pool:
    """A task's images to draw from and to test on, as grey values between 0 and 1."""

    task: Task
    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
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


def pool(digits: Digits, task: Task) -> Pool:
    """The task's digits, vectorised, their labels numbered from zero."""
    kept, held = (np.isin(labels, task.digits) for labels in (digits.labels, digits.test_labels))
    number = np.full(256, -1)
    number[list(task.digits)] = np.arange(task.classes)
    return Pool(
        task,
        digits.images[kept].astype(np.float32) / np.float32(255),
        number[digits.labels[kept]],
        digits.test_images[held].astype(np.float32) / np.float32(255),
        number[digits.test_labels[held]],
        digits.source,
    )


def principal_components(rows: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """The `count` directions of largest variance, as columns, each with a settled sign.

    From the smaller of the two products of the centred rows with themselves.
    """
    centred = rows - rows.mean(axis=0)
    wide = centred.shape[0] < centred.shape[1]
    product = centred @ centred.T if wide else centred.T @ centred
    size = len(product)
    _, vectors = eigh(product, subset_by_index=[size - count, size - 1])
    leading = vectors[:, ::-1]
    if wide:
        leading = centred.T @ leading
        leading = leading / np.linalg.norm(leading, axis=0)
    signs = np.sign(leading[np.abs(leading).argmax(axis=0), np.arange(count)])
    return np.asarray(leading * signs)


def draw(pool: Pool, examples: int, seed: int) -> Sample:
    """N examples without replacement, prepared as the paper does it, from the sample alone:
    principal components, centred, deviation one by coordinate, scaled so that the largest norm
    is 10. The test set goes through the same map.
    """
    available, task = pool.labels.size, pool.task
    examples = _validate.count("examples", examples, at_least=task.features + 1)
    if examples > available:
        raise InputError(
            f"at most {available}, which is what {task.name} has here",
            name="examples",
            value=examples,
            remedy="The full MNIST (--data-dir or --fetch) has more than the embedded digits.",
        )
    rows = np.random.default_rng([seed, examples]).permutation(available)[:examples]
    images = pool.images[rows].astype(np.float64)
    centre, components = images.mean(axis=0), principal_components(images, task.features)
    projected = (images - centre) @ components
    spread = projected.std(axis=0)
    scaled = projected / spread
    scale = task.largest_norm / np.linalg.norm(scaled, axis=1).max()
    onto = (components / spread * scale).astype(np.float32)
    return Sample(
        _tensors(scaled * scale, pool.labels[rows]),
        _tensors((pool.test_images - centre.astype(np.float32)) @ onto, pool.test_labels),
    )


def draw_many(pool: Pool, examples: int, seeds: Sequence[int]) -> list[Sample]:
    """A sample for each seed, some at a time: LAPACK leaves Python's lock alone."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(lambda seed: draw(pool, examples, seed), seeds))


_AT_ONCE = 4


def _tensors(x: NDArray[Any], y: NDArray[np.int64]) -> Labelled:
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))

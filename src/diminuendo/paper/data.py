"""The paper's tasks and the preparation of their data, which no privacy claim covers."""

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
"""What every page about runs on prepared digits must say."""

FEATURES = 60
LARGEST_NORM = 10.0

Labelled = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A classification task by its public facts: the digits it tells apart, and its scale."""

    name: str
    digits: tuple[int, ...]
    features: int = FEATURES
    largest_norm: float = LARGEST_NORM

    @property
    def classes(self) -> int:
        """How many digits there are to tell apart."""
        return len(self.digits)


MNIST = Task(name="MNIST", digits=tuple(range(10)))
MNIST35 = Task(name="MNIST35", digits=(3, 5))
TASKS = {task.name: task for task in (MNIST, MNIST35)}


@dataclass(frozen=True, eq=False)
class Pool:
    """A task's images to draw samples from and to test on: rows of grey values in [0, 1]."""

    task: Task
    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    source: str


@dataclass(frozen=True, eq=False)
class Sample:
    """N prepared examples, and the whole test set prepared by the same map."""

    train: Labelled
    test: Labelled


def load(folder: str | Path | None = None, *, fetch: bool = False) -> Digits:
    """The embedded digits, those in a folder or, with fetch=True, those of a public mirror."""
    if folder is not None:
        return sources.fetch(folder) if fetch else sources.from_folder(folder)
    return sources.fetch() if fetch else sources.embedded()


def pool(digits: Digits, task: Task) -> Pool:
    """The task's images as rows in [0, 1], and their labels from 0 to classes − 1."""
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
    """The `count` directions of largest variance, as columns, each with a definite sign.

    Computed from the smaller of the two Gram matrices of the centred rows.
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
    """A sample of N examples without replacement, prepared as in the paper from the sample alone.

    It is projected on its principal components, centred, scaled to standard deviation one in each
    coordinate, and then as a whole to a largest norm of 10. The test set goes through the same map.
    """
    available, task = pool.labels.size, pool.task
    examples = _validate.count("examples", examples, at_least=task.features + 1)
    if examples > available:
        raise InputError(
            f"at most {available}, the number of {task.name} images in this data",
            name="examples",
            value=examples,
            remedy="The full MNIST (--data-dir or --fetch) has more than the embedded digits.",
        )
    rows = np.random.default_rng([seed, examples]).permutation(available)[:examples]
    train, test = prepared(pool.images[rows].astype(np.float64), pool.test_images, task)
    return Sample(_tensors(train, pool.labels[rows]), _tensors(test, pool.test_labels))


def prepared(
    images: NDArray[np.float64], test_images: NDArray[np.float32], task: Task
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A sample's images and the test images by the sample's own map, as the paper prepares them."""
    centre, components = images.mean(axis=0), principal_components(images, task.features)
    projected = (images - centre) @ components
    spread = projected.std(axis=0)
    scaled = projected / spread
    scale = task.largest_norm / np.linalg.norm(scaled, axis=1).max()
    onto = (components / spread * scale).astype(np.float32)
    test = (test_images - centre.astype(np.float32)) @ onto
    return (scaled * scale).astype(np.float32), test


def draw_many(pool: Pool, examples: int, seeds: Sequence[int]) -> list[Sample]:
    """A sample for each seed, drawn in threads: LAPACK releases Python's global lock."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(lambda seed: draw(pool, examples, seed), seeds))


_THREADS = 4


def _tensors(x: NDArray[Any], y: NDArray[np.int64]) -> Labelled:
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))

"""Synthetic data like tables of measurements: correlated features around a common level, classes in
clusters.

`auxiliary.gaussian` has independent, centred features, on which private training is harder than on
most real tables; settings found there are too cautious (docs/how-to/tuning.md has figures). Here
the spectrum of the features falls like a power of its index, they may lie off zero, and how far
classes are apart differs from set to set, so that the choice does not rest on one guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from diminuendo import _validate
from diminuendo.tuning.auxiliary import Labelled, Shape

SEPARATIONS = (4.0, 8.0, 16.0)
"""Distance of clusters from the middle, in standard deviations of the whitened features."""
SCALES = (1.0, 0.6)
"""The largest norm in a set, as a share of the stated one."""
OFFSETS = (0.0, 1.0)
"""The common level of the features, in root mean squares of their deviations."""
POWERS = (1.0, 0.5)
"""Eigenvalues of the covariance fall like 1, 2, 3, … to minus this power."""
_CENTRES = 2


def tabular(shape: Shape, number: int, *, seed: int = 0) -> Labelled:
    """The set of this number (0, 1, …): each takes its turn with separations, scales and so on."""
    _validate.count("number", number, at_least=0)
    chance = np.random.default_rng([_validate.count("seed", seed, at_least=0), number])
    n, d, classes = shape.examples, shape.features, shape.classes
    deviations = np.arange(1, d + 1) ** (-POWERS[number // 3 % 2] / 2)
    turned = np.linalg.qr(chance.standard_normal((d, d)))[0]
    y = chance.integers(classes, size=n)
    centres = chance.standard_normal((classes, _CENTRES, d))
    apart = SEPARATIONS[number % 3] / math.sqrt(d)
    x = chance.standard_normal((n, d)) + apart * centres[y, chance.integers(_CENTRES, size=n)]
    x = (x * deviations) @ turned.T
    level = OFFSETS[number // 2 % 2] * math.sqrt(float(np.mean(deviations**2)))
    x = x + level * chance.standard_normal(d)
    x *= SCALES[number % 2] * shape.largest_norm / np.linalg.norm(x, axis=1).max()
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def pairs(
    shape: Shape, tests: int, count: int, *, first: int = 0, seed: int = 0
) -> Iterator[tuple[Labelled, Labelled]]:
    """So many training sets of this shape, each with a test set of the same kind."""
    both = Shape(
        examples=shape.examples + tests,
        features=shape.features,
        classes=shape.classes,
        largest_norm=shape.largest_norm,
    )
    n = shape.examples
    for number in range(first, first + count):
        x, y = tabular(both, number, seed=seed)
        yield (x[:n], y[:n]), (x[n:], y[n:])

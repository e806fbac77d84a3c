"""Auxiliary data: synthetic or public data with the public shape of a private data set.

Only public facts enter: how many examples, features and classes, and the largest norm. Tuning and
measuring on such data costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diminuendo import _validate
from diminuendo.errors import InputError

Labelled = tuple[torch.Tensor, torch.Tensor]
"""Features (N, d) and labels (N,)."""

LABELS = ("teacher", "network", "clusters", "mixtures", "random")
MIXED = ("teacher", "network", "mixtures")
"""The kinds of labels that stand for nothing known: a linear rule, a curved one, and clusters."""
_CENTRES = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Public facts about a private data set.

    examples      N, at least 2
    features      inputs of an example
    classes       at least 2
    largest_norm  the largest Euclidean norm of an example's features
    """

    examples: int
    features: int
    classes: int
    largest_norm: float = 10.0

    def __post_init__(self) -> None:
        _validate.count("examples", self.examples, at_least=2)
        _validate.count("features", self.features)
        _validate.count("classes", self.classes, at_least=2)
        _validate.positive("largest_norm", self.largest_norm)


def gaussian(
    shape: Shape, *, labels: str = "teacher", separation: float = 4.0, seed: int = 0
) -> Labelled:
    """Synthetic data: standardised Gaussian features, scaled to the largest norm, and labels.

    labels      "teacher": the index of the largest of random linear functions of the features, one
                for each class: a linear model will always be right for these; "network": the
                largest output of a random network with one hidden layer; "clusters": drawn
                uniformly, each class around a centre of its own; "mixtures": the same with three
                centres for each class, which no linear model separates; "random": drawn uniformly,
                so that only memorising the examples lowers the loss
    separation  how many standard deviations the centres of clusters lie from the middle
    """
    _validate.choice("labels", labels, LABELS)
    separation = _validate.real("separation", separation, at_least=0)
    generator = torch.Generator().manual_seed(_validate.count("seed", seed, at_least=0))
    n, d, classes = shape.examples, shape.features, shape.classes
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (n,), generator=generator)
    directions = torch.randn(classes, d, generator=generator, dtype=torch.float64)
    if labels == "teacher":
        y = (x @ directions.T).argmax(dim=1)
    elif labels == "network":
        y = _network_labels(x, classes, generator)
    elif labels == "mixtures":
        centres = torch.randn(classes, _CENTRES, d, generator=generator, dtype=torch.float64)
        which = torch.randint(_CENTRES, (n,), generator=generator)
        x = x + (separation / math.sqrt(d)) * centres[y, which]
    elif labels == "clusters":
        x = x + (separation / math.sqrt(d)) * directions[y]
    x = x - x.mean(dim=0)
    x = x / x.std(dim=0, correction=0).clamp_min(1e-12)
    return (x * (shape.largest_norm / x.norm(dim=1).max())).float(), y


def _network_labels(x: torch.Tensor, classes: int, generator: torch.Generator) -> torch.Tensor:
    """The largest output of a network with 4 tanh units for each class, whose outputs are centred
    so that the classes are of about one size.
    """
    d = x.shape[1]
    inner = torch.randn(4 * classes, d, generator=generator, dtype=x.dtype) * (2 / math.sqrt(d))
    outer = torch.randn(classes, 4 * classes, generator=generator, dtype=x.dtype)
    outputs = torch.tanh(x @ inner.T) @ outer.T
    return ((outputs - outputs.mean(0)) / outputs.std(0).clamp_min(1e-12)).argmax(dim=1)


def synthetic_sets(
    shape: Shape, count: int, *, labels: str = "teacher", seed: int = 0
) -> list[Labelled]:
    """Independent `gaussian` sets, so that tuning does not overfit one of them."""
    _validate.count("count", count)
    return [gaussian(shape, labels=labels, seed=1000 * seed + i) for i in range(count)]


def check_auxiliary(data: Labelled, shape: Shape) -> Labelled:
    """A public data set as it is, or an `InputError` if its shape is not the private set's."""
    remedy = "Auxiliary data have the private set's public shape; only their content may differ."
    if not (
        isinstance(data, tuple)
        and len(data) == 2
        and all(isinstance(t, torch.Tensor) for t in data)
    ):
        raise InputError(
            "a pair of tensors (features, labels)", name="the auxiliary data", value=type(data)
        )
    x, y = data
    if tuple(x.shape) != (shape.examples, shape.features):
        raise InputError(
            f"{shape.examples} rows of {shape.features} features",
            name="the auxiliary data",
            value=tuple(x.shape),
            remedy=remedy,
        )
    if y.shape != x.shape[:1] or y.dtype != torch.int64:
        raise InputError(
            "one label (int64) for each row",
            name="the auxiliary labels",
            value=(tuple(y.shape), str(y.dtype)),
            remedy=remedy,
        )
    if int(y.min()) < 0 or int(y.max()) >= shape.classes:
        raise InputError(
            f"labels from 0 to {shape.classes - 1}",
            name="the auxiliary labels",
            value=(int(y.min()), int(y.max())),
            remedy=remedy,
        )
    largest = float(x.norm(dim=1).max())
    if not largest <= shape.largest_norm * (1 + 1e-5):
        raise InputError(
            f"finite, with norms of at most {shape.largest_norm:g}",
            name="the auxiliary features",
            value=largest,
            remedy=remedy,
        )
    return data

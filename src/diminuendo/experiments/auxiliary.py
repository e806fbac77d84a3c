"""Auxiliary data: what a private set looks like from outside, made without looking inside.

Only public facts enter: how many examples, how many features and classes, the largest norm. Tuning
and measuring on it costs no privacy.
"""

from __future__ import annotations

import math

import torch

from diminuendo import _validate
from diminuendo.errors import InputError

Labelled = tuple[torch.Tensor, torch.Tensor]

LABELS = ("clusters", "teacher", "random")


def gaussian(
    *,
    examples: int,
    features: int,
    classes: int,
    largest_norm: float = 10.0,
    labels: str = "clusters",
    separation: float = 4.0,
    seed: int = 0,
) -> Labelled:
    """Gaussian features scaled to the largest norm, with labels

    random    drawn evenly: nothing can be learned but the examples themselves
    teacher   the largest of `classes` random linear functions of the features
    clusters  drawn evenly, each class around a centre of its own, `separation` deviations from
              the middle: learnable about as far as real classes are
    """
    examples = _validate.count("examples", examples, at_least=2)
    features = _validate.count("features", features)
    classes = _validate.count("classes", classes, at_least=2)
    largest = _validate.positive("largest_norm", largest_norm)
    _validate.choice("labels", labels, LABELS)
    separation = _validate.real("separation", separation, at_least=0)
    generator = torch.Generator().manual_seed(_validate.count("seed", seed, at_least=0))
    x = torch.randn(examples, features, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (examples,), generator=generator)
    if labels != "random":
        directions = torch.randn(classes, features, generator=generator, dtype=torch.float64)
        if labels == "teacher":
            y = (x @ directions.T).argmax(dim=1)
        else:
            centres = separation * directions / math.sqrt(features)
            x = x + centres[y]
    x = x - x.mean(dim=0)
    x = x / x.std(dim=0, correction=0).clamp_min(1e-12)
    return (x * (largest / x.norm(dim=1).max())).float(), y


def check_shape(
    data: Labelled, *, features: int, classes: int, largest_norm: float | None = None
) -> Labelled:
    """A public set of the user's own, if it has the private set's public shape."""
    x, y = data
    remedy = "Auxiliary data has the private set's public shape; only its content may differ."
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        raise InputError(
            "a pair of tensors (features, labels)", name="the auxiliary data", value=type(x)
        )
    if x.ndim != 2 or x.shape[1] != features:
        raise InputError(
            f"rows of {features} features",
            name="the auxiliary data",
            value=tuple(x.shape),
            remedy=remedy,
        )
    if y.shape != x.shape[:1] or y.dtype != torch.int64 or x.shape[0] < 2:
        raise InputError(
            "one whole-numbered label for each of at least two rows",
            name="the auxiliary labels",
            value=(tuple(y.shape), str(y.dtype)),
            remedy=remedy,
        )
    if not bool(torch.isfinite(x).all()):
        raise InputError("finite", name="the auxiliary features", value="inf or NaN")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise InputError(
            f"labels from 0 to {classes - 1}",
            name="the auxiliary labels",
            value=(int(y.min()), int(y.max())),
            remedy=remedy,
        )
    if largest_norm is not None:
        reached = float(x.norm(dim=1).max())
        if reached > largest_norm * (1 + 1e-5):
            raise InputError(
                f"scaled to norms of at most {largest_norm:g}",
                name="the auxiliary features",
                value=reached,
                remedy=remedy,
            )
    return data

"""Models to choose from: linear ones, networks with one hidden layer, and the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.replicas.layers import FeatureScale
from diminuendo.replicas.replica import Model

ORDERED = 0.4
"""With features in order of importance, the j-th is multiplied by j to minus this power. Chosen on
Fashion-MNIST's principal components (docs/experiments.md)."""


def _behind_factors(features: int, model: nn.Module) -> nn.Module:
    """A model whose features are multiplied by falling factors of mean square 1 first."""
    factors = torch.arange(1, features + 1, dtype=torch.float64) ** -ORDERED
    scale = FeatureScale(factors / factors.square().mean().sqrt())
    parts = model if isinstance(model, nn.Sequential) else [model]
    return nn.Sequential(scale, *parts)


@dataclass(frozen=True)
class Linear:
    """Makes a linear model features → classes (softmax regression) when called.

    It starts from zero: its loss is convex, so that random weights would be nothing but noise, of
    which private training has enough (0.65 against 0.635 on MNIST at (1, 1e-5) and N = 1000).

    features  inputs of an example
    classes   outputs
    ordered   features come in order of importance, as principal components do: the later ones are
              made smaller
    """

    features: int
    classes: int
    ordered: bool = False

    def __call__(self) -> nn.Module:
        model = nn.Linear(self.features, self.classes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return _behind_factors(self.features, model) if self.ordered else model

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return (self.features + 1) * self.classes


@dataclass(frozen=True)
class TwoLayers:
    """Makes a network features → hidden → classes when called, as `model` arguments do.

    With 1000 hidden units, rectified, it is the paper's network.

    features  inputs of an example
    hidden    hidden units
    classes   outputs
    ordered   as for `Linear`
    """

    features: int
    hidden: int
    classes: int
    ordered: bool = False

    def __call__(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(self.features, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.classes),
        )
        return _behind_factors(self.features, model) if self.ordered else model

    @property
    def parameters(self) -> int:
        """How many parameters the network has."""
        return (self.features + 1) * self.hidden + (self.hidden + 1) * self.classes


Models = Sequence[str | int | Model] | Mapping[str, str | int | Model]
"""Models to choose from: "linear", a number of hidden units, or a function that makes a module.

"ordered linear" and "ordered 32" are the same for features in order of importance."""


def named_models(models: Models, features: int, classes: int) -> dict[str, Model]:
    """Each model by its name: "linear", "hidden 32", "ordered linear", or for one's own the key or
    the function's."""
    listed = isinstance(models, Iterable) and not isinstance(models, (str, bytes))
    given = models if isinstance(models, Mapping) else dict(enumerate(models if listed else ()))
    if not given:
        raise InputError(
            'a list such as ["linear", 32, 128]', name="models", value=models, remedy=_REMEDY
        )
    named: dict[str, Model] = {}
    for key, one in given.items():
        name, model = _named(one, features, classes)
        name = key if isinstance(key, str) else name
        if name in named:
            raise InputError(
                "models of different names",
                name="models",
                value=name,
                remedy='Name them: models={"mine": make, …}.',
            )
        named[name] = model
    return named


_REMEDY = (
    'Each is "linear", a number of hidden units, "ordered linear" or "ordered 32" where features '
    "come in order of importance, or a function that makes a module."
)


def _named(one: str | int | Model, features: int, classes: int) -> tuple[str, Model]:
    if isinstance(one, str):
        kind = one.removeprefix("ordered ")
        ordered = kind != one
        if ordered and kind.isdecimal():
            hidden = _validate.count("models", int(kind), remedy=_REMEDY)
            return _named(TwoLayers(features, hidden, classes, ordered), features, classes)
        if kind != "linear":
            _validate.choice("models", one, ("linear", "ordered linear"), remedy=_REMEDY)
        return one, Linear(features, classes, ordered)
    if isinstance(one, (Linear, TwoLayers)):
        name = "linear" if isinstance(one, Linear) else f"hidden {one.hidden}"
        return f"ordered {name}" if one.ordered else name, one
    if callable(one):
        return getattr(one, "__name__", type(one).__name__), one
    hidden = _validate.count("models", one, remedy=_REMEDY)
    return f"hidden {hidden}", TwoLayers(features, hidden, classes)

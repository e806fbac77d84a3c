"""Models of which many replicas are computed as one: a linear classifier and a small network.

Parameters are rows of a matrix (replicas, parameters). For each layer an example's gradient is an
outer product input ⊗ delta, so that norms and clipped sums need no per-example gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def shared(x: Tensor) -> bool:
    """Whether all replicas have the same rows, held once (an expanded tensor)."""
    return x.shape[0] > 1 and x.stride(0) == 0


def product(x: Tensor, weights: Tensor) -> Tensor:
    """x · W for each replica, (R, N, out); rows that replicas share are read once for all."""
    if not shared(x):
        return x @ weights
    replicas, features, out = weights.shape
    beside = weights.permute(1, 0, 2).reshape(features, replicas * out)
    return (x[0] @ beside).view(-1, replicas, out).permute(1, 0, 2)


Turn = Callable[[Tensor], Tensor]
"""From columns, (features, how many), to A · columns, for a symmetric matrix A."""


def turned(turns: Sequence[Turn], columns: Tensor) -> Tensor:
    """Each replica's columns, (R, features, how many), by its map; flat."""
    return torch.stack([turn(own) for turn, own in zip(turns, columns, strict=True)]).flatten(1)


class Layer(NamedTuple):
    """What one layer's gradients are made of: inputs (R, N, in) and deltas (R, N, out).

    `lengths` are the inputs' norms, (R, N), where they are known already. With `turns` the layer
    sees A_r x in place of x, a linear map for each replica: `lengths` are then those of A_r x.
    """

    inputs: Tensor
    deltas: Tensor
    lengths: Tensor | None = None
    turns: Sequence[Turn] | None = None

    def norms(self) -> Tensor:
        """Norms of the examples' gradients, (R, N)."""
        lengths = self.inputs.norm(dim=2) if self.lengths is None else self.lengths
        return torch.as_tensor(lengths * self.deltas.norm(dim=2))

    def sums(self, factors: Tensor) -> Tensor:
        """Σ_i factor_i · gradient_i, flat: (R, in × out)."""
        total = self._sums(factors)
        return total.flatten(1) if self.turns is None else turned(self.turns, total)

    def _sums(self, factors: Tensor) -> Tensor:
        weighted = self.deltas * factors.unsqueeze(2)
        if not shared(self.inputs):
            # The same product the other way round is several times slower on a CPU.
            return (weighted.transpose(1, 2) @ self.inputs).transpose(1, 2)
        replicas, rows, out = weighted.shape
        beside = weighted.permute(1, 0, 2).reshape(rows, replicas * out)
        total = (beside.T @ self.inputs[0]).view(replicas, out, -1)
        return total.transpose(1, 2)


class Model(ABC):
    """A classifier whose replicas are computed as one; x is (R, N, features), y is (R, N)."""

    convex = False

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Trainable numbers of one replica."""

    @abstractmethod
    def start(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Initial parameters, (R, parameters), one generator for each replica."""

    @abstractmethod
    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Logits, (R, N, classes)."""

    @abstractmethod
    def layers(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Layer]:
        """The per-example gradients of the cross-entropy, layer by layer."""

    def losses(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of each example, (R, N)."""
        logits = self.outputs(theta, x)
        return -logits.log_softmax(2).gather(2, y.unsqueeze(2)).squeeze(2)

    def accuracy(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The share of correct answers of each replica, (R,)."""
        return (self.outputs(theta, x).argmax(2) == y).float().mean(1)


def _residuals(logits: Tensor, y: Tensor) -> Tensor:
    """softmax − the label's unit vector."""
    residual = logits.softmax(2)
    residual.scatter_add_(2, y.unsqueeze(2), -torch.ones_like(residual[:, :, :1]))
    return residual


@dataclass(frozen=True)
class Linear(Model):
    """Multinomial logistic regression; the features hold a constant for the intercept."""

    features: int
    classes: int
    convex = True

    @property
    def parameters(self) -> int:
        """features × classes."""
        return self.features * self.classes

    def start(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Zeros: a convex loss needs no random start."""
        return torch.zeros(len(generators), self.parameters)

    def _weights(self, theta: Tensor) -> Tensor:
        return theta.view(-1, self.features, self.classes)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """x · W."""
        return product(x, self._weights(theta))

    def layers(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Layer]:
        """One layer: x ⊗ (softmax − label)."""
        return [Layer(x, _residuals(self.outputs(theta, x), y))]


@dataclass(frozen=True)
class Turned(Model):
    """A model of one layer on A_r x, a symmetric map for each replica r.

    As (A x)ᵀW = xᵀ(A W), weights and sums are turned and the features are never copied.
    """

    model: Model
    features: int
    turns: Sequence[Turn]

    @property
    def parameters(self) -> int:
        """The model's."""
        return self.model.parameters

    def start(self, generators: Sequence[torch.Generator]) -> Tensor:
        """The model's."""
        return self.model.start(generators)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """x · A W."""
        return self.model.outputs(self._onto(theta), x)

    def layers(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Layer]:
        """One layer, A x ⊗ delta; its lengths are to be filled in."""
        (layer,) = self.model.layers(self._onto(theta), x, y)
        return [layer._replace(turns=self.turns)]

    def _onto(self, theta: Tensor) -> Tensor:
        """A W: the parameters that do to x what theta does to A x."""
        return turned(self.turns, theta.view(len(theta), self.features, -1))


@dataclass(frozen=True)
class Network(Model):
    """One hidden layer of tanh units."""

    features: int
    classes: int
    hidden: int = 32

    @property
    def parameters(self) -> int:
        """Of both layers; the second has an intercept."""
        return self.features * self.hidden + (self.hidden + 1) * self.classes

    def start(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Uniform in ± 1/√inputs, as is customary; the second layer's intercept is 0."""
        rows = []
        for generator in generators:
            first = torch.rand(self.features * self.hidden, generator=generator) * 2 - 1
            second = torch.rand(self.hidden, self.classes, generator=generator) * 2 - 1
            second = torch.cat([second / math.sqrt(self.hidden), torch.zeros(1, self.classes)])
            rows.append(torch.cat([first, second.flatten()]))
        return torch.stack(rows)

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        cut = self.features * self.hidden
        first = theta[:, :cut].view(-1, self.features, self.hidden)
        return first, theta[:, cut:].view(-1, self.hidden + 1, self.classes)

    def _hidden(self, first: Tensor, x: Tensor) -> Tensor:
        active = torch.tanh(product(x, first))
        return torch.cat([active, torch.ones_like(active[:, :, :1])], dim=2)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """tanh(x · W₁) · W₂ + b₂."""
        first, second = self._split(theta)
        return self._hidden(first, x) @ second

    def layers(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Layer]:
        """Both layers, by one backward pass."""
        first, second = self._split(theta)
        active = self._hidden(first, x)
        delta = _residuals(active @ second, y)
        back = (delta @ second[:, :-1].transpose(1, 2)) * (1 - active[:, :, :-1] ** 2)
        return [Layer(x, back), Layer(active, delta)]

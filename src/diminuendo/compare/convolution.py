"""A small convolutional network, whose clipped sums the training engine takes.

Filters and layers are those of Tramèr and Boneh (2021) for MNIST: 16 and 32 filters, 32 hidden
units, tanh throughout. Gradients of examples are no single outer product here, so replicas go one
after the other, in micro-batches, through `training.clipping.Engine`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from diminuendo.compare.clips import Rule
from diminuendo.compare.models import Layer, Model
from diminuendo.errors import InputError
from diminuendo.training.clipping import Clip, Engine, Flat

_ROWS = 500
"""Examples of a micro-batch."""
_LARGE = 20
"""Images of this height or width and above are taken for pixels and made smaller first."""


def _network(image: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Channel maps, such as scattering features, are halved once; whole images twice."""
    channels, height, width = image
    pixels = min(height, width) >= _LARGE
    first, second = ((8, 2, 2), (4, 2, 0)) if pixels else ((3, 2, 1), (3, 1, 1))
    pool = nn.MaxPool2d(2, stride=1) if pixels else nn.Identity()
    body = nn.Sequential(
        nn.Conv2d(channels, 16, *first),
        nn.Tanh(),
        pool,
        nn.Conv2d(16, 32, *second),
        nn.Tanh(),
        pool,
        nn.Flatten(),
    )
    with torch.no_grad():
        flat = body(torch.zeros(1, *image)).shape[1]
    return nn.Sequential(body, nn.Linear(flat, 32), nn.Tanh(), nn.Linear(32, classes))


@dataclass(frozen=True)
class _OfReplica:
    """A rule of the comparison for one replica, as the engine asks for it: layer by layer.

    The engine's norms are upper bounds in float64, and it rounds the factors down to float32, by
    more than float64 may have rounded them up.
    """

    rule: Rule
    replica: int
    replicas: int
    per_layer = True

    def factors(self, norms: Tensor) -> Tensor:
        """(layers, N), as the norms."""
        rows = [row.expand(self.replicas, -1) for row in norms]
        return torch.stack([own[self.replica] for own in self.rule.factors(rows)])


@dataclass(frozen=True, eq=False)
class Convolutional(Model):
    """Two convolutions and two linear layers on images.

    image  channels, height and width; rows of x hold so many features and the constant, which is
           left out, because every layer has an intercept of its own
    """

    image: tuple[int, int, int]
    classes: int

    @cached_property
    def _engine(self) -> Engine:
        return Engine(_network(self.image, self.classes))

    @property
    def parameters(self) -> int:
        """Of all four layers, intercepts included."""
        return sum(one.numel() for one in self._engine.parameters)

    def start(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Uniform in ± 1/√inputs, as is customary; intercepts are 0."""
        rows = []
        for generator in generators:
            parts = []
            for one in self._engine.parameters:
                drawn = torch.zeros(one.numel())
                if one.dim() > 1:
                    drawn.uniform_(-1, 1, generator=generator).div_(math.sqrt(one[0].numel()))
                parts.append(drawn)
            rows.append(torch.cat(parts))
        return torch.stack(rows)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """The network's logits, without gradients."""
        found = []
        with torch.no_grad():
            for own, rows in zip(theta, x, strict=True):
                self._take(own)
                found.append(torch.cat([self._logits(part) for part in torch.split(rows, _ROWS)]))
        return torch.stack(found)

    def layers(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Layer]:
        """Refused: what needs outer products is for the other models."""
        del theta, x, y
        raise InputError(
            "linear or network for a method that reads examples' gradients layer by layer",
            name="the model",
            value="cnn",
        )

    def clipped(
        self, theta: Tensor, x: Tensor, y: Tensor, rule: Rule, drawn: Tensor | None = None
    ) -> Tensor:
        """Σ_i factor_i · gradient_i, flat: (R, parameters), of the drawn examples (R, N)."""
        sums = torch.zeros_like(theta)
        for r, own in enumerate(theta):
            self._take(own)
            clip = cast("Clip", _OfReplica(rule, r, len(theta)))
            buffers = self._engine.zeros()
            for part, labels in _micro_batches(x[r], y[r], None if drawn is None else drawn[r]):
                self._engine.clipped_sum(self._losses(part, labels), clip, accumulate=buffers)
            sums[r] = torch.cat([one.flatten() for one in buffers])
        return sums

    def norms(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Upper bounds of the examples' gradients' norms, (R, N)."""
        found = []
        for own, rows, labels in zip(theta, x, y, strict=True):
            self._take(own)
            parts = [
                self._engine.clipped_sum(self._losses(*part), Flat(1.0)).norms
                for part in _micro_batches(rows, labels, None)
            ]
            found.append(torch.cat(parts))
        return torch.stack(found)

    def _take(self, own: Tensor) -> None:
        """Make one replica's parameters the network's."""
        self._engine.model.to(own.device)
        parts = torch.split(own, [one.numel() for one in self._engine.parameters])
        with torch.no_grad():
            for one, values in zip(self._engine.parameters, parts, strict=True):
                one.copy_(values.view_as(one))

    def _logits(self, rows: Tensor) -> Tensor:
        """Features of norm about 1 are made such that one of them is about 1."""
        images = rows[:, :-1].reshape(-1, *self.image) * math.sqrt(math.prod(self.image))
        return torch.as_tensor(self._engine.model(images))

    def _losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            return nn.functional.cross_entropy(self._logits(rows), labels, reduction="none")


def _micro_batches(x: Tensor, y: Tensor, drawn: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    if drawn is None:
        yield from zip(torch.split(x, _ROWS), torch.split(y, _ROWS), strict=True)
        return
    for rows in torch.split(drawn.nonzero().squeeze(1), _ROWS):
        yield x[rows], y[rows]

"""Canaries: examples whose gradients are orthogonal, longer than the clip norm, and known.

Example i reads entry i of two tables, and its loss is linear in them, so that its gradient does
not depend on the parameters and touches no entry of another example. After clipping, each example
moves the sum by exactly the clip norm, in a direction of its own. So one run with m canaries is m
attacks at once, and what one of them learns says nothing about another.

Two tables, and not one: rules that clip layer by layer have something to divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

LENGTH = 1000.0
"""A canary's gradient norm before clipping, in clip norms: a clip that is too weak shows."""


class _Tables(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(size, 1), nn.Embedding(size, 1)
        for table in (self.first, self.second):
            nn.init.zeros_(table.weight)

    def forward(self, index: Tensor) -> Tensor:
        """The sum of both entries of each example."""
        both = self.first(index) + self.second(index)
        return torch.as_tensor(both).flatten(1).sum(1)


class Canaries(NamedTuple):
    """One run's canaries.

    present  which of them the data hold; the others are zeroed out (their gradient is zero), or
             reversed for replace-one neighbours
    data     (index, weight) of every example
    clip     the clip norm that the trainer is to use
    """

    present: Tensor
    data: tuple[Tensor, Tensor]
    clip: float

    @classmethod
    def draw(
        cls, size: int, clip: float, *, absent: Literal["zeroed", "reversed"], seed: int
    ) -> Canaries:
        """`size` canaries, each of them present with probability one half."""
        coin = torch.Generator().manual_seed(seed)
        present = torch.randint(2, (size,), generator=coin).bool()
        other = 0.0 if absent == "zeroed" else -1.0
        weight = torch.where(present, 1.0, other) * (LENGTH * clip / math.sqrt(2))
        return cls(present, (torch.arange(size).unsqueeze(1), weight), clip)

    def model(self) -> nn.Module:
        """A new model with two entries for each canary, all of them zero."""
        return _Tables(len(self.present))

    @staticmethod
    def loss(outputs: Tensor, weight: Tensor) -> Tensor:
        """One loss per example, linear in the model's output."""
        return outputs * weight

    def projected(self, gradients: Sequence[Tensor], divisor: float) -> Tensor:
        """What was released, along each canary, on the sum and in clip norms.

        A present canary that was drawn adds 1; noise has the planned σ. `gradients` are one per
        parameter, as `PrivateGradients.released` has them.
        """
        first, second = (part.detach().double().flatten() for part in gradients)
        return (first + second) * (divisor / (self.clip * math.sqrt(2)))

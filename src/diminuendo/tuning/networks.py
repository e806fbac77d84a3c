"""The paper's network: two layers, with rectified linear units in the hidden one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class TwoLayers:
    """Makes a network features → hidden → classes when called, as `model` arguments do.

    features  inputs of an example
    hidden    hidden units
    classes   outputs
    """

    features: int
    hidden: int
    classes: int

    def __call__(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.features, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.classes),
        )

    @property
    def parameters(self) -> int:
        """How many parameters the network has."""
        return (self.features + 1) * self.hidden + (self.hidden + 1) * self.classes

"""The paper's network: two layers, the hidden one with rectified units."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class TwoLayers:
    """Makes features → hidden → classes; a value, so that studies can say what they trained."""

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
        return (self.features + 1) * self.hidden + (self.hidden + 1) * self.classes

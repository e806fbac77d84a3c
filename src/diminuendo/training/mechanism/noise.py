"""The noise of a step, added to the clipped sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diminuendo.training.mechanism.exact import add_rounded_gaussian
from diminuendo.training.mechanism.keys import Keys

NoiseName = Literal["exact", "fast"]
"""How noise is drawn: `ExactNoise` or `release.FastNoise`."""


@dataclass(frozen=True)
class ExactNoise:
    """An ideal Gaussian from a cryptographic generator, rounded to a grid after it was added.

    The sensitivity of what goes in is the sensitivity that is paid for: nothing is added to it.
    """

    keys: Keys
    rank: int = 0

    def add_noise(
        self, total: Tensor, *, noise_std: float, sensitivity: float, step: int
    ) -> Tensor:
        """`total`, written over with the noisy sum.

        total      the clipped sum, flat and in float64, not divided yet
        noise_std  standard deviation of the noise on each coordinate, in the sum's units
        step       0 for the first; each step's noise is drawn once
        """
        del sensitivity
        return add_rounded_gaussian(total, noise_std, self.keys.noise(step, self.rank))

    def add_beside(self, number: float, *, noise_std: float, step: int) -> float:
        """A number that is released beside the step's gradient, with noise of its own."""
        total = torch.tensor([number], dtype=torch.float64)
        return float(add_rounded_gaussian(total, noise_std, self.keys.noise_beside(step)))

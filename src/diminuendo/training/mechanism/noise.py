"""The noise of a step, added to the clipped sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diminuendo.errors import DiminuendoError
from diminuendo.training.mechanism import cpu
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

    def ahead(self, size: int, step: int) -> DrawnNoise:
        """The noise of a step on a CPU before there is a sum to add it to: the same numbers."""
        keys = self.keys.noise(step, self.rank)
        return DrawnNoise(keys, cpu.ahead(size, keys[0]))


class DrawnNoise:
    """Noise that was drawn ahead, for one sum."""

    def __init__(self, keys: tuple[bytes, bytes], drawn: cpu.Deviations) -> None:
        self._drawn: tuple[tuple[bytes, bytes], cpu.Deviations] | None = keys, drawn

    def add_noise(
        self, total: Tensor, *, noise_std: float, sensitivity: float, step: int
    ) -> Tensor:
        """`total`, written over with the noisy sum; once."""
        del sensitivity
        if self._drawn is None:
            raise DiminuendoError(
                f"The noise of step {step + 1} was added before: the same numbers are never given "
                "out twice."
            )
        (keys, drawn), self._drawn = self._drawn, None
        return add_rounded_gaussian(total, noise_std, keys, drawn)

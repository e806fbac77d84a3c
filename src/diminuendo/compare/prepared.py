"""A preparation that reads the private sample as a whole, as the paper's does: no claim covers it.

It is here because the paper's own figures were made with it. What methods do with the prepared rows
is charged as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diminuendo import _validate
from diminuendo.paper import data as paper

CAVEAT = "the claim does not cover the preparation"


@dataclass(frozen=True)
class Components:
    """Onto the sample's own principal components, standardised and scaled by its own numbers."""

    task: paper.Task = paper.MNIST

    @property
    def features(self) -> int:
        """Components and the constant."""
        return self.task.features + 1

    def __call__(self, x: Tensor, test_x: Tensor) -> tuple[Tensor, Tensor]:
        """A sample's rows and test rows by its own map, with a constant; norms of x at most 1."""
        _validate.count("examples", len(x), at_least=self.task.features + 1)
        rows, tests = x.cpu().numpy().astype(np.float64), test_x.cpu().numpy()
        parts = [torch.from_numpy(part) for part in paper.prepared(rows, tests, self.task)]
        own, other = (self._with_constant(part).to(x.device) for part in parts)
        return own, other

    def _with_constant(self, part: Tensor) -> Tensor:
        rows = torch.cat([part / self.task.largest_norm, torch.ones(len(part), 1)], dim=1)
        return rows / (2**0.5 * (1 + 1e-6))

"""Influence for a study: measured once, stored as numbers, given out for any number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.experiments.auxiliary import Labelled
from diminuendo.experiments.repeats import Model, Replica, train
from diminuendo.experiments.statistics import interval


@dataclass(frozen=True, eq=False)
class Measured:
    """q at some steps of a run of `total` steps, with 95% half-widths, and its exponential rate."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    half: tuple[float, ...]
    total: int
    rate: float
    rate_half: float
    fit: float

    def curve(self, steps: int) -> Vector:
        """The exponential fit, for T steps: q_t = e^{rate·(t − T)}."""
        return np.asarray(np.exp(self.rate * (np.arange(1, steps + 1) - steps)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "mean": list(self.mean),
            "half": list(self.half),
            "total": self.total,
            "rate": self.rate,
            "rate_half": self.rate_half,
            "fit": self.fit,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        return cls(
            tuple(values["steps"]),
            tuple(values["mean"]),
            tuple(values["half"]),
            values["total"],
            values["rate"],
            values["rate_half"],
            values["fit"],
        )


def measured_influence(
    model: Model,
    data: Labelled,
    budget: Budget,
    *,
    steps: int,
    points: int,
    repeats: int,
    lr: float = 0.1,
    clip: float = 4.0,
    beta: float = 0.0,
    device: str | None = None,
    progress: bool = True,
) -> Measured:
    grid = np.unique(np.linspace(1, steps, points).round().astype(int))
    level = 4 * np.sqrt(steps / budget.R)
    replicas = []
    for t in (0, *grid):
        sigmas = np.zeros(steps)
        if t:
            sigmas[t - 1] = level
        replicas += [
            Replica(sigmas=sigmas, lr=lr, clip=clip, beta=beta, seed=s) for s in range(repeats)
        ]
    losses = np.array(
        [o.train_loss for o in train(model, data, replicas, device=device, progress=progress)]
    ).reshape(-1, repeats)
    changes = [interval((row - losses[0]) / level**2) for row in losses[1:]]
    mean = np.array([c.mean for c in changes])
    sound = mean > 0
    slope, offset = np.polyfit(grid[sound], np.log(mean[sound]), 1)
    left = np.log(mean[sound]) - slope * grid[sound] - offset
    fit = 1 - float(
        np.sum(left**2) / np.sum((np.log(mean[sound]) - np.log(mean[sound]).mean()) ** 2)
    )
    error = float(
        np.sqrt(
            np.sum(left**2)
            / max(sound.sum() - 2, 1)
            / np.sum((grid[sound] - grid[sound].mean()) ** 2)
        )
    )
    return Measured(
        tuple(int(t) for t in grid),
        tuple(mean.tolist()),
        tuple(c.half for c in changes),
        steps,
        float(slope),
        1.96 * error,
        fit,
    )

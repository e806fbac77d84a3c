"""What a schedule is expected to give over uniform noise, and how sure that is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from diminuendo._validate import Vector

SMALLEST_NOTICED = 0.005
"""Half a percent of the loss: runs that differ in nothing but their random numbers differ by it."""

_MISJUDGED = (2 / 3, 3 / 2)
"""How far the speed of convergence may be from what was stated.

Not half: where noise is forgotten half as fast as it was planned for at a constant learning rate,
it does exactly what uniform noise does, so that no gain would ever be above its error.
"""


class Gain(NamedTuple):
    """Shares of the larger of the initial excess loss and what uniform noise leaves of it."""

    gain: float
    error: float


def influence_at(speed: float, influence: Vector, lr: Vector | None) -> Vector:
    """q_1…q_T of a run that forgets noise `speed` times as fast: q_t/η_t² to that power.

    The last step's influence, and with it the scale, stays as it is.
    """
    entering = np.ones_like(influence) if lr is None else np.maximum(lr, 1e-100) ** 2
    kept = influence / entering
    largest = float(kept.max())
    return np.asarray(entering * (kept / largest) ** speed * largest)


def expected_gain(
    bias: float,
    influence: Vector,
    per_noise: float,
    planned: Vector,
    uniform: Vector,
    *,
    lr: Vector | None = None,
) -> Gain:
    """How much less final excess loss `planned` noise leaves than `uniform` noise.

    bias                what the start leaves, as a share of the initial excess loss
    influence           q_1…q_T
    per_noise           what a unit of Σ q_t σ_t² adds to the loss, in the same unit as bias
    planned, uniform    σ_1…σ_T, as noise on the mean gradient
    lr                  η_1…η_T, where they are not all the same

    The error is the larger of half a percent and what is lost of the gain if the run forgets noise
    at two thirds or at one and a half times the speed that was planned for: if q_t/η_t² is itself
    to that power.
    """

    def gain(speed: float) -> float:
        q = influence_at(speed, influence, lr)
        left = bias + per_noise * float(np.sum(q * uniform**2))
        return per_noise * float(np.sum(q * (uniform**2 - planned**2))) / max(left, 1.0)

    expected = gain(1.0)
    lost = [expected - gain(speed) for speed in _MISJUDGED]
    return Gain(expected, max(*lost, SMALLEST_NOTICED))

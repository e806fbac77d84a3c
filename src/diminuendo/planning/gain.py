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


class Ends(NamedTuple):
    """What a run leaves at its end.

    bias        what is left of the start, as a share of the initial excess loss
    influence   q_1…q_T
    lr          η_1…η_T, or None where they are all the same
    variances   of the noise on each coordinate of the sum of gradients, in units of clip²
    """

    bias: float
    influence: Vector
    lr: Vector | None
    variances: Vector

    def noise(self, speed: float) -> float:
        """What its noise leaves where noise is forgotten `speed` times as fast."""
        return float(np.sum(influence_at(speed, self.influence, self.lr) * self.variances))


def expected_gain(planned: Ends, uniform: Ends, per_noise: float) -> Gain:
    """How much less final excess loss the planned run leaves than the one with uniform noise.

    per_noise   what a unit of Σ q_t σ_t² adds to the loss, in the same unit as the bias

    The error is the larger of half a percent and what is lost of the gain if the run forgets noise
    at two thirds or at one and a half times the speed that was planned for: if q_t/η_t² is itself
    to that power.
    """

    def gain(speed: float) -> float:
        beside = uniform.noise(speed)
        left = uniform.bias + per_noise * beside
        saved = uniform.bias - planned.bias + per_noise * (beside - planned.noise(speed))
        return saved / max(left, 1.0)

    expected = gain(1.0)
    lost = [expected - gain(speed) for speed in _MISJUDGED]
    return Gain(expected, max(*lost, SMALLEST_NOTICED))

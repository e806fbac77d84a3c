"""What it costs to plan for another speed of convergence than the loss has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.bounds import landscape, runs
from diminuendo.planning.gain import influence_at
from diminuendo.planning.value import Plan


class Misjudged(NamedTuple):
    """What noise leaves in the final loss if the run forgets it `speed` times as fast as planned.

    speed    above 0; 1 is as planned. For a convergence rate γ: the true one is γ^speed
    plan     noise left by the plan, over what uniform noise of the same length leaves there
    best     the same for noise planned for this speed; None where batches are sampled, because a
             schedule for each speed would have to be searched for
    """

    speed: float
    plan: float
    best: float | None


def influence_of(
    plan: Plan,
    *,
    kappa: float | None = None,
    gamma: float | None = None,
    spectrum: ArrayLike | None = None,
    steps_stated: bool = True,
) -> Vector:
    """q_1…q_T that the plan was made from, given again what `dim.plan` was told about the loss.

    steps_stated   whether the number of steps was given: it decides which γ is assumed where
                   nothing is known
    """
    loss = landscape.describe(
        kappa=kappa,
        gamma=gamma,
        spectrum=spectrum,
        curve=None,
        beta=plan.momentum,
        step_size=1.0,
        steps=plan.steps if steps_stated else None,
    )
    if plan.lr is not None:
        loss = runs.under_learning_rates(loss, plan.lr, plan.steps)
    return loss.influence(plan.steps)


def misjudged(plan: Plan, influence: Vector, speeds: Sequence[float]) -> list[Misjudged]:
    """What the plan's noise leaves at each of these speeds, beside uniform noise and the best.

    `influence` is q_1…q_T as planned. These are expectations under the plan's assumptions, and no
    privacy claims: ε is the same whatever the loss does.
    """
    _validate.same_length("influence", influence, "the plan", plan.sigmas)
    full_batch = bool((plan.rates == 1).all())
    results = []
    for speed in speeds:
        q = influence_at(_validate.positive("speed", speed), influence, plan.lr)
        uniform = _uniform_noise(plan, influence) * float(np.sum(q / plan.rates**2))
        left = float(np.sum(q * (plan.sigmas / plan.rates) ** 2))
        best = float(np.sum(np.sqrt(q))) ** 2 / (plan.steps * float(np.sum(q)))
        results.append(Misjudged(speed, left / uniform, best if full_batch else None))
    return results


def _uniform_noise(plan: Plan, influence: Vector) -> float:
    """σ² of uniform noise on the plan's budget, from what the plan knows of it."""
    left = float(np.sum(influence * (plan.sigmas / plan.rates) ** 2))
    return left / plan.noise_ratio / float(np.sum(influence / plan.rates**2))

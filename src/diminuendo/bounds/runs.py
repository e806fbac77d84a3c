"""A run with stated learning rates: what noise and the start leave, and the best learning rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from diminuendo._validate import Vector
from diminuendo.bounds.landscape import Curve, GradientDescent, Landscape, Momentum, Quadratic
from diminuendo.errors import InputError
from diminuendo.influence import gradient_descent, learning_rates, response
from diminuendo.influence.closed_forms import contraction
from diminuendo.influence.learning_rates import LearningRates
from diminuendo.schedules import JointProblem


@dataclass(frozen=True, eq=False)
class Run:
    """T steps with learning rates η_1…η_T: a landscape for this one number of steps.

    learning_rates   η_1…η_T, in units of 1/M, or of 1/λ where a spectrum is known
    description      what is known about the loss, and the unit of the learning rates
    """

    learning_rates: Vector
    values: Vector
    final_bias: float
    description: str

    factor = 1.0

    def influence(self, steps: int) -> Vector:
        """q_1…q_T for these learning rates."""
        del steps  # the learning rates decide it
        return self.values

    bound_influence = influence

    def bias(self, steps: int) -> float:
        """What is left of the initial excess loss without noise, in [0, 1]."""
        del steps
        return self.final_bias

    def best_steps(self, alpha: float) -> tuple[int, int]:
        """The number of steps of the run, twice."""
        del alpha
        return self.values.size, self.values.size


def under_learning_rates(
    loss: Landscape, lr: LearningRates, steps: int, *, max_lr: float | None = None
) -> Run:
    """The landscape of T steps with these learning rates, at most `max_lr` (or what is stable)."""
    if isinstance(loss, Curve):
        values = loss.influence(steps)
        return Run(
            learning_rates(lr, steps, limit=_limit(math.inf, max_lr)),
            values,
            loss.bias(steps),
            f"{loss.description} It is taken to be that of runs with these learning rates.",
        )
    if isinstance(loss, GradientDescent):
        rates = learning_rates(lr, steps, limit=_rate_limit(2.0, max_lr))
        return Run(
            rates,
            gradient_descent(gamma=loss.gamma, steps=steps, lr=rates),
            math.exp(float(np.sum(np.log(np.maximum(contraction(loss.gamma, rates), 1e-300))))),
            f"{loss.description} Learning rates are in units of 1/M.",
        )
    if isinstance(loss, Momentum):
        curvature = np.array([1 - math.sqrt(loss.plain_rate)])
        rates = learning_rates(lr, steps, limit=_limit(2.0, max_lr))
        found = response(curvature, rates, momentum=loss.beta)
        return Run(
            rates,
            found.influence,
            min(float(found.residual[0] ** 2), 1.0),
            f"{loss.description} With learning rates, in units of 1/M, the influence and the bound "
            f"are those of a quadratic on which plain steps of length 1/M converge at the rate "
            f"{loss.plain_rate:.6g}.",
        )
    assert isinstance(loss, Quadratic)
    largest = float(loss.eigenvalues.max())
    rates = learning_rates(lr, steps, limit=_limit(2 / largest, max_lr))
    found = response(loss.eigenvalues, rates, weights=loss.weights)
    moving = loss.eigenvalues > 0
    return Run(
        rates,
        found.influence,
        float(np.max(found.residual[moving] ** 2)),
        f"{loss.description} Learning rates are in units of one over an eigenvalue.",
    )


def joint_problem(loss: Landscape, alpha: float, *, max_lr: float | None = None) -> JointProblem:
    """The problem whose solution is the best learning rates, in units of 1/M, with planned noise.

    On a quadratic the initial distance is taken to be spread evenly over the directions.
    """
    one = np.ones(1)
    if isinstance(loss, GradientDescent):
        limit = _rate_limit(1.0, max_lr)
        return JointProblem(None, one, one, alpha, gamma=loss.gamma, limit=limit)
    if isinstance(loss, Quadratic):
        largest = float(loss.eigenvalues.max())
        scaled = loss.eigenvalues / largest
        weights = np.ones_like(scaled) if loss.weights is None else loss.weights
        costs = scaled * weights / weights.sum()
        return JointProblem(
            scaled,
            costs,
            costs / costs.sum(),
            alpha,
            limit=2.0 if max_lr is None else _limit(2.0, max_lr) * largest,
        )
    if isinstance(loss, Curve):
        raise InputError(
            "η_1…η_T where an influence curve is given",
            name="lr",
            value="joint",
            remedy="A measured curve holds the learning rates of its runs: say which. Give a "
            "spectrum, kappa or gamma instead, and both are planned.",
        )
    raise InputError(
        "η_1…η_T where momentum is given",
        name="lr",
        value="joint",
        remedy="Both are planned for plain gradient descent: on a loss of one curvature no average "
        "of gradients leaves less noise at the same bias than plain steps with planned noise. "
        'Leave momentum out; or plan without it and give what you get, lr=plan(…, lr="joint").lr, '
        "with momentum.",
    )


def _limit(stable: float, asked: float | None) -> float:
    return stable if asked is None else asked


def _rate_limit(stable: float, asked: float | None) -> float:
    """The longest step, in units of 1/M, where a convergence rate describes the loss."""
    if asked is not None and asked > 2:
        raise InputError(
            "at most 2 (units of 1/M) where a convergence rate describes the loss",
            name="max_lr",
            value=asked,
            remedy="Longer steps can be planned for a spectrum.",
        )
    return _limit(stable, asked)

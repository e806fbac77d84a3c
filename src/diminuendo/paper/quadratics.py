"""Bounds compared with measured excess risk, on problems whose constants are known: quadratics.

f(θ) = ½ Σ λ_i θ_i², with noise of standard deviation C·σ_t/N on each coordinate of the gradient and
steps of size 1/M. All constants of the theorems (M, κ, the initial gap) are exact here, so that a
bound can be compared with the mean over many runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from diminuendo import _validate, bounds, influence, schedules
from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.paper.results import ExcessRisk
from diminuendo.replicas.statistics import Interval, interval


@dataclass(frozen=True)
class Quadratic:
    """A quadratic loss: the eigenvalues of its Hessian, and where descent starts."""

    name: str
    eigenvalues: Vector
    start: Vector

    @property
    def M(self) -> float:
        """The smoothness: the largest eigenvalue."""
        return float(self.eigenvalues.max())

    @property
    def gamma(self) -> float:
        """γ = 1 − 1/κ, in [0, 1)."""
        return 1 - float(self.eigenvalues.min()) / self.M

    @property
    def gap(self) -> float:
        """The initial gap f(θ_1) − min f."""
        return 0.5 * float(np.sum(self.eigenvalues * self.start**2))


PROBLEMS = (
    Quadratic("κ = 5, spread evenly", np.linspace(0.2, 1.0, 20), np.full(20, 0.7)),
    Quadratic("κ = 20, spread evenly", np.linspace(0.05, 1.0, 20), np.full(20, 0.7)),
    Quadratic("κ = 20, all but one flat", np.r_[np.full(19, 0.05), 1.0], np.full(20, 0.7)),
)


def measured(
    problem: Quadratic, sigmas: Vector, *, clip: float, examples: int, repeats: int, seed: int = 0
) -> Interval:
    """The mean of f(θ_{T+1}) over the initial gap, by simulating `repeats` runs."""
    rng = np.random.default_rng(seed)
    values = problem.eigenvalues
    theta = np.tile(problem.start, (_validate.count("repeats", repeats), 1))
    for sigma in sigmas:
        noise = clip * sigma / examples * rng.standard_normal(theta.shape)
        theta -= (values * theta + noise) / problem.M
    return interval(0.5 * np.sum(values * theta**2, axis=1) / problem.gap)


def compare(
    budget: Budget, *, counts: tuple[int, ...], clip: float = 1.0, repeats: int = 2000
) -> list[ExcessRisk]:
    """Bound and measured excess risk for each problem, N and schedule, each at its own best T."""
    rows = []
    for problem in PROBLEMS:
        for examples in counts:
            alpha = bounds.noise_level(
                parameters=problem.eigenvalues.size,
                clip=clip,
                smoothness=problem.M,
                examples=examples,
                R=budget.R,
                gap=problem.gap,
            )
            for name in ("uniform", "dynamic"):
                best = (
                    bounds.best_steps_uniform(gamma=problem.gamma, alpha=alpha)
                    if name == "uniform"
                    else bounds.best_steps_dynamic(gamma=problem.gamma, alpha=alpha)
                )
                steps = best.steps
                sigmas = (
                    np.full(steps, math.sqrt(steps / budget.R))
                    if name == "uniform"
                    else schedules.optimal(
                        influence.gradient_descent(gamma=problem.gamma, steps=steps), budget.R
                    )
                )
                risk = measured(problem, sigmas, clip=clip, examples=examples, repeats=repeats)
                rows.append(
                    ExcessRisk(
                        problem=problem.name,
                        examples=examples,
                        schedule=name,
                        steps=steps,
                        bound=best.erub,
                        measured=risk.mean,
                        half=risk.half,
                    )
                )
    return rows

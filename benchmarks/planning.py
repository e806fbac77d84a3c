"""Speed of planning, and what the true price of a subsampled step is worth."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from rich.progress import track
from timing import show, timed

import diminuendo as dim
from diminuendo import bounds, influence, schedules
from diminuendo.accounting import renyi
from diminuendo.bounds.landscape import Quadratic
from diminuendo.bounds.runs import joint_problem
from diminuendo.budget import Relation
from diminuendo.cli.options import print_table


def speed() -> None:
    budget = dim.Budget(epsilon=2, delta=1e-7)
    million = 1_000_000
    floor, _ = timed(lambda: np.exp(np.linspace(0, 1, million)))
    q = influence.gradient_descent(gamma=0.9995, steps=10_000)
    eta0 = bounds.admissible_step(beta=0.9, kappa=10_000)
    rows = []
    for name, must, call in (
        (
            "full-batch plan, T = 1,000,000",
            1.0,
            lambda: dim.plan(budget, examples=10**6, parameters=100, kappa=10**5, steps=million),
        ),
        (
            "momentum plan, T = 1,000,000",
            1.0,
            lambda: dim.plan(
                budget, examples=10**6, parameters=100, gamma=1 - 1e-5, momentum=0.9, steps=million
            ),
        ),
        (
            "T* uniform, κ = 10,000",
            0.05,
            lambda: bounds.best_steps_uniform(gamma=1 - 1e-4, alpha=1e-9),
        ),
        (
            "T* dynamic, κ = 10,000",
            0.05,
            lambda: bounds.best_steps_dynamic(gamma=1 - 1e-4, alpha=1e-9),
        ),
        (
            "T* momentum uniform, κ = 10,000",
            0.05,
            lambda: bounds.best_steps_momentum_uniform(
                gamma=1 - eta0 / 20_000, beta=0.9, alpha=1e-9, eta0=eta0
            ),
        ),
        (
            "T* momentum dynamic, κ = 10,000",
            0.05,
            lambda: bounds.best_steps_momentum_dynamic(
                gamma=1 - eta0 / 20_000, beta=0.9, alpha=1e-9, eta0=eta0
            ),
        ),
        (
            "priced schedule, T = 10,000",
            1.0,
            lambda: schedules.priced(q, lambda s: renyi.divergence(8, s, 0.01), 1.5),
        ),
        (
            "learning rates jointly, T = 10,000, 100 eigenvalues",
            1.0,
            lambda: joint_problem(Quadratic(np.arange(1, 101.0) ** -1, 1.0, ""), 1e-4).solve(
                10_000
            ),
        ),
        ("plan, 100 steps at rate 0.1", 1.0, lambda: small_plan(steps=100, sampling_rate=0.1)),
        (
            "plan, 40 steps at rate 0.1, replace-one",
            1.0,
            lambda: small_plan(relation="replace-one", steps=40, sampling_rate=0.1),
        ),
        (
            "plan, 60 steps at two rates",
            1.0,
            lambda: small_plan(sampling_rate=[0.1] * 30 + [0.05] * 30),
        ),
    ):
        seconds, _ = timed(call)
        rows.append([name, show(seconds), show(must), f"{seconds / floor:.1f}"])
    print_table("Planning", ["what", "median of 5", "must be under", "× exp of a million"], rows)


def small_plan(relation: Relation = "add-remove", **options: Any) -> dim.Plan:
    """A subsampled plan for 10,000 examples at (2, 1e-5)."""
    budget = dim.Budget(epsilon=2, delta=1e-5, relation=relation)
    return dim.plan(budget, examples=10_000, parameters=10, gamma=0.98, **options)


def price() -> None:
    """Σ q_t σ_t² of the 1/σ² rule over that of the priced schedule, both at the certified ε."""
    rows = []
    settings = ((0.5, 0.05), (1.0, 0.05), (2.0, 0.05), (8.0, 0.05), (2.0, 0.01), (8.0, 0.01))
    for epsilon, rate in track(settings, description="prices", transient=True):
        q = influence.gradient_descent(gamma=0.98, steps=200)
        budget = dim.Budget(epsilon=epsilon, delta=1e-6)
        priced = dim.plan(
            budget, examples=10**6, parameters=1, gamma=0.98, steps=200, sampling_rate=rate
        ).sigmas
        rule = dim.calibrate(schedules.optimal_shape(q), budget, rate)
        uniform = dim.calibrate(np.ones(200), budget, rate)
        best = np.sum(q * priced**2)
        rows.append(
            [
                f"{epsilon:g}",
                f"{rate:g}",
                f"{priced[0]:.3f}",
                f"{priced[-1]:.3f}",
                f"{rule[0]:.3f}",
                f"{rule[-1]:.3f}",
                f"{np.sum(q * rule**2) / best:.4f}",
                f"{np.sum(q * uniform**2) / best:.4f}",
            ]
        )
    print_table(
        "The price of a subsampled step: 200 steps, γ = 0.98, δ = 1e-6 (noise left, priced = 1)",
        ["ε", "rate", "σ first", "σ last", "1/σ² rule first", "last", "1/σ² rule", "uniform"],
        rows,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore", dim.PlanWarning)
    speed()
    price()

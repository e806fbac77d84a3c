"""Influence and budget to σ_1…σ_T. Every schedule is a pure function of t and lands on the budget.

Formal guarantee of `optimal`, `uniform` and `onto_budget`: Σ_t 1/σ_t² ≤ R in exact arithmetic, and
≥ R·(1 − 1e-9).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.accounting import gaussian
from diminuendo.schedules import shapes
from diminuendo.schedules.joint import JointProblem
from diminuendo.schedules.pricing import Price, priced
from diminuendo.schedules.subsampled import Kinds, least_noise

__all__ = [
    "JointProblem",
    "Kinds",
    "Price",
    "gain_over_uniform",
    "least_noise",
    "onto_budget",
    "optimal",
    "optimal_shape",
    "priced",
    "shapes",
    "uniform",
]


def optimal_shape(influence: ArrayLike) -> Vector:
    """q_t^{−1/4}: what the lemma's σ_t is proportional to."""
    return np.asarray(_validate.vector("influence", influence) ** -0.25)


def optimal(influence: ArrayLike, R: float) -> Vector:
    """σ_t² = (1/R) Σ_i √(q_i/q_t): the unique minimiser of Σ q_t σ_t² with Σ 1/σ_t² = R.

    Lemma "dynamic schedule", for any positive influence.
    """
    return onto_budget(optimal_shape(influence), R)


def uniform(steps: int, R: float) -> Vector:
    """σ_t² = T/R."""
    return onto_budget(shapes.uniform(steps), R)


def onto_budget(shape: ArrayLike, R: float) -> Vector:
    """c·shape with Σ 1/σ_t² = R, never above."""
    return gaussian.scale_onto(_validate.vector("shape", shape), _validate.positive("R", R))


def gain_over_uniform(influence: ArrayLike) -> float:
    """T² Var[√q_t]: by how much `optimal` lowers R·Σ q_t σ_t² against uniform noise.

    From the proof of the lemma (which prints Var[q_t]): T·Σ q_t − (Σ √q_t)².
    """
    roots = np.sqrt(_validate.vector("influence", influence))
    return float(roots.size**2 * np.var(roots))

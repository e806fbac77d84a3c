"""Learning rate, clip norm and steps for private least squares, on synthetic tables.

`tune` knows classes. For a linear model with squared loss a grid is enough, and all of its
candidates are trained at once: a step is two products of matrices.
"""

from __future__ import annotations

import itertools

import numpy as np

from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import calibrate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.tuning import tabular
from diminuendo.tuning.auxiliary import Shape
from diminuendo.tuning.space import Candidate, Space

_STEPS = (8, 20, 50)
_CLIPS = (0.03, 0.1, 0.3)
"""As shares of the features' largest norm; targets lie in [−1, 1]."""
_LRS = tuple(float(f"{10 ** (k / 4):.2g}") for k in range(-8, 7))
"""In units of one over the mean square of the features' norms."""
_SETS = 6
_ENTRIES, _TESTS = 400_000, 500


def choose(budget: Budget, examples: int, features: int, fixed: Space) -> Candidate:
    """The point of a grid with the least mean squared error on held-out synthetic rows."""
    norm = features**0.5
    rate = float(fixed.sampling_rate or 1.0)  # type: ignore[arg-type]
    options = {
        "steps": _STEPS if fixed.steps is None else (fixed.steps,),
        "clip": tuple(norm * c for c in _CLIPS) if fixed.clip is None else (fixed.clip,),
        "lr": tuple(r / (0.5 * norm**2) for r in _LRS) if fixed.lr is None else (fixed.lr,),
    }
    grid = [dict(zip(options, one, strict=True)) for one in itertools.product(*options.values())]
    sigmas = {steps: calibrate(np.ones(steps), budget, rate) for steps in options["steps"]}
    small = max(min(examples, _ENTRIES // features, 2000), 20)
    shape = Shape(examples=small + _TESTS, features=features, classes=2, largest_norm=norm)
    errors = np.zeros(len(grid))
    for number in range(_SETS):
        x, y = _table(shape, number)
        for steps, noise in sigmas.items():
            own = [k for k, one in enumerate(grid) if one["steps"] == steps]
            lr, clip = (np.array([grid[k][name] for k in own]) for name in ("lr", "clip"))
            std = noise / (rate * examples)
            errors[own] += _trained(x, y, small, lr, clip, std, number)
    if not np.isfinite(errors).any():
        raise InputError(
            "small enough for the loss to stay finite", name="lr", value=fixed.lr, remedy=""
        )
    best = grid[int(np.nanargmin(np.where(np.isfinite(errors), errors, np.inf)))]
    return Candidate(
        family="uniform",
        steps=int(best["steps"]),
        lr=float(f"{best['lr']:.3g}"),
        clip=float(f"{best['clip']:.3g}"),
        momentum=float(fixed.momentum or 0.0),  # type: ignore[arg-type]
        fall=None,
        sampling_rate=rate,
    )


def _table(shape: Shape, number: int) -> tuple[Vector, Vector]:
    """Features with a column of ones, and targets in [−1, 1]: linear, some noise, off zero."""
    features, _ = tabular.tabular(shape, number)
    x = features.double().numpy()
    chance = np.random.default_rng([17, number])
    signal = x @ chance.standard_normal(x.shape[1])
    signal = (signal - signal.mean()) / signal.std() + 0.5 * chance.standard_normal(len(x))
    level = 0.3 * chance.standard_normal()
    return np.hstack([x, np.ones((len(x), 1))]), np.clip(0.3 * signal + level, -1, 1)


def _trained(
    x: Vector, y: Vector, n: int, lr: Vector, clip: Vector, noise: Vector, seed: int
) -> Vector:
    """Test errors of all candidates, each relative to the targets' variance; infinite at worst."""
    chance = np.random.default_rng([18, seed])
    theta = np.zeros((x.shape[1], lr.size))
    norms = np.linalg.norm(x[:n], axis=1)[:, None]
    with np.errstate(all="ignore"):
        for std in noise:
            residual = x[:n] @ theta - y[:n, None]
            factor = np.minimum(1.0, clip / np.maximum(np.abs(residual) * norms, 1e-300))
            gradient = x[:n].T @ (residual * factor) / n
            theta -= lr * (gradient + std * clip * chance.standard_normal(theta.shape))
        rest = np.square(np.clip(x[n:] @ theta, -1, 1) - y[n:, None]).mean(axis=0)
    return np.asarray(rest / y[n:].var())

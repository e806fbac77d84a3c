"""Influence by retraining: how much the final loss changes with the noise of one step.

Two branches leave a run before step t. Up to there the three are the same. In step t the branches
get additional noise z and −z, z of standard deviation C·h; after it all three get the same noise
again. The mean of the branches' final losses minus the run's own, over h², estimates the change of
the expected final loss per unit of σ_t²: z and −z cancel everything that is linear in the noise. On
a quadratic this holds for every h; elsewhere it is the mean slope between σ_t² and σ_t² + h².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from diminuendo import _progress, _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.influence.learning_rates import LearningRates, learning_rates
from diminuendo.measuring.result import MeasuredInfluence
from diminuendo.measuring.source import Source, check_source
from diminuendo.replicas.batch import Batch, Loss
from diminuendo.replicas.checks import Pair
from diminuendo.replicas.initial import initial_rows
from diminuendo.replicas.noise import Noise
from diminuendo.replicas.replica import Model, Replica
from diminuendo.replicas.step_settings import StepSettings
from diminuendo.replicas.study import STATE_BYTES, Study
from diminuendo.training.seeds import Seeds

DEFAULT_POINTS = 25
"""How many steps are measured unless the caller says."""


def measure(
    model: Model,
    data: Pair,
    *,
    source: Source,
    sigmas: ArrayLike,
    lr: LearningRates,
    clip: float,
    beta: float = 0.0,
    steps: int | Sequence[int] | None = None,
    repeats: int = 16,
    perturbation: float = 1.0,
    loss: Literal["cross-entropy"] | Loss = "cross-entropy",
    evaluate: Pair | None = None,
    level: float = 0.95,
    seed: int = 0,
    not_private: bool = False,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> MeasuredInfluence:
    """Measure how much each step's noise changes the final loss, by retraining.

    model         makes the module; each run has its own initialisation
    data          (x, y), tensors or arrays
    source        "auxiliary", or "private": then only with not_private=True, and marked as such
    sigmas, lr, clip, beta
                  the run that is perturbed, as in `replicas.Replica`; lr is one learning rate, one
                  for each step, "linear" or "cosine" (from 1), a function of t = 1…T, or a
                  function from an optimizer (of learning rate 1) to its scheduler
    steps         the steps 1…T to measure, or how many of them; 25 by default
    repeats       how many independent runs, at least 2; the intervals are over them
    perturbation  h in units of σ_t, above 0 (in absolute terms where σ_t is zero)
    loss          a function of (outputs, targets) that returns one loss per example
    evaluate      (x, y) on which the final loss is taken; the training data by default
    level         confidence level of the intervals, in (0, 1)
    """
    check_source(source, not_private)
    rates: Any = (
        learning_rates(lr, int(np.size(sigmas))) if callable(lr) or isinstance(lr, str) else lr
    )
    runs = [
        Replica(sigmas=sigmas, lr=rates, clip=clip, beta=beta, seed=seed + i)
        for i in range(_validate.count("repeats", repeats, at_least=2))
    ]
    T = runs[0].steps
    grid = _grid(steps, T)
    h = _validate.positive("perturbation", perturbation) * np.where(
        np.asarray(runs[0].sigmas) > 0, np.asarray(runs[0].sigmas), 1.0
    )
    _validate.real("level", level, above=0, below=1)
    tests = {} if evaluate is None else {"end": evaluate}
    study = Study.of(model, data, runs, loss, tests, None, device)
    row_bytes = 5 * study.parameters * study.like.element_size()
    together = max(1, STATE_BYTES // (row_bytes * (1 + 2 * len(grid))))
    paths = np.bincount(grid, minlength=T + 1)[1:].cumsum()
    total = int(repeats * (T + 2 * paths.sum()))
    with _progress.bar("influence", total=total, shown=progress) as bar:
        parts = [
            _estimates(study, runs[start : start + together], grid, h, bar.advance)
            for start in range(0, repeats, together)
        ]
    estimates = np.concatenate(parts)
    finite = np.isfinite(estimates).all(1)
    if finite.sum() < 2:
        raise InputError(
            "finite in two runs or more",
            name="the final loss",
            value=int(finite.sum()),
            remedy="Use a smaller learning rate, or a smaller perturbation.",
        )
    dropped = int((~finite).sum())
    return MeasuredInfluence(grid, estimates[finite], T, level, source, dropped=dropped)


def _grid(steps: int | Sequence[int] | None, T: int) -> NDArray[np.int64]:
    if steps is None:
        steps = min(T, DEFAULT_POINTS)
    if isinstance(steps, int):
        number = _step(steps, T)
        return np.unique(np.linspace(1, T, number).round().astype(np.int64))
    numbers = [_step(t, T) for t in steps]
    if not numbers:
        raise InputError("at least one step", name="steps", value=steps)
    return np.unique(np.array(numbers, dtype=np.int64))


def _step(step: int, T: int) -> int:
    number = _validate.count("steps", step)
    if number > T:
        raise InputError(f"at most {T}, as the run has {T} steps", name="steps", value=step)
    return number


def _estimates(
    study: Study,
    runs: Sequence[Replica],
    grid: NDArray[np.int64],
    h: Vector,
    advance: Callable[[int], None],
) -> NDArray[np.float64]:
    """Estimates (runs, grid). Rows of the batch: the runs, then for each step their branches."""
    R, T, like = len(runs), runs[0].steps, study.like
    count = R * (1 + 2 * len(grid))
    size = study.group_size(count)
    batch = study.batch(count, size)
    data = batch.data(study.x, study.y, [0] * count)
    seeds = [Seeds.make(run.seed) for run in runs]
    starts = initial_rows(study.model, [run.seed for run in runs], study.device)
    batch.write(starts.repeat(count // R, 1))
    settings = StepSettings(runs, data.examples, like)
    base, extra = (Noise(seeds, study.parameters, like) for _ in range(2))
    active = R
    for step in range(T):
        noise = base.fill(settings.stds[step].tolist(), step)
        added = None
        if step + 1 in grid:
            batch.branch(slice(0, R), slice(active, active + 2 * R))
            added = extra.fill([runs[0].clip * h[step]] * R, step, "perturbation")
            active += 2 * R
        for start in range(0, active, size):
            rows = slice(start, min(start + size, active))
            own = torch.arange(rows.start, rows.stop, device=study.device)
            rows_noise = noise[own % R]
            if added is not None:
                _perturb(rows_noise, added, own - (active - 2 * R), R)
            add_noise = partial(_set_noise, batch, rows_noise)
            batch.step(data, rows, add_noise, settings.update(own % R, step))
        advance(active)
    ends = batch.data(*study.evaluate["end"], [0] * count) if study.evaluate else data
    losses = torch.cat(
        [
            batch.assess(ends, slice(i, min(i + size, count)), study.loss)[0]
            for i in range(0, count, size)
        ]
    )
    losses[(batch.broken >= 0) | ~losses.isfinite()] = math.nan
    table = losses.cpu().numpy().reshape(1 + 2 * len(grid), R)
    both = (table[1::2] + table[2::2]) / 2 - table[0]
    return np.asarray((both / h[grid - 1, None] ** 2).T)


def _set_noise(batch: Batch, noise: Tensor, rows: slice, place: slice) -> None:
    batch.set_noise(rows, noise[place])


def _perturb(noise: Tensor, added: Tensor, place: Tensor, runs: int) -> None:
    """Add z for the first half of the new branches, −z for the second."""
    new = place >= 0
    signs = 1.0 - 2.0 * (place[new] >= runs).to(noise.dtype)
    noise[new] += signs.unsqueeze(1) * added[place[new] % runs]

"""Influence by retraining: how much the final loss changes with the noise of one step.

A run and two branches of it, before step t, share everything: prefix, noise, initialisation. In
step t the branches get z and −z on top, z of deviation C·h; from there on they share the noise
again. Half the sum of the branches' final losses minus the run's own, over h², estimates the change
of the expected final loss per unit of σ_t²: z and −z cancel whatever is linear in the noise. On a
quadratic this holds for every h; elsewhere it is the mean slope between σ_t² and σ_t² + h².
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression
from scipy.stats import t as student
from torch import Tensor

from diminuendo import _files, _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.influence.closed_forms import exponential
from diminuendo.influence.measured import from_values, mark
from diminuendo.replicas.batch import Batch, Loss, Update
from diminuendo.replicas.checks import Pair
from diminuendo.replicas.engine import (
    STATE_BYTES,
    Model,
    Noise,
    Replica,
    Settings,
    Study,
    bar,
    initial_rows,
)
from diminuendo.training.seeds import Seeds

Source = Literal["auxiliary", "private"]
Fit = Literal["exponential", "monotone", "measured"]
LEAST_ERROR = 0.01
"""Relative error below which a point counts no more in a fit: the model errs by more."""
DEFAULT_POINTS = 25


@dataclass(frozen=True)
class ExponentialFit:
    """q_t ∝ γ^{T−t}: γ with its interval, and R² of the line through the log-influence."""

    gamma: float
    low: float
    high: float
    r_squared: float

    @property
    def rate(self) -> float:
        """ln(1/γ), what `influence.exponential` takes."""
        return -math.log(self.gamma)


@dataclass(frozen=True, eq=False)
class MeasuredInfluence:
    """The change of the final loss per unit of σ_t², at some steps t = `steps` of a run of T.

    `estimates` holds a row for each independent run and a column for each step. `source` says what
    it was measured on; from private data, nothing here is private, and what is made of it says so.
    """

    steps: NDArray[np.int64]
    estimates: NDArray[np.float64]
    total_steps: int
    level: float
    source: Source
    dropped: int = 0

    @property
    def private(self) -> bool:
        """False where private data went in that no budget was charged for."""
        return self.source == "auxiliary"

    @property
    def said(self) -> str:
        """In words, for plans and reports."""
        if self.private:
            return "an influence measured on auxiliary data"
        return NOT_PRIVATE

    @property
    def mean(self) -> Vector:
        return np.asarray(self.estimates.mean(0))

    @property
    def error(self) -> Vector:
        """The standard error of the mean."""
        runs = len(self.estimates)
        return np.asarray(self.estimates.std(0, ddof=1) / math.sqrt(runs))

    @property
    def interval(self) -> tuple[Vector, Vector]:
        """Student's interval for the mean, step by step, at `level`."""
        half = self._quantile * self.error
        return self.mean - half, self.mean + half

    @property
    def _quantile(self) -> float:
        return float(student.ppf(0.5 + self.level / 2, len(self.estimates) - 1))

    def exponential(self) -> ExponentialFit:
        """The line through log q_t, points weighted by their relative errors.

        The interval of γ is a jackknife's over the independent runs.
        """
        slope, r_squared = _line(self.steps, self.estimates)
        runs = len(self.estimates)
        each = np.array(
            [_line(self.steps, np.delete(self.estimates, i, 0))[0] for i in range(runs)]
        )
        error = math.sqrt((runs - 1) / runs * float(((each - each.mean()) ** 2).sum()))
        half = self._quantile * error
        gamma, low, high = (math.exp(-(slope + shift)) for shift in (0.0, half, -half))
        return ExponentialFit(gamma, low, high, r_squared)

    def monotone(self) -> Vector:
        """q_1…q_T: the nearest rising curve through the log-influence, smooth between its points.

        For gradient descent, where the influence can only rise; with momentum it falls at the end.
        """
        return self.curve(fit="monotone")

    def curve(self, steps: int | None = None, *, fit: Fit = "exponential") -> Vector:
        """q_1…q_T for `dim.plan(influence=…)`, also for another T, counted from the end.

        fit  "exponential", "monotone", or "measured": through the points as they are
        """
        T = self.total_steps if steps is None else _validate.count("steps", steps)
        _validate.choice("fit", fit, ["exponential", "monotone", "measured"])
        if fit == "exponential":
            values = exponential(rate=self.exponential().rate, steps=T)
        else:
            at, logs, weights = _points(self.steps, self.estimates)
            if fit == "monotone":
                logs = np.asarray(isotonic_regression(logs, weights=weights).x)
            ages = (self.total_steps - at)[::-1]
            wanted = np.clip(np.arange(T - 1, -1, -1.0), ages[0], ages[-1])
            values = np.exp(PchipInterpolator(ages, logs[::-1])(wanted))
        return mark(from_values(values), None if self.private else self.said)

    def to_json(self) -> str:
        low, high = self.interval
        return json.dumps(
            {
                "version": 1,
                "source": self.source,
                "private": self.private,
                "said": self.said,
                "total_steps": self.total_steps,
                "steps": self.steps.tolist(),
                "level": self.level,
                "dropped": self.dropped,
                "mean": self.mean.tolist(),
                "low": low.tolist(),
                "high": high.tolist(),
                "estimates": self.estimates.tolist(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> MeasuredInfluence:
        data = _files.parse_json(text, name="the measured influence", source="its JSON")
        try:
            return cls(
                np.array(data["steps"], dtype=np.int64),
                np.array(data["estimates"], dtype=np.float64),
                int(data["total_steps"]),
                float(data["level"]),
                "auxiliary" if data["source"] == "auxiliary" else "private",
                int(data["dropped"]),
            )
        except (KeyError, TypeError, ValueError):
            raise InputError(
                "what MeasuredInfluence.to_json wrote", name="the measured influence", value=text
            ) from None


NOT_PRIVATE = (
    "an influence measured on the private data without paying for it: what is made of it is NOT "
    "private, whatever epsilon says"
)


def _points(steps: NDArray[np.int64], estimates: NDArray[np.float64]) -> tuple[Any, Any, Any]:
    """Steps, log-influences and weights of the points whose mean is positive."""
    mean = estimates.mean(0)
    error = estimates.std(0, ddof=1) / math.sqrt(len(estimates)) if len(estimates) > 1 else 0 * mean
    kept = mean > 0
    if kept.sum() < 3:
        raise InputError(
            "positive at three steps or more",
            name="the measured influence",
            value=mean.tolist(),
            remedy="Average over more repeats, or perturb more.",
        )
    relative = np.maximum(error[kept] / mean[kept], LEAST_ERROR)
    return steps[kept], np.log(mean[kept]), 1 / relative**2


def _line(steps: NDArray[np.int64], estimates: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and R² of the weighted line through the log-influence."""
    at, logs, weights = _points(steps, estimates)
    slope, offset = np.polyfit(at, logs, 1, w=np.sqrt(weights))
    spread = float((weights * (logs - np.average(logs, weights=weights)) ** 2).sum())
    left = float((weights * (logs - offset - slope * at) ** 2).sum())
    return float(slope), 1 - left / spread if spread > 0 else 1.0


def check_source(source: Source, not_private: bool) -> None:
    """Private data are measured only by somebody who has said that the result is not private."""
    _validate.choice("source", source, ["auxiliary", "private"])
    if source == "private" and not not_private:
        raise InputError(
            "given as True with private data",
            name="not_private",
            value=not_private,
            remedy="What is measured there is not private: take auxiliary data of the same shape.",
        )


def measure(
    model: Model,
    data: Pair,
    *,
    source: Source,
    sigmas: ArrayLike,
    lr: float | ArrayLike,
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
    """Measure how much each step's noise matters, by paired runs that branch off before it.

    model         makes the module; each run has its own initialisation
    source        "auxiliary", or "private": then only with not_private=True, and marked as such
    sigmas, lr, clip, beta
                  the run that is perturbed, as in `experiments.Replica`
    steps         the steps 1…T to measure, or how many of them; 25 unless given
    repeats       independent runs; the intervals are over them
    perturbation  h in units of σ_t (of one where σ_t is zero)
    evaluate      where the final loss is taken; the training data unless given
    """
    check_source(source, not_private)
    runs = [
        Replica(sigmas=sigmas, lr=lr, clip=clip, beta=beta, seed=seed + i)
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
    with bar("influence", total, progress) as advance:
        found = [
            _branches(study, runs[start : start + together], grid, h, advance)
            for start in range(0, repeats, together)
        ]
    estimates = np.concatenate(found)
    whole = np.isfinite(estimates).all(1)
    if whole.sum() < 2:
        raise InputError(
            "finite in two runs or more",
            name="the final loss",
            value=int(whole.sum()),
            remedy="Take a smaller learning rate, or perturb less.",
        )
    return MeasuredInfluence(grid, estimates[whole], T, level, source, dropped=int((~whole).sum()))


def _grid(steps: int | Sequence[int] | None, T: int) -> NDArray[np.int64]:
    if steps is None:
        steps = min(T, DEFAULT_POINTS)
    if isinstance(steps, int):
        number = _step(steps, T)
        return np.unique(np.linspace(1, T, number).round().astype(np.int64))
    chosen = [_step(t, T) for t in steps]
    if not chosen:
        raise InputError("at least one step", name="steps", value=steps)
    return np.unique(np.array(chosen, dtype=np.int64))


def _step(given: int, T: int) -> int:
    number = _validate.count("steps", given)
    if number > T:
        raise InputError(f"at most {T}, as the run has {T} steps", name="steps", value=given)
    return number


def _branches(
    study: Study,
    runs: Sequence[Replica],
    grid: NDArray[np.int64],
    h: Vector,
    advance: Callable[[int], None],
) -> NDArray[np.float64]:
    """Estimates (runs, grid). Rows of the batch: the runs, then for each step their branches."""
    R, T, like = len(runs), runs[0].steps, study.like
    count = R * (1 + 2 * len(grid))
    size = study.at_once(count)
    batch = study.batch(count, size)
    data = batch.data(study.x, study.y, [0] * count)
    seeds = [Seeds.make(run.seed) for run in runs]
    starts = initial_rows(study.model, [run.seed for run in runs], study.device)
    batch.write(starts.repeat(count // R, 1))
    settings = Settings(runs, data.examples, like)
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
            drawn = noise[own % R]
            if added is not None:
                _perturb(drawn, added, own - (active - 2 * R), R)
            start_with = partial(_start, batch, drawn)
            batch.step(data, rows, start_with, _update(settings, own % R, step))
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


def _start(batch: Batch, drawn: Tensor, rows: slice, place: slice) -> None:
    batch.start(rows, drawn[place])


def _perturb(drawn: Tensor, added: Tensor, place: Tensor, runs: int) -> None:
    """+z for the first half of the new branches, −z for the second."""
    new = place >= 0
    signs = 1.0 - 2.0 * (place[new] >= runs).to(drawn.dtype)
    drawn[new] += signs.unsqueeze(1) * added[place[new] % runs]


def _update(settings: Settings, own: Tensor, step: int) -> Update:
    beta = settings.beta
    return Update(
        settings.clip[own],
        settings.scales[step, own],
        None if beta is None else beta[own],
    )

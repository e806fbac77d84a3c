"""An influence measured by retraining: estimates, their intervals, and curves fitted to them."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression
from scipy.stats import t as student

from diminuendo import _files, _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.influence.closed_forms import exponential
from diminuendo.influence.measured import from_values, mark
from diminuendo.measuring.source import NOT_PRIVATE, Source

Fit = Literal["exponential", "monotone", "measured"]
LEAST_ERROR = 0.01
"""The smallest relative error that counts in a fit, since the fitted model errs by more."""


@dataclass(frozen=True)
class ExponentialFit:
    """q_t ∝ γ^{T−t}: γ with its interval, and R² of the line through the log-influence.

    gamma, low, high  γ and the ends of its interval, all above 0
    r_squared         at most 1; 1 where the points lie on the line
    """

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
    """The change of the final loss per unit of σ_t², at some steps t of a run of T steps.

    steps        the steps that were measured, counted from 1
    estimates    a row for each independent run and a column for each of these steps
    total_steps  T
    level        confidence level of the intervals, in (0, 1)
    source       "auxiliary" or "private" data; from private data, nothing here is private, and
                 plans made from it say so
    dropped      how many runs were left out because they were not finite
    """

    steps: NDArray[np.int64]
    estimates: NDArray[np.float64]
    total_steps: int
    level: float
    source: Source
    dropped: int = 0

    @property
    def private(self) -> bool:
        """False if it was measured on private data, for which no budget was charged."""
        return self.source == "auxiliary"

    @property
    def description(self) -> str:
        """What it was measured on, as plans and reports say it."""
        if self.private:
            return "an influence measured on auxiliary data"
        return NOT_PRIVATE

    @property
    def said(self) -> str:
        """Deprecated: `description`."""
        warnings.warn("`said` is now `description`.", DeprecationWarning, stacklevel=2)
        return self.description

    @property
    def mean(self) -> Vector:
        """The mean estimate of each measured step."""
        return np.asarray(self.estimates.mean(0))

    @property
    def error(self) -> Vector:
        """The standard error of the mean."""
        runs = len(self.estimates)
        return np.asarray(self.estimates.std(0, ddof=1) / math.sqrt(runs))

    @property
    def interval(self) -> tuple[Vector, Vector]:
        """The ends (low, high) of Student's interval for the mean of each step, at `level`."""
        half = self._quantile * self.error
        return self.mean - half, self.mean + half

    @property
    def _quantile(self) -> float:
        return float(student.ppf(0.5 + self.level / 2, len(self.estimates) - 1))

    def exponential(self) -> ExponentialFit:
        """The exponential curve that fits best: a line through log q_t, weighted by the errors.

        The interval of γ is a jackknife over the independent runs.
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
        """q_1…q_T: the rising curve nearest to the log-influence, smooth between its points.

        For gradient descent, whose influence can only rise. With momentum it falls at the end.
        """
        return self.curve(fit="monotone")

    def curve(self, steps: int | None = None, *, fit: Fit = "exponential") -> Vector:
        """q_1…q_T for `dim.plan(influence=…)`, scaled so that the largest is one.

        steps  T, by default that of the measured run; steps correspond to each other from the end
        fit    "exponential", "monotone", or "measured": interpolated between the points
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
            at_ages = np.clip(np.arange(T - 1, -1, -1.0), ages[0], ages[-1])
            values = np.exp(PchipInterpolator(ages, logs[::-1])(at_ages))
        return mark(from_values(values), None if self.private else self.description)

    def to_json(self) -> str:
        """All of it as JSON text, which `from_json` reads."""
        low, high = self.interval
        return json.dumps(
            {
                "version": 1,
                "source": self.source,
                "private": self.private,
                "said": self.description,
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
        """The measurement that `to_json` wrote, or an `InputError`."""
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
                "JSON written by MeasuredInfluence.to_json",
                name="the measured influence",
                value=text,
            ) from None


def _points(steps: NDArray[np.int64], estimates: NDArray[np.float64]) -> tuple[Any, Any, Any]:
    """Steps, log-influences and weights of the points whose mean is positive."""
    mean = estimates.mean(0)
    error = estimates.std(0, ddof=1) / math.sqrt(len(estimates)) if len(estimates) > 1 else 0 * mean
    positive = mean > 0
    if positive.sum() < 3:
        raise InputError(
            "positive at three steps or more",
            name="the measured influence",
            value=mean.tolist(),
            remedy="Use more repeats, or a larger perturbation.",
        )
    relative = np.maximum(error[positive] / mean[positive], LEAST_ERROR)
    return steps[positive], np.log(mean[positive]), 1 / relative**2


def _line(steps: NDArray[np.int64], estimates: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and R² of the weighted line through the log-influence."""
    at, logs, weights = _points(steps, estimates)
    slope, offset = np.polyfit(at, logs, 1, w=np.sqrt(weights))
    spread = float((weights * (logs - np.average(logs, weights=weights)) ** 2).sum())
    residual = float((weights * (logs - offset - slope * at) ** 2).sum())
    return float(slope), 1 - residual / spread if spread > 0 else 1.0

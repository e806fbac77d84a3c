"""The named shapes of the literature: how σ_t runs, up to a factor, as a pure function of t.

Each returns shape_1…shape_T of positive numbers; `schedules.onto_budget` or `dim.calibrate` turn
one into noise multipliers. Yu, Liu, Pu, Gursoy and Truex (2019) name the decaying ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError


def _steps(steps: int) -> Vector:
    return np.arange(1, _validate.count("steps", steps) + 1.0)


def uniform(steps: int) -> Vector:
    """The same noise in every step: T ones."""
    return np.ones_like(_steps(steps))


def exponential(steps: int, *, rate: float) -> Vector:
    """e^{−rate·(t−1)}."""
    rate = _validate.real("rate", rate)
    return _positive(np.exp(-rate * (_steps(steps) - 1)), "rate", rate)


def step(steps: int, *, factor: float, every: int) -> Vector:
    """Multiplied by `factor` after each `every` steps."""
    factor, every = _validate.positive("factor", factor), _validate.count("every", every)
    return _positive(factor ** ((_steps(steps) - 1) // every), "factor", factor)


def time_decay(steps: int, *, rate: float) -> Vector:
    """1/(1 + rate·t)."""
    return 1 / (1 + _validate.real("rate", rate, at_least=0) * _steps(steps))


def polynomial(steps: int, *, power: float, end: float) -> Vector:
    """end + (1 − end)(1 − (t−1)/(T−1))^power: from 1 down (or up) to `end`."""
    t = _steps(steps)
    power, end = _validate.positive("power", power), _validate.positive("end", end)
    remaining = 1 - (t - 1) / max(steps - 1, 1)
    return np.asarray(end + (1 - end) * remaining**power)


def linear(steps: int, *, end: float) -> Vector:
    """From 1 in equal steps to `end` > 0."""
    return polynomial(steps, power=1.0, end=end)


def piecewise(steps: int, *, boundaries: Sequence[int], values: ArrayLike) -> Vector:
    """values[0] up to and including step boundaries[0], then values[1], and so on to step T."""
    t = _steps(steps)
    levels = _validate.vector("values", values)
    edges = [_validate.count(f"boundaries[{i}]", edge) for i, edge in enumerate(boundaries)]
    if edges != sorted(set(edges)):
        raise InputError("strictly increasing", name="boundaries", value=edges)
    if levels.size != len(edges) + 1:
        raise InputError(
            f"one longer than boundaries ({len(edges) + 1})",
            name="the length of values",
            value=int(levels.size),
        )
    return np.asarray(levels[np.searchsorted(edges, t, side="left")])


def custom(shape: Callable[[int], float] | ArrayLike, steps: int) -> Vector:
    """Any function of t = 1…T, or an array with one entry for each step."""
    steps = _validate.count("steps", steps)
    if callable(shape):
        return _validate.vector("shape", [shape(t) for t in range(1, steps + 1)])
    values = _validate.vector("shape", shape)
    if values.size != steps:
        raise InputError(f"steps ({steps})", name="the length of shape", value=int(values.size))
    return values


NAMED = ("uniform", "exponential", "step", "time", "polynomial", "linear")


def falling(name: str, steps: int, fall: float) -> Vector:
    """A named shape whose last value is `fall`, in (0, 1], times its first."""
    _validate.choice("schedule", name, NAMED)
    steps = _validate.count("steps", steps)
    fall = _validate.real("fall", fall, above=0, at_most=1)
    gaps = max(steps - 1, 1)
    if name == "uniform":
        return uniform(steps)
    if name == "exponential":
        return exponential(steps, rate=-math.log(fall) / gaps)
    if name == "step":
        every = -(-steps // 4)
        levels = -(-steps // every)
        return step(steps, factor=fall ** (1 / max(levels - 1, 1)), every=every)
    if name == "time":
        ratio = 1 / fall - 1
        return 1 / (1 + ratio * (_steps(steps) - 1) / gaps)
    return polynomial(steps, power=2.0 if name == "polynomial" else 1.0, end=fall)


def _positive(shape: Vector, name: str, value: float) -> Vector:
    if not (np.isfinite(shape).all() and (shape > 0).all()):
        raise InputError(
            "moderate enough that the shape neither vanishes nor overflows over the run",
            name=name,
            value=value,
            remedy=f"The run has {shape.size} steps.",
        )
    return shape

"""Learning rates η_1…η_T: from a number, an array, a function of t or a PyTorch scheduler.

The named shapes return arrays: `constant`, `linear`, `cosine`, `step_decay`, and `warm_up` in
front of any of them. Learning rates are counted in units of 1/M (M the smoothness) where a
convergence rate describes the loss, and in units of one over the eigenvalues where a spectrum does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError

LearningRates = float | ArrayLike | Callable[..., Any]
"""What `lr=` takes: a number, η_1…η_T, a shape's name, a function of t, a scheduler's factory."""

NAMED = ("constant", "linear", "cosine")
"""Shapes that `lr=` takes by name: from 1 in the first step, the last two towards 0."""


_LISTED = "an array, a function of t, or a function from an optimizer to a scheduler"
_TAKEN = f"a number, {_LISTED}"


def learning_rates(lr: LearningRates, steps: int, *, limit: float = math.inf) -> Vector:
    """η_1…η_T, nonnegative, finite and not all zero.

    lr      one number for all steps; an array with one for each; the name of a shape in `NAMED`;
            a function of t = 1…T; or a function that takes a PyTorch optimizer and returns a
            scheduler. The optimizer that it gets has learning rate 1, so the result is in the unit
            that `lr` is counted in.
    steps   T
    limit   the longest step that is stable; a longer one raises InputError
    """
    steps = _validate.count("steps", steps)
    if isinstance(lr, str):
        values = {"constant": constant, "linear": linear, "cosine": cosine}[check_name(lr)](steps)
    elif callable(lr):
        values = _from_function(lr, steps)
    elif np.ndim(lr) == 0:
        values = np.full(steps, _validate.positive("lr", lr, remedy=f"Or give {_LISTED}."))
    else:
        values = _validate.vector("lr", lr, positive=False)
    if values.size != steps:
        raise InputError(
            f"steps ({steps})",
            name="the length of lr",
            value=int(values.size),
            remedy="Give one learning rate for each step.",
        )
    if not values.any():
        raise InputError("above zero in some step", name="lr", value=0.0)
    check_stable(values, limit)
    return values


def check_name(name: str, *, also: tuple[str, ...] = ()) -> str:
    """The name of a shape of learning rates, or of what else the caller takes."""
    return _validate.choice(
        "lr",
        name,
        (*NAMED, *also),
        remedy="Or give a list with one learning rate for each step, or one number for all.",
    )


def check_stable(values: Vector, limit: float) -> None:
    """Raise InputError for the first learning rate above `limit`."""
    if (values > limit * (1 + 1e-12)).any():
        first = int(np.argmax(values > limit))
        raise InputError(
            f"at most {limit:.6g}, the longest step that is stable at the stated curvature",
            name=f"lr[{first}]",
            value=float(values[first]),
            remedy="Lower the learning rates, or allow longer steps with max_lr.",
        )


def _from_function(function: Callable[..., Any], steps: int) -> Vector:
    """Values of a function of t, or the learning rates that a scheduler's factory produces."""
    try:
        first = function(1)
    except (TypeError, AttributeError):
        return _from_scheduler(function, steps)
    if hasattr(first, "optimizer"):
        return _from_scheduler(function, steps)
    return _validate.vector(
        "lr", [first, *(function(t) for t in range(2, steps + 1))], positive=False
    )


def _from_scheduler(factory: Callable[[Any], Any], steps: int) -> Vector:
    """Run the scheduler on a throw-away optimizer. Whoever passes one has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise InputError(_TAKEN, name="lr", value=factory)
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    try:
        scheduler = factory(optimizer)
    except TypeError as error:
        raise InputError(
            _TAKEN,
            name="lr",
            value=factory,
            remedy=f"lambda optimizer: StepLR(optimizer, 10), say. ({error})",
        ) from error
    if any(kind.__name__ == "ReduceLROnPlateau" for kind in type(scheduler).__mro__):
        raise InputError(
            "a schedule that does not depend on a metric",
            name="lr",
            value="ReduceLROnPlateau",
            remedy="A metric of the private data is private itself: a schedule that follows it "
            "would have to be paid for. Give the learning rates of a public run as a list; or plan "
            "without lr, and fit follows a public or paid metric: lr_scheduler=OnPlateau(…).",
        )
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "get_last_lr")):
        raise InputError("a function that returns a scheduler", name="lr", value=factory)
    values = []
    try:
        for _ in range(steps):
            values.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    except (ValueError, RuntimeError) as error:
        if len(values) < steps:  # it may end with the run
            raise InputError(
                f"a scheduler for {steps} steps",
                name="lr",
                value=type(scheduler).__name__,
                remedy=f"It stops after {len(values)}: {error}",
            ) from None
    return _validate.vector("lr", values, positive=False)


def constant(steps: int, *, peak: float = 1.0) -> Vector:
    """The same learning rate `peak` > 0 in all steps."""
    return np.full(_validate.count("steps", steps), _validate.positive("peak", peak))


def linear(steps: int, *, peak: float = 1.0, end: float = 0.0) -> Vector:
    """From `peak` in the first step, in equal steps, towards `end`·peak after the last."""
    return _towards(1 - _progress(steps), peak, end)


def cosine(steps: int, *, peak: float = 1.0, end: float = 0.0) -> Vector:
    """From `peak` in the first step, along half a cosine, towards `end`·peak after the last."""
    return _towards((1 + np.cos(np.pi * _progress(steps))) / 2, peak, end)


def step_decay(steps: int, *, every: int, factor: float = 0.1, peak: float = 1.0) -> Vector:
    """`peak`, multiplied by `factor` in (0, 1] after each `every` steps."""
    every = _validate.count("every", every)
    factor = _validate.real("factor", factor, above=0, at_most=1)
    t = np.arange(_validate.count("steps", steps))
    return np.asarray(_validate.positive("peak", peak) * factor ** (t // every))


def warm_up(lr: ArrayLike, *, steps: int) -> Vector:
    """The learning rates with the first `steps` of them multiplied by 1/k, 2/k, …, 1."""
    values = _validate.vector("lr", lr, positive=False)
    over = _validate.count("steps", steps, at_most=values.size)
    values[:over] *= np.arange(1, over + 1) / over
    return values


def _progress(steps: int) -> Vector:
    steps = _validate.count("steps", steps)
    return np.asarray(np.arange(steps) / steps)


def _towards(left: Vector, peak: float, end: float) -> Vector:
    share = _validate.real("end", end, at_least=0, at_most=1)
    return np.asarray(_validate.positive("peak", peak) * (share + (1 - share) * left))

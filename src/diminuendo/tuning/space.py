"""What tuning searches: ranges of settings, single candidates, and their plans."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from diminuendo import _validate, schedules
from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import calibrate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.planning import SCHEDULES, Plan, PlanWarning, plan

Numbers = float | tuple[float, float]
"""A fixed number, or a range (low, high)."""
CurveOf = Callable[[int], Vector]
"""The influence curve q_1…q_T for a number of steps T."""

MOST_STEPS = 10_000
NAMES = ("steps", "lr", "clip", "momentum", "fall")
LOGARITHMIC = ("lr", "clip")
"""Settings that are searched on a logarithmic scale."""
WITHOUT_FALL = ("uniform", "optimal")
"""Families whose ratio σ_T/σ_1 is not a setting."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The ranges that are searched. A number stays fixed; a pair (low, high) is searched.

    steps     T, from 1 to 10,000
    lr        learning rate, above 0; searched on a logarithmic scale
    clip      clip norm (max grad norm), above 0; searched on a logarithmic scale
    momentum  β in [0, 1)
    fall      σ_T/σ_1 in (0, 1], for the families of schedules that have such a ratio
    """

    steps: int | tuple[int, int] = (50, 150)
    lr: Numbers = 0.1
    clip: Numbers = 4.0
    momentum: Numbers = 0.0
    fall: Numbers = (0.25, 1.0)

    def __post_init__(self) -> None:
        limit = f"Tuning covers 1 to {MOST_STEPS} steps."
        checks: dict[str, Callable[[str, Any], float]] = {
            "steps": lambda n, v: _validate.count(n, v, at_most=MOST_STEPS, remedy=limit),
            "lr": _validate.positive,
            "clip": _validate.positive,
            "momentum": lambda n, v: _validate.real(n, v, at_least=0, below=1),
            "fall": lambda n, v: _validate.real(n, v, above=0, at_most=1),
        }
        for name, check in checks.items():
            object.__setattr__(self, name, _number_or_range(name, getattr(self, name), check))

    def searched(self, family: str) -> tuple[str, ...]:
        """The names of the settings that have a range and matter for this family."""
        names = NAMES if family not in WITHOUT_FALL else NAMES[:-1]
        return tuple(name for name in names if isinstance(getattr(self, name), tuple))

    def candidate(self, family: str, choose: Callable[[str, float, float], float]) -> Candidate:
        """A point of the space: `choose(name, low, high)` gives each setting that is searched."""
        values = {name: getattr(self, name) for name in NAMES}
        for name in self.searched(family):
            values[name] = choose(name, *values[name])
        if family in WITHOUT_FALL:
            values["fall"] = None
        return Candidate(family=family, **values)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values; a range becomes a list."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def _number_or_range(name: str, value: Any, check: Callable[[str, Any], float]) -> Any:
    if not isinstance(value, (tuple, list)):
        return check(name, value)
    if len(value) != 2:
        raise InputError("a number, or a pair (low, high)", name=name, value=value)
    low, high = (check(f"an end of {name}", end) for end in value)
    if not low < high:
        raise InputError("a pair (low, high) with low < high", name=name, value=value)
    return (low, high)


def check_family(family: str, space: Space, name: str = "family") -> None:
    """Raise an `InputError` unless the family has a setting to search in this space."""
    _validate.choice(name, family, SCHEDULES)
    if not space.searched(family):
        raise InputError(
            "a family with a setting to search",
            name=name,
            value=family,
            remedy="Give a range (low, high) for steps, lr, clip or momentum"
            + ("." if family in WITHOUT_FALL else ", or fall."),
        )


def check_private_family(family: str, space: Space) -> None:
    """`check_family` for tuning on private data, which has no influence curve to follow."""
    if family == "optimal":
        raise InputError("a family that needs no influence curve", name="family", value=family)
    check_family(family, space)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the space, with the settings of `Space`; `fall` is None for some families."""

    family: str
    steps: int
    lr: float
    clip: float
    momentum: float
    fall: float | None

    def shape(self, influence: CurveOf | None) -> Vector:
        """σ_1…σ_T up to a common factor."""
        if self.family == "optimal":
            assert influence is not None
            return schedules.optimal_shape(influence(self.steps))
        return schedules.shapes.falling(self.family, self.steps, self.fall or 1.0)

    def sigmas(self, budget: Budget, influence: CurveOf | None = None) -> Vector:
        """Noise multipliers σ_1…σ_T that spend the budget."""
        return calibrate(self.shape(influence), budget)


def make_plan(
    candidate: Candidate,
    budget: Budget,
    examples: int,
    parameters: int,
    influence: CurveOf | None = None,
) -> Plan:
    """The candidate as a plan, whose σ_t are those that it was trained with."""
    curve = None if candidate.family != "optimal" or influence is None else influence
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        return plan(
            budget,
            examples=examples,
            parameters=parameters,
            clip=candidate.clip,
            steps=candidate.steps,
            influence=None if curve is None else curve(candidate.steps),
            momentum=candidate.momentum if candidate.momentum > 0 else None,
            schedule=candidate.family,
            fall=candidate.fall,
        )

"""What tuning searches: ranges of settings, single candidates, and their plans."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from diminuendo import _validate, schedules
from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import calibrate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.planning import SCHEDULES, Plan, PlanWarning, plan
from diminuendo.replicas.replica import CLIPPINGS, Clipping, Replica

Numbers = float | tuple[float, float]
"""A fixed number, or a range (low, high)."""
Names = str | tuple[str, ...]
"""A name, or several to choose from."""
CurveOf = Callable[[int], Vector]
"""The influence curve q_1…q_T for a number of steps T."""

MOST_STEPS = 10_000
NAMES = ("steps", "lr", "clip", "momentum", "fall")
LOGARITHMIC = ("lr", "clip")
"""Settings that are searched on a logarithmic scale."""
WITHOUT_FALL = ("uniform", "optimal")
"""Families whose ratio σ_T/σ_1 is not a setting."""
LR_SHAPES = ("constant", "linear", "cosine", "exponential")


def _share(name: str, value: Any) -> float:
    return _validate.real(name, value, above=0, at_most=1)


def _number_or_range(name: str, value: Any, check: Callable[[str, Any], float]) -> Any:
    if not isinstance(value, (tuple, list)):
        return check(name, value)
    if len(value) != 2:
        raise InputError("a number, or a pair (low, high)", name=name, value=value)
    low, high = (check(f"an end of {name}", end) for end in value)
    if not low < high:
        raise InputError("a pair (low, high) with low < high", name=name, value=value)
    return (low, high)


def _one_or_some(name: str, value: Any, options: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return _validate.choice(name, value, options)
    names = tuple(_validate.choice(name, one, options) for one in value)
    if not names or len(set(names)) != len(names):
        raise InputError("at least one, each once", name=name, value=value)
    return names[0] if len(names) == 1 else names


@dataclass(frozen=True, kw_only=True)
class Space:
    """The ranges that are searched. A number stays fixed; a pair (low, high) is searched.

    steps          T, from 1 to 10,000
    lr             learning rate, above 0; searched on a logarithmic scale
    clip           clip norm (max grad norm), above 0; searched on a logarithmic scale
    momentum       β in [0, 1)
    fall           σ_T/σ_1 in (0, 1], for the families of schedules that have such a ratio
    lr_shape       how the learning rate falls: "constant", "linear", "cosine", "exponential"
    lr_fall        η_T/η_1 in (0, 1], for the shapes that fall
    clipping       "flat", "automatic", "per-layer"
    sampling_rate  Poisson sampling rate in (0, 1], 1 is the full batch

    What is left out is searched by `tune` (all but the sampling rate), and is the paper's where
    families of schedules are compared: T from 50 to 150, learning rate 0.1, clip norm 4, no
    momentum, a constant learning rate.
    """

    steps: int | tuple[int, int] | None = None
    lr: Numbers | None = None
    clip: Numbers | None = None
    momentum: Numbers | None = None
    fall: Numbers | None = None
    lr_shape: Names | None = None
    lr_fall: Numbers | None = None
    clipping: Names | None = None
    sampling_rate: Numbers | None = None

    def __post_init__(self) -> None:
        limit = f"Tuning covers 1 to {MOST_STEPS} steps."
        checks: dict[str, Callable[[str, Any], float]] = {
            "steps": lambda n, v: _validate.count(n, v, at_most=MOST_STEPS, remedy=limit),
            "lr": _validate.positive,
            "clip": _validate.positive,
            "momentum": lambda n, v: _validate.real(n, v, at_least=0, below=1),
            "fall": _share,
            "lr_fall": _share,
            "sampling_rate": _share,
        }
        for name, check in checks.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _number_or_range(name, getattr(self, name), check))
        for name, options in (("lr_shape", LR_SHAPES), ("clipping", CLIPPINGS)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _one_or_some(name, getattr(self, name), options))

    def filled(self, defaults: Space) -> Space:
        """This space, with the defaults' values for what is left out."""
        left_out = {f.name for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **{name: getattr(defaults, name) for name in left_out})

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


PRINTED = Space(
    steps=(50, 150),
    lr=0.1,
    clip=4.0,
    momentum=0.0,
    fall=(0.25, 1.0),
    lr_shape="constant",
    lr_fall=1.0,
    clipping="flat",
    sampling_rate=1.0,
)
"""The paper's setting, for comparisons of families of schedules."""


def as_printed(space: Space | None) -> Space:
    """The space with the paper's values for what it leaves out; other kinds of choice refused."""
    space = (space or Space()).filled(PRINTED)
    for name in ("lr_shape", "lr_fall", "clipping", "sampling_rate"):
        if getattr(space, name) != getattr(PRINTED, name):
            raise InputError(
                f"left out, or {getattr(PRINTED, name)!r}, where families are compared",
                name=name,
                value=getattr(space, name),
                remedy="dim.tune without families, trials, batch, storage, name and influence "
                "chooses it together with everything else.",
            )
    return space


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
    """One point of the space, with the settings of `Space`; `fall` is None for some families.

    model   the name of the model, where several are chosen from
    """

    family: str
    steps: int
    lr: float
    clip: float
    momentum: float
    fall: float | None
    lr_shape: str = "constant"
    lr_fall: float = 1.0
    clipping: Clipping = "flat"
    sampling_rate: float = 1.0
    model: str = ""

    def shape(self, influence: CurveOf | None) -> Vector:
        """σ_1…σ_T up to a common factor."""
        if self.family == "optimal":
            assert influence is not None
            return schedules.optimal_shape(influence(self.steps))
        return schedules.shapes.falling(self.family, self.steps, self.fall or 1.0)

    def sigmas(self, budget: Budget, influence: CurveOf | None = None) -> Vector:
        """Noise multipliers σ_1…σ_T that spend the budget."""
        if self.family == "optimal":
            return calibrate(self.shape(influence), budget, self.sampling_rate)
        return _sigmas(budget, self.family, self.steps, self.fall, self.sampling_rate)

    @property
    def lr_shares(self) -> Vector | None:
        """η_1…η_T over `lr`, the largest of them; None for a constant learning rate."""
        if self.lr_shape == "constant":
            return None
        if self.lr_shape != "cosine":
            return schedules.shapes.falling(self.lr_shape, self.steps, self.lr_fall)
        turn = np.pi * np.arange(self.steps) / max(self.steps - 1, 1)
        return np.asarray(self.lr_fall + (1 - self.lr_fall) * (1 + np.cos(turn)) / 2)

    def replica(self, budget: Budget, *, seed: int, data: int = 0, share: float = 1.0) -> Replica:
        """One training run with these settings, for `replicas.train`.

        data    the index of its training set
        share   examples of its training set over those that the settings are for: with a sampling
                rate that keeps the expected batch, as far as it can, and with noise multipliers
                that keep the noise on the mean gradient
        """
        shares = self.lr_shares
        rate = min(1.0, self.sampling_rate / share)
        return Replica(
            sigmas=self.sigmas(budget) * (share * rate / self.sampling_rate),
            lr=self.lr if shares is None else self.lr * shares,
            clip=self.clip,
            beta=self.momentum,
            seed=seed,
            data=data,
            sampling_rate=rate,
            clipping=self.clipping,
        )

    def __str__(self) -> str:
        """The settings in a few words, as tables show them."""
        words = [self.model] if self.model else []
        words += [f"T = {self.steps}", f"lr {self.lr:.3g}"]
        if self.lr_shape != "constant":
            words.append(f"falling to {self.lr_fall:.2g} ({self.lr_shape})")
        words.append(f"clip {self.clip:.3g}" + ("" if self.clipping == "flat" else self._rule()))
        if self.fall is not None and self.fall < 1:
            words.append(f"σ falling to {self.fall:.2g}")
        if self.momentum:
            words.append(f"momentum {self.momentum:.2g}")
        if self.sampling_rate < 1:
            words.append(f"rate {self.sampling_rate:.3g}")
        return ", ".join(words)

    def _rule(self) -> str:
        return f" ({self.clipping})"


@lru_cache(maxsize=4096)
def _sigmas(budget: Budget, family: str, steps: int, fall: float | None, rate: float) -> Vector:
    shape = schedules.shapes.falling(family, steps, fall or 1.0)
    sigmas = calibrate(shape, budget, rate)
    sigmas.setflags(write=False)
    return sigmas


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
            sampling_rate=candidate.sampling_rate,
            lr=candidate.lr_shares,
        )

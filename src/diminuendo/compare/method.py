"""What a method is: a name, a paper, a privacy claim in words, numbers to tune, and how it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from diminuendo import schedules
from diminuendo._validate import Vector
from diminuendo.compare.lesson import Lesson
from diminuendo.compare.lesson import Settings as Settings
from diminuendo.compare.private import Private
from diminuendo.errors import InputError


@dataclass(frozen=True)
class Range:
    """A tuned number between `low` and `high`: evenly on a logarithmic scale, evenly, or one of
    `choices`."""

    low: float = 0.0
    high: float = 1.0
    scale: Literal["log", "linear"] = "log"
    choices: tuple[float, ...] = ()

    def at(self, share: float) -> float:
        """The number at this share, in [0, 1), of the range."""
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.scale == "log":
            return float(self.low * (self.high / self.low) ** share)
        return self.low + (self.high - self.low) * share


STEPS = Range(choices=(10, 20, 40, 80, 160))
COMMON: Mapping[str, Range] = {
    "length": Range(0.2, 60.0),
    "clip": Range(0.1, 1.5),
    "steps": STEPS,
}
"""What every descent tunes, in this order, so that candidate k has the same ones in every method.
`length` is lr × clip: how far a step goes where every gradient is clipped."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train privately.

    key      its name in tables and on the command line
    title    its name in words
    family   the group in which it is listed
    paper    who proposed it, and where
    claim    how its privacy claim is accounted here
    differs  what differs from its paper; "" where nothing of weight does
    run      from private data and settings to trained parameters, (R, parameters); None for a
             method without a valid claim, which is listed and not run
    space    what is tuned, besides nothing
    convex   whether it needs a convex loss (the linear model)
    layered  whether it reads examples' gradients layer by layer (not of the convolutional network)
    checked  what of its own paper was reproduced, and where; "" where nothing was
    reported what its paper reports and in which setting; "" where that is not known here
    learn    from auxiliary data and tuned settings to the numbers that are learnt there; they are
             added to the settings. Half of the candidates' effort goes into it
    learned  the names of those numbers; the claim holds whatever they are
    alone    whether it decides by what was seen, so that each replica runs and pays on its own
    releases what an observer sees: every noisy gradient, one trained model, or one trained model
             to which Gaussian noise was added at the end
    """

    key: str
    title: str
    family: str
    paper: str
    claim: str
    run: Callable[[Private, Settings], Tensor] | None
    space: Mapping[str, Range] = field(default_factory=lambda: dict(COMMON))
    differs: str = ""
    convex: bool = False
    layered: bool = False
    checked: str = ""
    reported: str = ""
    learn: Callable[[Lesson, Settings], dict[str, float]] | None = None
    learned: tuple[str, ...] = ()
    alone: bool = False
    releases: Literal["gradients", "model", "noised model"] = "gradients"

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that differ where the tuned numbers or their ranges do."""
        return hashlib.sha256(repr(sorted(self.space.items())).encode()).hexdigest()[:8]

    def trains(self, model: str) -> bool:
        """Whether it can be run on linear, network or cnn."""
        if self.run is None or (self.convex and model != "linear"):
            return False
        return not (self.layered and model == "cnn")

    def settings(self, point: Sequence[float]) -> dict[str, float]:
        """The settings at a point of the unit cube, one coordinate for each tuned number; what is
        yet to be learnt is 0."""
        drawn = {
            name: values.at(min(max(share, 0.0), 1 - 1e-9))
            for (name, values), share in zip(self.space.items(), point, strict=True)
        } | dict.fromkeys(self.learned, 0.0)
        return as_settings(drawn)

    def point(self, number: int) -> list[float]:
        """Point 0, 1, … of a Halton sequence, whose points spread evenly over the unit cube."""
        return [_radical_inverse(number + 1, p) for p in _PRIMES[: len(self.space)]]

    def candidate(self, number: int) -> dict[str, float]:
        """The settings at the Halton sequence's point 0, 1, …"""
        return self.settings(self.point(number))


def as_settings(tuned: Mapping[str, float]) -> dict[str, float]:
    """The settings of a run from tuned numbers: lr in place of `length`, which is lr × clip."""
    rest = {name: value for name, value in tuned.items() if name != "length"}
    return {"lr": tuned["length"] / tuned["clip"], **rest} if "length" in tuned else rest


_PRIMES = (2, 3, 5, 7, 11, 13, 17)


def _radical_inverse(number: int, base: int) -> float:
    """The number's digits in this base, mirrored behind the point."""
    share, scale = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        share += digit * scale
        scale /= base
    return share


def onto_budget(private: Private, shape: Vector) -> list[float]:
    """Full-batch noise multipliers of this shape that use the whole budget."""
    return [float(s) for s in schedules.onto_budget(shape, private.budget.R)]


def find(methods: Mapping[str, Method], key: str) -> Method:
    """The method of this name, or InputError with all names."""
    if key not in methods:
        raise InputError(f"one of {', '.join(methods)}", name="the method", value=key)
    return methods[key]

"""What the form holds: public facts, each within limits that keep an answer quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

from diminuendo import _validate
from diminuendo.bounds import landscape
from diminuendo.budget import SENSITIVITY, Budget, Relation
from diminuendo.errors import InputError
from diminuendo.influence.learning_rates import NAMED
from diminuendo.planning import SCHEDULES
from diminuendo.planning.constants import Constants

MOST_STEPS = 20_000
MOST_EIGENVALUES = 100
KNOWN = ("nothing", "gamma", "kappa", "spectrum")
"""What may be known about the loss."""
LEARNING_RATES = (*NAMED, "joint")
RELATIONS = tuple(SENSITIVITY)
LIMITS: Mapping[str, tuple[float, float]] = {
    "epsilon": (0.01, 100.0),
    "delta": (1e-15, 0.1),
    "clip": (1e-6, 1e6),
    "sampling_rate": (1e-6, 1.0),
    "gamma": (0.0, 0.999999),
    "kappa": (1.0, 1e6),
    "momentum": (0.0, 0.999),
}
COUNTS: Mapping[str, int] = {"examples": 10**12, "parameters": 10**13}
"""The most of each; at least 1."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One state of the form. Every field is public; none may be computed from private data.

    steps      T from 1 to 20,000, or "auto" for the T* of the bound
    known      which of gamma, kappa and spectrum counts; the others are kept and not used
    momentum   β, 0 for plain gradient descent
    lr         a named shape of learning rates, or "joint"
    """

    epsilon: float = 4.0
    delta: float = 1e-8
    examples: int = 1000
    parameters: int = 71_010
    clip: float = 4.0
    steps: int | Literal["auto"] = 100
    sampling_rate: float = 1.0
    known: str = "gamma"
    gamma: float = 0.95
    kappa: float = 20.0
    spectrum: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01)
    momentum: float = 0.0
    lr: str = "constant"
    schedule: str = "optimal"
    relation: str = "add-remove"

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            self._set(name, _validate.real(name, getattr(self, name), at_least=least, at_most=most))
        for name, most in COUNTS.items():
            self._set(name, _validate.count(name, getattr(self, name), at_most=most))
        if self.steps != "auto":
            self._set("steps", _validate.count("steps", self.steps, at_most=MOST_STEPS))
        for name, options in (
            ("known", KNOWN),
            ("lr", LEARNING_RATES),
            ("schedule", SCHEDULES),
            ("relation", RELATIONS),
        ):
            self._set(name, _validate.choice(name, getattr(self, name), options))
        if not isinstance(self.spectrum, (list, tuple)) or len(self.spectrum) > MOST_EIGENVALUES:
            raise InputError(
                f"at most {MOST_EIGENVALUES} numbers", name="spectrum", value=self.spectrum
            )
        self._set("spectrum", tuple(_validate.vector("spectrum", self.spectrum, positive=False)))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def read(cls, data: Any) -> Settings:
        """From a JSON object with some of the fields; the rest have their defaults."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or not set(data) <= names:
            unknown = sorted(set(data) - names) if isinstance(data, dict) else data
            raise InputError(
                f"an object with some of {', '.join(sorted(names))}",
                name="the settings",
                value=unknown,
            )
        return cls(**data)

    def as_dict(self) -> dict[str, Any]:
        """Every field, as JSON values."""
        return {**asdict(self), "spectrum": list(self.spectrum)}

    @property
    def budget(self) -> Budget:
        """(ε, δ) for the stated neighbours."""
        return Budget(
            epsilon=self.epsilon, delta=self.delta, relation=cast(Relation, self.relation)
        )

    @property
    def loss(self) -> dict[str, Any]:
        """What is known about the loss, as keywords of `dim.plan`; empty for nothing."""
        if self.known == "nothing":
            return {}
        value = getattr(self, self.known)
        return {self.known: list(value) if self.known == "spectrum" else value}

    @property
    def learning_rates(self) -> str | None:
        """lr as `dim.plan` takes it: None for constant steps of length 1/M."""
        return None if self.lr == "constant" else self.lr

    def plan_arguments(self) -> dict[str, Any]:
        """Keywords of `dim.plan`, those that have their default left out."""
        optional = {
            "momentum": self.momentum or None,
            "sampling_rate": self.sampling_rate if self.sampling_rate < 1 else None,
            "lr": self.learning_rates,
            "schedule": self.schedule if self.schedule != "optimal" else None,
        }
        return {
            "examples": self.examples,
            "parameters": self.parameters,
            "clip": self.clip,
            "steps": self.steps,
            **self.loss,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def check_length(self) -> None:
        """Refuse an "auto" by which the bound asks for more steps than a page should wait for."""
        if self.steps != "auto":
            return
        known = dict.fromkeys(("kappa", "gamma", "spectrum")) | self.loss
        loss = landscape.describe(
            **known, curve=None, beta=self.momentum or None, step_size=1.0, steps=None
        )
        level, _ = Constants().noise_level(
            self.budget,
            loss,
            examples=self.examples,
            parameters=self.parameters,
            clip=self.clip,
        )
        best = max(loss.best_steps(level))
        if best > MOST_STEPS:
            raise InputError(
                f"a number up to {MOST_STEPS:,} here, since the bound asks for {best:,}",
                name="steps",
                value="auto",
                remedy="`diminuendo plan` on the command line takes more.",
            )

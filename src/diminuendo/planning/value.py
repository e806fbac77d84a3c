"""Plan: what to run and what it costs, as one immutable value."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate, accounting, events
from diminuendo._validate import Vector
from diminuendo.accounting.account import check_rates
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.planning import schema, text

MOST_STEPS = 20_000_000
"""The longest run that is planned: more steps would not fit in memory comfortably."""


class PlanWarning(UserWarning):
    """Something in a plan that is allowed and probably not meant."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What to run and what it costs. Immutable; equal plans have equal digests.

    budget           the privacy budget that the plan was made for
    steps            T, the number of training steps
    sigmas           σ_1…σ_T, the noise multiplier of each step
    sampling_rate    Poisson sampling rate in (0, 1]; 1 is the full batch; one number for all
                     steps, or one for each
    clip             C, the norm to which each example's gradient is clipped (max grad norm)
    examples         N, the divisor of the summed gradients at rate 1
    parameters       D, the number of trained parameters, where it was stated
    schedule         the name of the noise schedule
    momentum         β of the averaged gradient, or None
    alpha            α, the paper's noise level, without unit
    epsilon          the certified ε of the whole plan at budget.delta
    erub             bound on the final excess loss, as a share of the initial one
    erub_uniform     the same for uniform noise in `uniform_steps` steps; with lr="joint", with
                     learning rates planned for it
    noise_ratio      noise left in the final loss over what uniform noise of the same length leaves
    assumptions      whole sentences: what `erub` and the schedule rest on
    lr               η_1…η_T, the learning rates that the noise is planned for, in units of 1/M,
                     or of one over an eigenvalue where a spectrum was given; None: constant
    gain             by how much less final excess loss is expected than with uniform noise at the
                     same learning rates, as a share of the larger of that loss and the initial one.
                     With lr="joint": than with uniform noise and learning rates planned for it
    gain_error       what `gain` may be off by, in the same unit (see `planning.gain`)
    forgetting       by how much a unit of learning rate in later steps lowers the logarithm of what
                     noise leaves: of q_t/η_t², without momentum

    Formal guarantee: running `steps` Gaussian steps with these noise multipliers, clip norm and
    sampling rate is (epsilon, budget.delta)-differentially private for budget.relation, and
    epsilon ≤ budget.epsilon. `erub` and `erub_uniform` are not privacy claims: they hold under
    the `assumptions`.
    """

    budget: Budget
    steps: int
    sigmas: Vector
    sampling_rate: float | Vector
    clip: float
    examples: int
    parameters: int | None
    schedule: str
    momentum: float | None
    alpha: float
    epsilon: float
    erub: float
    erub_uniform: float
    uniform_steps: int
    noise_ratio: float
    assumptions: tuple[str, ...]
    lr: Vector | None = None
    gain: float | None = None
    gain_error: float | None = None
    forgetting: float | None = None

    def __post_init__(self) -> None:
        sigmas = _validate.vector("sigmas", self.sigmas)
        sigmas.setflags(write=False)
        _validate.count("steps", self.steps, at_most=MOST_STEPS)
        _validate.count("examples", self.examples)
        _validate.count("uniform_steps", self.uniform_steps)
        if self.parameters is not None:
            _validate.count("parameters", self.parameters)
        if self.momentum is not None:
            _validate.real("momentum", self.momentum, above=0, below=1)
        for name in ("clip", "alpha", "erub", "erub_uniform", "noise_ratio"):
            _validate.positive(name, getattr(self, name))
        if self.lr is not None:
            rates = _validate.vector("lr", self.lr, positive=False)
            rates.setflags(write=False)
            object.__setattr__(self, "lr", rates)
            if rates.size != self.steps:
                raise InputError(
                    f"steps ({self.steps})", name="the length of lr", value=int(rates.size)
                )
            _validate.positive("max(lr)", float(rates.max()))
        for name in ("gain", "gain_error", "forgetting"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _validate.real(name, getattr(self, name)))
        object.__setattr__(self, "sampling_rate", one_or_each(self.sampling_rate, self.steps))
        _validate.real("epsilon", self.epsilon, at_least=0, at_most=self.budget.epsilon)
        object.__setattr__(self, "sigmas", sigmas)
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        if sigmas.size != self.steps:
            raise InputError(
                f"steps ({self.steps})", name="the length of sigmas", value=int(sigmas.size)
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the plan, as "sha256:" and 64 hexadecimal digits."""
        return schema.digest(schema.content(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def events(self) -> tuple[events.GaussianStep, ...]:
        """What the run releases, in order, with runs of equal steps gathered into one event."""
        return events.from_schedule(self.sigmas, self.rates)

    @property
    def gain_is_negligible(self) -> bool | None:
        """Whether the expected gain is within its own error; None where it is not known."""
        if self.gain is None or self.gain_error is None:
            return None
        return self.gain <= self.gain_error

    @cached_property
    def rates(self) -> Vector:
        """The sampling rate of each step, in (0, 1]."""
        return np.broadcast_to(np.asarray(self.sampling_rate, dtype=np.float64), (self.steps,))

    def epsilon_after(self, step: int) -> float:
        """A certified upper bound on the ε of the first `step` steps, 0 ≤ step ≤ steps."""
        done = _validate.count("step", step, at_least=0, at_most=self.steps)
        if done in (0, self.steps):
            return self.epsilon if done else 0.0
        rate = self.sampling_rate
        return certified_epsilon(
            self.sigmas[:done], self.budget, rate if isinstance(rate, float) else rate[:done]
        )

    def to_json(self) -> str:
        """One JSON object; floats are written so that they read back bit for bit."""
        return json.dumps({**schema.content(self), "digest": self.digest}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the given text") -> Plan:
        """Read a plan, check its schema and digest, and compute its ε again.

        `source` names the file in error messages. Raises InputError where the text is no plan, was
        changed, or states a smaller ε than the accountant finds.
        """
        values = schema.parse(text, {f.name for f in fields(cls)}, source=source)
        recorded = values.pop("digest")
        try:
            plan = cls(**{**values, "budget": Budget(**values["budget"])})
        except (TypeError, KeyError):
            raise InputError(
                "a plan with fields of the right types", name="the plan", value=source
            ) from None
        if plan.digest != recorded:
            raise InputError(
                "unchanged since it was written",
                name="the plan",
                value=source,
                remedy="Its digest does not match its content: plan again.",
            )
        accounted = certified_epsilon(plan.sigmas, plan.budget, plan.sampling_rate)
        if accounted > plan.epsilon * (1 + 1e-9):
            raise InputError(
                f"at least {accounted!r}, as accounted",
                name="epsilon",
                value=plan.epsilon,
                remedy="Plan again with this version.",
            )
        return plan

    def with_noise_scaled(self, factor: float) -> Plan:
        """The same plan with every noise multiplier × factor ≥ 1, and its smaller ε.

        For a budget of which some is spent already. `erub` cannot be split into its parts again,
        so all of it is multiplied by factor², which is an upper bound.
        """
        factor = _validate.real("factor", factor, at_least=1)
        sigmas = self.sigmas * factor
        return replace(
            self,
            sigmas=sigmas,
            epsilon=certified_epsilon(sigmas, self.budget, self.sampling_rate),
            erub=self.erub * factor**2,
            noise_ratio=self.noise_ratio * factor**2,
            gain=None,
            gain_error=None,
            assumptions=(*self.assumptions, f"Every σ was multiplied by {factor:g}."),
        )

    def louder(self, factor: float) -> Plan:
        """Deprecated name of `with_noise_scaled`."""
        warnings.warn(
            "Plan.louder is now Plan.with_noise_scaled; the old name goes in the next version.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.with_noise_scaled(factor)

    def summary(self) -> str:
        """The plan in words, about ten lines of text."""
        return text.summary(self)

    def __str__(self) -> str:
        return self.summary()


def one_or_each(sampling_rate: float | ArrayLike, steps: int | None) -> float | Vector:
    """One rate as a number, or a read-only array of one for each step; equal ones become one."""
    if np.ndim(sampling_rate) == 0:
        return _validate.real("sampling_rate", sampling_rate, above=0, at_most=1)
    size = np.size(sampling_rate) if steps is None else steps
    rates = np.array(check_rates(sampling_rate, size))
    if (rates == rates[0]).all():
        return float(rates[0])
    rates.setflags(write=False)
    return rates


def certified_epsilon(sigmas: Vector, budget: Budget, rate: float | Vector) -> float:
    """An upper bound on the ε of these steps, in the terms of the budget."""
    return accounting.account.releases(sigmas, rate).claim(budget)

"""plan(...): from (ε, δ) and what is publicly known, to the number of steps and σ_1…σ_T."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _files, _validate, accounting, events, schedules
from diminuendo._validate import Vector
from diminuendo.accounting.account import check_rates
from diminuendo.accounting.calibrate import calibrate
from diminuendo.accounting.subsampled import price_curve
from diminuendo.bounds import landscape, noise_level
from diminuendo.budget import Budget
from diminuendo.errors import InputError, SchemaError

SCHEMA = "diminuendo.plan"
VERSION = 1
SCHEDULES = ("optimal", *schedules.shapes.NAMED)
MOST_STEPS = 20_000_000
_ROUNDS = 4
_WORTHWHILE = 1e-3


class PlanWarning(UserWarning):
    """Something in a plan that is allowed and probably not meant."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What to run and what it costs. Immutable; equal plans have equal digests.

    `sampling_rate` is one number for all steps, or one for each.

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
        rate = _rate(self.sampling_rate, self.steps)
        object.__setattr__(self, "sampling_rate", rate)
        _validate.real("epsilon", self.epsilon, at_least=0, at_most=self.budget.epsilon)
        object.__setattr__(self, "sigmas", sigmas)
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        if sigmas.size != self.steps:
            raise InputError(
                f"steps ({self.steps})", name="the length of sigmas", value=int(sigmas.size)
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the plan."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def events(self) -> tuple[events.GaussianStep, ...]:
        """What the run will release, with runs of equal steps gathered."""
        return events.from_schedule(self.sigmas, self.rates)

    @cached_property
    def rates(self) -> Vector:
        """The sampling rate of each step."""
        return np.broadcast_to(np.asarray(self.sampling_rate, dtype=np.float64), (self.steps,))

    def epsilon_after(self, step: int) -> float:
        """A certified upper bound on the ε of the first `step` steps."""
        done = _validate.count("step", step, at_least=0, at_most=self.steps)
        if done in (0, self.steps):
            return self.epsilon if done else 0.0
        rate = self.sampling_rate
        return _account(
            self.sigmas[:done], self.budget, rate if isinstance(rate, float) else rate[:done]
        )

    def _content(self) -> dict[str, Any]:
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content["budget"] = asdict(self.budget)
        content["sigmas"] = self.sigmas.tolist()
        if not isinstance(self.sampling_rate, float):
            content["sampling_rate"] = self.sampling_rate.tolist()
        content["assumptions"] = list(self.assumptions)
        return {"schema": SCHEMA, "version": VERSION, **content}

    def to_json(self) -> str:
        """One JSON object; floats are written so that they read back bit for bit."""
        return json.dumps({**self._content(), "digest": self.digest}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the given text") -> Plan:
        """Read a plan, check its schema and digest, and account its ε anew."""
        if not isinstance(text, str):
            raise InputError("text", name="the plan", value=type(text).__name__)
        data = _files.parse_json(text, name="the plan", source=source)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(
                f'a JSON object with "schema": "{SCHEMA}"',
                name="the plan",
                value=source,
                remedy="`diminuendo plan -o plan.json` writes one.",
            )
        if data.get("version") != VERSION:
            raise SchemaError(
                f"of schema version {VERSION}",
                name="the plan",
                value=data.get("version"),
                remedy="Plan again with this version of diminuendo, or use the version that "
                "wrote it.",
            )
        return cls._from_content(data, source)

    @classmethod
    def _from_content(cls, data: Mapping[str, Any], source: str) -> Plan:
        names = {f.name for f in fields(cls)}
        if set(data) != names | {"schema", "version", "digest"}:
            raise InputError(
                "a plan with exactly its own fields",
                name="the plan",
                value=source,
                remedy=f"Differing: {', '.join(sorted(names ^ set(data)))}.",
            )
        try:
            content = {name: data[name] for name in names}
            plan = cls(**{**content, "budget": Budget(**content["budget"])})
        except (TypeError, KeyError):
            raise InputError(
                "a plan with fields of the right types", name="the plan", value=source
            ) from None
        if plan.digest != data["digest"]:
            raise InputError(
                "unchanged since it was written",
                name="the plan",
                value=source,
                remedy="Its digest does not match its content: plan again.",
            )
        accounted = _account(plan.sigmas, plan.budget, plan.sampling_rate)
        if accounted > plan.epsilon * (1 + 1e-9):
            raise InputError(
                f"at least {accounted!r}, as accounted",
                name="epsilon",
                value=plan.epsilon,
                remedy="Plan again with this version.",
            )
        return plan

    def louder(self, factor: float) -> Plan:
        """The same plan with every σ × factor: for a budget of which some is spent.

        The bound cannot be taken apart again, so it grows by factor² as a whole: from above.
        """
        factor = _validate.real("factor", factor, at_least=1)
        sigmas = self.sigmas * factor
        return replace(
            self,
            sigmas=sigmas,
            epsilon=_account(sigmas, self.budget, self.sampling_rate),
            erub=self.erub * factor**2,
            noise_ratio=self.noise_ratio * factor**2,
            assumptions=(*self.assumptions, f"Every σ was multiplied by {factor:g}."),
        )

    def summary(self) -> str:
        """A page for people."""
        from diminuendo.report.text import plan_summary

        return plan_summary(self)

    def __str__(self) -> str:
        return self.summary()


def plan(
    budget: Budget,
    *,
    examples: int,
    parameters: int | None = None,
    clip: float = 1.0,
    steps: int | Literal["auto"] = "auto",
    kappa: float | None = None,
    gamma: float | None = None,
    spectrum: ArrayLike | None = None,
    influence: ArrayLike | None = None,
    momentum: float | None = None,
    step_size: float = 1.0,
    smoothness: float | None = None,
    gap: float = 1.0,
    alpha: float | None = None,
    schedule: str | Callable[[int], float] | ArrayLike = "optimal",
    fall: float | None = None,
    sampling_rate: float | ArrayLike = 1.0,
) -> Plan:
    """Decide how softly each step may play.

    budget          what may be spent
    examples        N, public; the divisor of the summed gradients
    parameters      D, the number of trained parameters
    clip            C, the norm to which each example's gradient is clipped
    steps           T, or "auto": as many as sampling_rate has numbers, else the T* that minimises
                    the bound
    kappa, gamma, spectrum, influence
                    what is known of the loss, at most one of them: the condition number κ, the
                    convergence rate γ = 1 − 1/κ, the Hessian's eigenvalues, or a measured curve
    momentum        β, where training uses the bias-corrected average
    step_size       the learning rate in units of 1/M
    smoothness, gap public guesses of M and f(θ₁) − f*, one unless given
    alpha           α as such, in place of parameters, smoothness and gap
    schedule        "optimal", a named shape, a function of t, or an array
    fall            σ_T/σ_1 of a named shape; the optimal schedule's unless given
    sampling_rate   Poisson sampling rate, 1 is the full batch; or one rate for each step, with
                    which "optimal" means the lemma's shape, scaled onto the budget

    None of these may be computed from the private data: what is measured there has to be paid for.
    """
    examples = _validate.count("examples", examples)
    clip = _validate.positive("clip", clip)
    if np.ndim(sampling_rate) and isinstance(steps, str) and steps == "auto":
        steps = int(np.size(sampling_rate))
    if parameters is not None:
        parameters = _validate.count("parameters", parameters)
    gap = _validate.positive("gap", gap)
    if smoothness is not None:
        smoothness = _validate.positive("smoothness", smoothness)
    fixed = (
        None
        if isinstance(steps, str) and steps == "auto"
        else _validate.count(
            "steps", steps, at_most=MOST_STEPS, remedy='Give a whole number, or "auto".'
        )
    )
    rate = _rate(sampling_rate, fixed)
    momentum = None if momentum is None else _validate.real("momentum", momentum)
    known = landscape.known(
        kappa=kappa,
        gamma=gamma,
        spectrum=spectrum,
        curve=influence,
        beta=momentum,
        step_size=step_size,
        steps=fixed,
    )
    level, assumed = _level(budget, examples, parameters, clip, smoothness, gap, alpha, spectrum)
    best, best_uniform = known.best_steps(level)
    T, uniform_T = (best, best_uniform) if fixed is None else (fixed, fixed)
    if max(T, uniform_T) > MOST_STEPS:
        raise InputError(
            f"given, since the bound asks for {T:.1e}",
            name="steps",
            value="auto",
            remedy=f"At most {MOST_STEPS:.0e} steps are planned.",
        )
    q = known.influence(T)
    name = schedule if isinstance(schedule, str) else "custom"
    sigmas = _sigmas(schedule, q, budget, rate, fall)
    uniform = _sigmas("uniform", np.ones(uniform_T), budget, rate, None)
    common, own = (rate, 1.0) if isinstance(rate, float) else (1.0, rate)
    per_noise = known.factor * level * budget.R / common**2
    noise = float(np.sum(q * (sigmas / own) ** 2))
    same_length = uniform if uniform_T == T else _sigmas("uniform", q, budget, rate, None)
    result = Plan(
        budget=budget,
        steps=T,
        sigmas=sigmas,
        sampling_rate=rate,
        clip=clip,
        examples=examples,
        parameters=parameters,
        schedule=name,
        momentum=momentum,
        alpha=level,
        epsilon=_account(sigmas, budget, rate),
        erub=known.bias(T)
        + per_noise * float(np.sum(known.bound_influence(T) * (sigmas / own) ** 2)),
        erub_uniform=known.bias(uniform_T)
        + per_noise * float(np.sum(known.bound_influence(uniform_T) * (uniform / own) ** 2)),
        uniform_steps=uniform_T,
        noise_ratio=noise / float(np.sum(q * (same_length / own) ** 2)),
        assumptions=(
            *_relation_words(budget),
            f"Of the loss is known: {known.said}",
            *assumed,
            *_sampling_words(rate),
        ),
    )
    _warn(result, best)
    return result


def _rate(given: float | ArrayLike, steps: int | None) -> float | Vector:
    """One rate as a number, or one for each step as an array; equal ones are one."""
    if np.ndim(given) == 0:
        return _validate.real("sampling_rate", given, above=0, at_most=1)
    rates = np.array(check_rates(given, np.size(given) if steps is None else steps))
    if (rates == rates[0]).all():
        return float(rates[0])
    rates.setflags(write=False)
    return rates


def _level(
    budget: Budget,
    examples: int,
    parameters: int | None,
    clip: float,
    smoothness: float | None,
    gap: float,
    alpha: float | None,
    spectrum: ArrayLike | None,
) -> tuple[float, list[str]]:
    """α, and what had to be assumed for it."""
    if alpha is not None:
        return _validate.positive("alpha", alpha), ["alpha was given as such."]
    if parameters is None:
        raise InputError(
            "given, unless alpha is",
            name="parameters",
            value=None,
            remedy="It is the number of trained parameters.",
        )
    largest = float(np.max(np.asarray(spectrum, dtype=np.float64))) if spectrum is not None else 1.0
    M = largest if smoothness is None else _validate.positive("smoothness", smoothness)
    if spectrum is not None and largest > M:
        raise InputError(f"at least max(spectrum) = {largest:g}", name="smoothness", value=M)
    level = noise_level(
        parameters=parameters, clip=clip, smoothness=M, examples=examples, R=budget.R, gap=gap
    )
    source = (
        "from the spectrum"
        if spectrum is not None and smoothness is None
        else ("a public guess" if smoothness is None else "given")
    )
    return level, [
        f"alpha = {level:.3g} from its parts: smoothness M = {M:g} ({source}), "
        f"gap f(θ₁) − f* = {gap:g} (a public guess unless you know it)."
    ]


def _sigmas(
    schedule: str | Callable[[int], float] | ArrayLike,
    q: Vector,
    budget: Budget,
    rate: float | Vector,
    fall: float | None,
) -> Vector:
    if fall is not None and (not isinstance(schedule, str) or schedule in ("optimal", "uniform")):
        raise InputError(
            "given with a named schedule that falls",
            name="fall",
            value=fall,
            remedy="The optimal schedule falls as the influence decides.",
        )
    if not isinstance(schedule, str):
        return calibrate(schedules.shapes.custom(schedule, q.size), budget, rate)
    _validate.choice("schedule", schedule, SCHEDULES)
    if schedule != "optimal":
        natural = float((q[0] / q[-1]) ** 0.25)
        return calibrate(
            schedules.shapes.falling(schedule, q.size, min(natural, 1.0) if fall is None else fall),
            budget,
            rate,
        )
    return optimal_sigmas(q, budget, rate)


def optimal_sigmas(q: Vector, budget: Budget, sampling_rate: float | Vector) -> Vector:
    """The σ_t that minimise Σ q_t σ_t² within the budget, at the price that sampling gives a step.

    With a rate for each step: the best of uniform noise on the sum, uniform noise on the mean and
    the lemma's shape, since prices are found for one rate at a time. A mean over an expected batch
    of rate_t·N has noise σ_t/rate_t, so Σ q_t (σ_t/rate_t)² is what they are compared by.

    Full batch: the lemma. Subsampled: from the better of uniform noise and the lemma's shape on,
    the price of a step is taken around the current schedule, the best schedule at these prices is
    scaled onto the budget by the certified accountant, and so on until nothing is gained.
    """
    if not isinstance(sampling_rate, float):
        per_mean = q / sampling_rate**2
        shapes = (np.ones_like(q), sampling_rate, schedules.optimal_shape(per_mean))
        scaled = [calibrate(shape, budget, sampling_rate) for shape in shapes]
        return min(scaled, key=lambda sigmas: float(np.sum(per_mean * sigmas**2)))
    if sampling_rate == 1:
        return schedules.optimal(q, budget.R)
    starts = (np.ones_like(q), schedules.optimal_shape(q))
    candidates = [calibrate(shape, budget, sampling_rate) for shape in starts]
    best = min(candidates, key=lambda sigmas: float(np.sum(q * sigmas**2)))
    noise = float(np.sum(q * best**2))
    for _ in range(_ROUNDS):
        try:
            price = price_curve(best, budget.delta, sampling_rate)
            spent = float(np.sum(price(best)))
            shape = schedules.priced(q, price, spent, sigma_range=price.sigma_range)
        except InputError:
            warnings.warn(
                "No price of a step could be found around this schedule: it is the better of "
                "uniform noise and the 1/σ² rule, and may not be the best.",
                PlanWarning,
                stacklevel=5,
            )
            break
        sigmas = calibrate(shape, budget, sampling_rate)
        left = float(np.sum(q * sigmas**2))
        if left < noise:
            best = sigmas
        if left > noise * (1 - _WORTHWHILE):
            break
        noise = left
    return best


def _account(sigmas: Vector, budget: Budget, rate: float | Vector) -> float:
    return accounting.account.releases(sigmas, rate).claim(budget)


def _relation_words(budget: Budget) -> list[str]:
    words = {
        "add-remove": "one example is in the data or zeroed out, and the divisor stays as it is",
        "replace-one": "one example is replaced by any other",
    }
    return [f"Neighbouring data: {words[budget.relation]} ({budget.relation})."]


def _sampling_words(rate: float | Vector) -> list[str]:
    left_out = "the bound leaves out the sampling noise of the gradients themselves."
    if not isinstance(rate, float):
        return [
            f"Every step draws a Poisson sample at its own rate, {rate.min():g} to "
            f"{rate.max():g}, and divides by its own expected size; {left_out}"
        ]
    if rate == 1:
        return []
    return [f"Every step draws a Poisson sample at rate {rate:g}; {left_out}"]


def _warn(result: Plan, best: int) -> None:
    if result.budget.delta > 1 / result.examples:
        warnings.warn(
            f"delta = {result.budget.delta:g} is above 1/examples = {1 / result.examples:g}: it "
            "allows one person's record to be published. Choose it well below.",
            PlanWarning,
            stacklevel=3,
        )
    if result.erub >= 1:
        warnings.warn(
            f"ERUB = {result.erub:.3g} is not below 1: the worst-case bound says nothing here, nor "
            "about the number of steps, which is for you to give (the paper's runs took 50 to "
            "150). The privacy claim and the shape of the schedule do not depend on it.",
            PlanWarning,
            stacklevel=3,
        )
    elif result.steps > 4 * best:
        warnings.warn(
            f"{result.steps} steps are far more than the T* = {best} that the bound prefers: "
            "the early ones are nearly pure noise.",
            PlanWarning,
            stacklevel=3,
        )

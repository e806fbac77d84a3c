"""plan(...): choose the number of steps and the noise multipliers within a budget."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo.bounds import landscape, noise_level
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import InputError
from diminuendo.planning import text
from diminuendo.planning.noise import Schedule, scheduled_sigmas
from diminuendo.planning.value import (
    MOST_STEPS,
    Plan,
    PlanWarning,
    certified_epsilon,
    one_or_each,
)


def plan(
    budget: Budget | tuple[float, float],
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
    schedule: Schedule = "optimal",
    fall: float | None = None,
    sampling_rate: float | ArrayLike = 1.0,
) -> Plan:
    """Choose the number of steps and the noise multiplier of each within a privacy budget.

    budget          what may be spent: a Budget, or the pair (ε, δ)
    examples        N, public; the divisor of the summed gradients
    parameters      D, the number of trained parameters
    clip            C, the norm to which each example's gradient is clipped (max grad norm)
    steps           T, or "auto": as many as sampling_rate has numbers, else the T* that minimises
                    the bound
    kappa, gamma, spectrum, influence
                    what is known about the loss, at most one of them: the condition number κ ≥ 1,
                    the convergence rate γ = 1 − 1/κ in [0, 1), the Hessian's eigenvalues, or a
                    measured influence curve q_1…q_T
    momentum        β in (0, 1), where training uses the bias-corrected average
    step_size       the learning rate in units of 1/M, in (0, 1]
    smoothness, gap public guesses of M and f(θ₁) − f*, one unless stated
    alpha           α itself, in place of parameters, smoothness and gap
    schedule        "optimal", a named shape, a function of t, or an array of T numbers
    fall            σ_T/σ_1 of a named shape, in (0, 1]; the optimal schedule's unless stated
    sampling_rate   Poisson sampling rate in (0, 1], 1 is the full batch; or one rate for each
                    step, with which "optimal" means the lemma's shape, scaled onto the budget

    None of these may be computed from the private data: what is measured there has to be paid for.
    Returns a Plan, whose certified ε is at most the budget's.
    """
    budget = as_budget(budget)
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
    rate = one_or_each(sampling_rate, fixed)
    momentum = None if momentum is None else _validate.real("momentum", momentum)
    loss = landscape.describe(
        kappa=kappa,
        gamma=gamma,
        spectrum=spectrum,
        curve=influence,
        beta=momentum,
        step_size=step_size,
        steps=fixed,
    )
    level, level_sentence = _noise_level(
        budget, examples, parameters, clip, smoothness, gap, alpha, spectrum
    )
    best, best_uniform = loss.best_steps(level)
    T, uniform_T = (best, best_uniform) if fixed is None else (fixed, fixed)
    if max(T, uniform_T) > MOST_STEPS:
        raise InputError(
            f"given, since the bound asks for {T:.1e}",
            name="steps",
            value="auto",
            remedy=f"At most {MOST_STEPS:,} steps are planned.",
        )
    q = loss.influence(T)
    sigmas = scheduled_sigmas(schedule, q, budget, rate, fall)
    uniform = scheduled_sigmas("uniform", np.ones(uniform_T), budget, rate)
    common, own = (rate, 1.0) if isinstance(rate, float) else (1.0, rate)
    per_noise = loss.factor * level * budget.R / common**2
    noise = float(np.sum(q * (sigmas / own) ** 2))
    same_length = uniform if uniform_T == T else scheduled_sigmas("uniform", q, budget, rate)
    result = Plan(
        budget=budget,
        steps=T,
        sigmas=sigmas,
        sampling_rate=rate,
        clip=clip,
        examples=examples,
        parameters=parameters,
        schedule=schedule if isinstance(schedule, str) else "custom",
        momentum=momentum,
        alpha=level,
        epsilon=certified_epsilon(sigmas, budget, rate),
        erub=loss.bias(T)
        + per_noise * float(np.sum(loss.bound_influence(T) * (sigmas / own) ** 2)),
        erub_uniform=loss.bias(uniform_T)
        + per_noise * float(np.sum(loss.bound_influence(uniform_T) * (uniform / own) ** 2)),
        uniform_steps=uniform_T,
        noise_ratio=noise / float(np.sum(q * (same_length / own) ** 2)),
        assumptions=(
            text.relation_sentence(budget),
            loss.description,
            level_sentence,
            *text.sampling_sentences(rate),
        ),
    )
    _warn(result, best, bound_wanted=fixed is None)
    return result


def _noise_level(
    budget: Budget,
    examples: int,
    parameters: int | None,
    clip: float,
    smoothness: float | None,
    gap: float,
    alpha: float | None,
    spectrum: ArrayLike | None,
) -> tuple[float, str]:
    """α, and a sentence about what had to be assumed for it."""
    if alpha is not None:
        return _validate.positive("alpha", alpha), "alpha was stated directly."
    if parameters is None:
        raise InputError(
            "given, unless alpha is",
            name="parameters",
            value=None,
            remedy="It is the number of trained parameters.",
        )
    largest = float(np.max(np.asarray(spectrum, dtype=np.float64))) if spectrum is not None else 1.0
    M = largest if smoothness is None else smoothness
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
    return level, (
        f"alpha = {level:.3g} from its parts: smoothness M = {M:g} ({source}), "
        f"gap f(θ₁) − f* = {gap:g} (a public guess unless you know it)."
    )


def _warn(result: Plan, best: int, *, bound_wanted: bool) -> None:
    """Warn about a δ that protects nobody, a bound that says nothing, and too many steps."""
    if result.budget.delta > 1 / result.examples:
        warnings.warn(
            f"delta = {result.budget.delta:g} is above 1/examples = {1 / result.examples:g}: it "
            "allows one person's record to be published. Choose it well below.",
            PlanWarning,
            stacklevel=3,
        )
    if result.erub >= 1:
        if bound_wanted:
            warnings.warn(
                f"The number of steps, {result.steps}, minimises a worst-case bound (ERUB) that "
                f"is {text.number(result.erub)} here: at 1 or above it says nothing. Give steps "
                "yourself (the paper's runs took 50 to 150). The privacy claim and the shape of "
                "the schedule do not depend on it.",
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

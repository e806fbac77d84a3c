"""plan(...): choose the number of steps and the noise multipliers within a budget."""

from __future__ import annotations

import warnings
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.bounds import landscape, noise_level, runs
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import InputError
from diminuendo.influence.learning_rates import LearningRates
from diminuendo.planning import text
from diminuendo.planning.gain import expected_gain
from diminuendo.planning.joint import joint_learning_rates
from diminuendo.planning.mismatch import forgetting
from diminuendo.planning.noise import Schedule, scheduled_sigmas
from diminuendo.planning.value import (
    MOST_STEPS,
    Plan,
    PlanWarning,
    certified_epsilon,
    one_or_each,
)


class MeasuredSpectrum(Protocol):
    """Eigenvalues of a Hessian and the share of directions that each stands for."""

    @property
    def eigenvalues(self) -> Vector:
        """λ_i; negative ones count as zero."""
        ...

    @property
    def weights(self) -> Vector:
        """Shares of directions, positive."""
        ...


def plan(
    budget: Budget | tuple[float, float],
    *,
    examples: int,
    parameters: int | None = None,
    clip: float = 1.0,
    steps: int | Literal["auto"] = "auto",
    kappa: float | None = None,
    gamma: float | None = None,
    spectrum: ArrayLike | MeasuredSpectrum | None = None,
    influence: ArrayLike | None = None,
    momentum: float | None = None,
    step_size: float = 1.0,
    smoothness: float | None = None,
    gap: float = 1.0,
    alpha: float | None = None,
    schedule: Schedule = "optimal",
    fall: float | None = None,
    sampling_rate: float | ArrayLike = 1.0,
    lr: LearningRates | Literal["joint"] | None = None,
    max_lr: float | None = None,
    gradient_norm: float = 1.0,
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
                    the convergence rate γ = 1 − 1/κ in [0, 1), the Hessian's eigenvalues (or what
                    `influence.spectrum_of` measured), or a measured influence curve q_1…q_T
    momentum        β in (0, 1), where training uses the bias-corrected average
    step_size       the learning rate in units of 1/M, in (0, 1]
    smoothness, gap public guesses of M and f(θ₁) − f*, one unless stated
    alpha           α itself, in place of parameters, smoothness and gap
    schedule        "optimal", a named shape, a function of t, or an array of T numbers
    fall            σ_T/σ_1 of a named shape, in (0, 1]; the optimal schedule's unless stated
    sampling_rate   Poisson sampling rate in (0, 1], 1 is the full batch; or one rate for each
                    step, with which "optimal" means the lemma's shape, scaled onto the budget
    lr              the learning rates η_1…η_T that training will use: an array, a function of
                    t = 1…T or a function from a PyTorch optimizer to its scheduler, in units of
                    one over an eigenvalue with a spectrum and of 1/M otherwise; or "joint": plan
                    them together with the noise, for plain gradient descent
    max_lr          the longest step, in the unit of lr; by default what the stated curvature
                    allows: 2/M for a spectrum and given lr, 1/M for lr="joint" from kappa or gamma
    gradient_norm   for lr="joint" with sampling_rate < 1: the root mean square of the clipped
                    gradients' norms as a share of clip, in [0, 1], a public guess; it decides how
                    much noise sampling itself adds

    None of these may be computed from the private data: what is measured there has to be paid for.
    Returns a Plan, whose certified ε is at most the budget's.
    """
    budget = as_budget(budget)
    examples = _validate.count("examples", examples)
    clip = _validate.positive("clip", clip)
    if isinstance(steps, str) and steps == "auto":
        if np.ndim(sampling_rate):
            steps = int(np.size(sampling_rate))
        elif lr is not None and not isinstance(lr, str) and not callable(lr) and np.ndim(lr):
            steps = int(np.size(lr))
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
    max_lr = None if max_lr is None else _validate.positive("max_lr", max_lr)
    if lr is not None and step_size != 1:
        raise InputError(
            "left out where lr is given", name="step_size", value=step_size, remedy="Give lr alone."
        )
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
        budget, examples, parameters, clip, smoothness, gap, alpha, loss
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
    chosen: list[str] = []
    if isinstance(lr, str):
        _validate.choice("lr", lr, ("joint",))
        if not isinstance(rate, float):
            raise InputError(
                "one number where learning rates are planned together with the noise",
                name="sampling_rate",
                value=f"{rate.size} numbers",
            )
        noise = _sampling_noise(rate, examples, parameters, gradient_norm)
        lr = joint_learning_rates(loss, level, T, budget, rate, noise=noise, max_lr=max_lr)
        chosen = [text.joint_sentence(noise)]
    if lr is not None:
        loss = runs.under_learning_rates(loss, lr, T, max_lr=max_lr)
        uniform_T = T
    q = loss.influence(T)
    uniform = scheduled_sigmas("uniform", np.ones(uniform_T), budget, rate)
    same_length = uniform if uniform_T == T else scheduled_sigmas("uniform", q, budget, rate)
    sigmas = scheduled_sigmas(schedule, q, budget, rate, fall, uniform=same_length)
    common, own = (rate, 1.0) if isinstance(rate, float) else (1.0, rate)
    per_noise = loss.factor * level * budget.R / common**2
    noise_left = float(np.sum(q * (sigmas / own) ** 2))
    rates = loss.learning_rates if isinstance(loss, runs.Run) else None
    gain = expected_gain(loss.bias(T), q, per_noise, sigmas / own, same_length / own, lr=rates)
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
        noise_ratio=noise_left / float(np.sum(q * (same_length / own) ** 2)),
        assumptions=(
            text.relation_sentence(budget),
            loss.description,
            *chosen,
            level_sentence,
            *text.sampling_sentences(rate),
        ),
        lr=rates,
        gain=gain.gain,
        gain_error=gain.error,
        forgetting=forgetting(q, rates),
    )
    _warn(result, T if lr is not None else best, bound_wanted=fixed is None)
    return result


def _sampling_noise(
    rate: float, examples: int, parameters: int | None, gradient_norm: float
) -> float:
    """The variance that sampling adds to each coordinate of the sum, in units of clip²."""
    norm = _validate.real("gradient_norm", gradient_norm, at_least=0, at_most=1)
    if rate == 1:
        return 0.0
    if parameters is None:
        raise InputError(
            'given where lr="joint" and batches are sampled',
            name="parameters",
            value=None,
            remedy="The noise of sampling is divided among them.",
        )
    return (1 - rate) * rate * examples * norm**2 / parameters


def _noise_level(
    budget: Budget,
    examples: int,
    parameters: int | None,
    clip: float,
    smoothness: float | None,
    gap: float,
    alpha: float | None,
    loss: landscape.Landscape,
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
    measured = isinstance(loss, landscape.Quadratic)
    largest = float(loss.eigenvalues.max()) if isinstance(loss, landscape.Quadratic) else 1.0
    M = largest if smoothness is None else smoothness
    if measured and largest > M:
        raise InputError(f"at least max(spectrum) = {largest:g}", name="smoothness", value=M)
    level = noise_level(
        parameters=parameters, clip=clip, smoothness=M, examples=examples, R=budget.R, gap=gap
    )
    source = (
        "from the spectrum"
        if measured and smoothness is None
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

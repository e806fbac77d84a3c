"""plan(...): choose the number of steps and the noise multipliers within a budget."""

from __future__ import annotations

import math
import warnings
from typing import Literal, Protocol, Unpack

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.bounds import landscape, runs
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import InputError
from diminuendo.influence.learning_rates import LearningRates, check_name
from diminuendo.planning import text
from diminuendo.planning.constants import Constants, Guesses
from diminuendo.planning.gain import Ends, expected_gain
from diminuendo.planning.joint import Together, joint_learning_rates
from diminuendo.planning.mismatch import forgetting_of
from diminuendo.planning.noise import Schedule, noticed, scheduled_sigmas
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
    epochs: float | None = None,
    kappa: float | None = None,
    gamma: float | None = None,
    spectrum: ArrayLike | MeasuredSpectrum | None = None,
    influence: ArrayLike | None = None,
    momentum: float | None = None,
    schedule: Schedule = "optimal",
    fall: float | None = None,
    sampling_rate: float | ArrayLike = 1.0,
    lr: LearningRates | Literal["joint"] | None = None,
    **guesses: Unpack[Guesses],
) -> Plan:
    """Choose the number of steps and the noise multiplier of each within a privacy budget.

    budget          what may be spent: a Budget, or the pair (ε, δ)
    examples        N, public; the divisor of the summed gradients
    parameters      D, the number of trained parameters
    clip            C, the norm to which each example's gradient is clipped (max grad norm)
    steps           T, or "auto": as many as sampling_rate or lr has numbers, else the T* that
                    minimises the bound
    epochs          in place of steps: how often each example takes part on average. Full batches
                    take that many steps, a sampling rate p takes epochs/p, rounded up
    kappa, gamma, spectrum, influence
                    what is known about the loss, at most one of them: the condition number κ ≥ 1,
                    the convergence rate γ = 1 − 1/κ in [0, 1), the Hessian's eigenvalues (or what
                    `influence.spectrum_of` measured), or a measured influence curve q_1…q_T
    momentum        β in (0, 1), where training uses the bias-corrected average
    schedule        "optimal", a named shape, a function of t, or an array of T numbers
    fall            σ_T/σ_1 of a named shape, in (0, 1]; the optimal schedule's unless stated
    sampling_rate   Poisson sampling rate in (0, 1], 1 is the full batch; or one rate for each step
    lr              the learning rates η_1…η_T that training will use: an array, "constant",
                    "linear" or "cosine" (from 1 towards 0), a function of t = 1…T or a function
                    from a PyTorch optimizer to its scheduler, in units of one over an eigenvalue
                    with a spectrum and of 1/M otherwise; with an influence curve those, in any
                    unit, that it was measured with. Or "joint": plan them together with the noise,
                    which is then optimal or uniform, for plain gradient descent

    Public guesses, each of which has a default:

    smoothness, gap M and f(θ₁) − f*, one unless stated
    alpha           α itself, in place of parameters, smoothness and gap
    step_size       a constant learning rate in units of 1/M, in (0, 1]
    max_lr          the longest step, in the unit of lr; by default what the stated curvature
                    allows: 2/M for a spectrum and given lr, 1/M for lr="joint" from kappa or gamma
    gradient_norm   for lr="joint" with sampling_rate < 1: the root mean square of the clipped
                    gradients' norms as a share of clip, in [0, 1]; it decides how much noise
                    sampling itself adds

    None of these may be computed from the private data: what is measured there has to be paid for.
    Returns a Plan, whose certified ε is at most the budget's.
    """
    budget, constants = as_budget(budget), Constants.of(guesses)
    examples, clip = _validate.count("examples", examples), _validate.positive("clip", clip)
    if parameters is not None:
        parameters = _validate.count("parameters", parameters)
    if isinstance(lr, str):
        check_name(lr, also=("joint",))
    if epochs is not None:
        steps = steps_of(epochs, steps, sampling_rate)
    fixed = _fixed_steps(steps, sampling_rate, lr)
    rate = one_or_each(sampling_rate, fixed)
    momentum = None if momentum is None else _validate.real("momentum", momentum)
    if lr is not None and constants.step_size != 1:
        raise InputError(
            "left out where lr is given",
            name="step_size",
            value=constants.step_size,
            remedy="Give lr alone.",
        )
    loss = landscape.describe(
        kappa=kappa,
        gamma=gamma,
        spectrum=spectrum,
        curve=influence,
        beta=momentum,
        step_size=constants.step_size,
        steps=fixed,
    )
    level, level_sentence = constants.noise_level(
        budget, loss, examples=examples, parameters=parameters, clip=clip
    )
    T, uniform_T = _most(loss.best_steps(level)) if fixed is None else (fixed, fixed)
    preferred = T if fixed is None or lr is not None else loss.best_steps(level)[0]
    chosen: list[str] = []
    together: Together | None = None
    sampled = 0.0
    if isinstance(lr, str) and lr == "joint":
        one_rate = _one_rate(rate)
        sampled = constants.sampling_noise(one_rate, examples=examples, parameters=parameters)
        together = joint_learning_rates(
            loss,
            level,
            T,
            budget,
            one_rate,
            schedule=schedule,
            noise=sampled,
            max_lr=constants.max_lr,
        )
        lr = together.lr
        chosen = [text.joint_sentence(sampled)]
    known = beside = loss
    if lr is not None:
        loss = beside = runs.under_learning_rates(known, lr, T, max_lr=constants.max_lr)
        if together is not None:
            beside = runs.under_learning_rates(
                known, together.lr_uniform, T, max_lr=constants.max_lr
            )
        uniform_T = T
    q = to_plan = loss.influence(T)
    rates = loss.learning_rates if isinstance(loss, runs.Run) else None
    if rates is not None and (noticed(rates) != rates).any():
        felt = runs.under_learning_rates(known, noticed(rates), T, max_lr=constants.max_lr)
        to_plan = felt.influence(T)
    uniform = scheduled_sigmas("uniform", np.ones(uniform_T), budget, rate)
    same_length = uniform if uniform_T == T else scheduled_sigmas("uniform", q, budget, rate)
    sigmas = scheduled_sigmas(schedule, to_plan, budget, rate, fall, uniform=same_length)
    common, own = (rate, 1.0) if isinstance(rate, float) else (1.0, rate)
    per_noise = loss.factor * level * budget.R / common**2

    def bound(run: landscape.Landscape, noise: Vector) -> float:
        weights = run.bound_influence(noise.size)
        return run.bias(noise.size) + per_noise * float(np.sum(weights * (noise / own) ** 2))

    planned = Ends(loss.bias(T), q, rates, (sigmas / own) ** 2 + sampled)
    even = planned._replace(variances=(same_length / own) ** 2 + sampled)
    if together is not None:
        planned = planned._replace(bias=together.bias)
        even = even._replace(
            bias=together.bias_uniform, influence=beside.influence(T), lr=together.lr_uniform
        )
    gain = expected_gain(planned, even, per_noise)
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
        erub=bound(loss, sigmas),
        erub_uniform=bound(beside, uniform),
        uniform_steps=uniform_T,
        noise_ratio=float(np.sum(q * (sigmas / own) ** 2) / np.sum(q * (same_length / own) ** 2)),
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
        forgetting=forgetting_of(known, q, rates),
    )
    _warn(result, preferred, bound_wanted=fixed is None)
    return result


def steps_of(epochs: float, steps: int | str | None, sampling_rate: float | ArrayLike) -> int:
    """How many steps go through the examples so often, on average."""
    if steps not in ("auto", None) or np.ndim(sampling_rate):
        raise InputError(
            "left out where steps, or a rate for each step, say how many there are",
            name="epochs",
            value=epochs,
        )
    rate = _validate.real("sampling_rate", sampling_rate, above=0, at_most=1)
    # a hair less, since 1/rate is rounded: 0.1 makes ten steps of an epoch, not eleven
    return math.ceil(_validate.positive("epochs", epochs) / rate * (1 - 1e-12))


def _fixed_steps(
    steps: int | str, sampling_rate: float | ArrayLike, lr: LearningRates | str | None
) -> int | None:
    """T where it is stated, by itself or by the length of a list; None where the bound decides."""
    if isinstance(steps, str) and steps == "auto":
        if np.ndim(sampling_rate):
            return _validate.vector("sampling_rate", sampling_rate).size
        if lr is None or isinstance(lr, str) or callable(lr) or not np.ndim(lr):
            return None
        return _validate.vector("lr", lr, positive=False).size
    return _validate.count(
        "steps", steps, at_most=MOST_STEPS, remedy='Give a whole number, or "auto".'
    )


def _most(steps: tuple[int, int]) -> tuple[int, int]:
    """The numbers of steps, refused where they are too many to plan."""
    if max(steps) > MOST_STEPS:
        raise InputError(
            f"given, since the bound asks for {text.number(steps[0])}",
            name="steps",
            value="auto",
            remedy=f"At most {MOST_STEPS:,} steps are planned.",
        )
    return steps


def _one_rate(rate: float | Vector) -> float:
    """The sampling rate of a plan that chooses its learning rates."""
    if not isinstance(rate, float):
        raise InputError(
            "one number where learning rates are planned together with the noise",
            name="sampling_rate",
            value=f"{rate.size} numbers",
        )
    return rate


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

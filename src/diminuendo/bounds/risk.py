"""Stochastic gradients and unseen data: what they add to the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

from diminuendo import _validate
from diminuendo.errors import InputError


def psgd_batch_size(*, examples: int, R: float) -> int:
    """n = max(N√R, 1), rounded up, and at most N (the print lets it pass N for R > 1)."""
    examples, R = _validate.count("examples", examples), _validate.positive("R", R)
    return min(examples, max(1, math.ceil(examples * math.sqrt(R))))


def psgd_sampling_term(
    *,
    parameters: int,
    strong_convexity: float,
    examples: int,
    R: float,
    gap: float,
    beta: float | None = None,
    gamma: float | None = None,
) -> float:
    """α_g = D/(2μN²·min(R, 1)(f(θ₁)−f*)): ERUB grows by at most α_g σ_g², for every T.

    σ_g is the deviation of one example's gradient, and the batch size is `psgd_batch_size`: where
    that is held at N, R > 1 saves nothing (the print divides by R all the same).

    Theorem "utility bounds of PSGD". With momentum `beta` and the momentum theorem's rate `gamma`
    the print says "likewise"; there the term is α_g times twice the largest value of
    (1−γ)Σ_{t≤T} γ^{T−t}(1−β)(1+β^t)/((1−β^t)(1+β)) over T, which tends to 2(1−β)/(1+β)·α_g and is
    above α_g for β < 1/3.
    """
    term = _validate.count("parameters", parameters) / (
        2
        * _validate.positive("strong_convexity", strong_convexity)
        * _validate.count("examples", examples) ** 2
        * min(_validate.positive("R", R), 1.0)
        * _validate.positive("gap", gap)
    )
    if beta is None:
        return term
    beta = _validate.real("beta", beta, above=0, below=1)
    if gamma is None:
        raise InputError(
            "given together with beta",
            name="gamma",
            value=None,
            remedy="It is the rate of the momentum theorem, 1 − η₀/(2κ).",
        )
    return term * 2 * _largest_average(beta, _validate.real("gamma", gamma, above=0, below=1))


def _largest_average(beta: float, gamma: float) -> float:
    """The largest moving average, with memory γ, of the noise variance of the gradient average.

    The variance falls with t, so the moving average rises until it meets it and falls from then
    on; it ends at the variance's limit.
    """
    average, t = 0.0, 0
    while True:
        t += 1
        power = beta**t
        variance = (1 - beta) * (1 + power) / ((1 - power) * (1 + beta))
        if variance <= average or power < 1e-16:
            return max(average, (1 - beta) / (1 + beta))
        average = gamma * average + (1 - gamma) * variance


def true_risk_in_probability(
    excess_risk: Callable[[float], float],
    *,
    R: float,
    lipschitz: float,
    strong_convexity: float,
    examples: int,
    failure: float,
) -> float:
    """√(2G²/(μN))·√(2·EER(R/k)) + 8G²/(pμN), with probability 1−p; k = ⌈log₂(2/p)⌉ repetitions.

    `excess_risk` gives EER as a function of the budget. Each repetition has R/k and by Markov's
    inequality exceeds twice its expectation with probability at most ½, so the best of them fails
    with probability p/2; the other p/2 is for the draw of the data. The print leaves out Markov's
    factor two and gives p to both events. Choosing the best repetition on private data costs
    privacy that this does not count.
    """
    failure = _validate.real("failure", failure, above=0, below=1)
    strong_convexity = _validate.positive("strong_convexity", strong_convexity)
    ratio = _validate.positive("lipschitz", lipschitz) ** 2 / strong_convexity
    examples = _validate.count("examples", examples)
    repetitions = math.ceil(math.log2(2 / failure))
    risk = 2 * excess_risk(_validate.positive("R", R) / repetitions)
    return math.sqrt(2 * ratio / examples * risk) + 8 * ratio / (failure * examples)


def true_risk_by_stability(
    excess_risk: float, *, lipschitz: float, step_size: float, steps: int, examples: int
) -> float:
    """EER + 2G²ηT/N, for convex losses and η < 2/M.

    One replaced example moves each mean gradient by at most 2G/N, and gradient steps do not expand
    distances, so the parameters differ by 2GηT/N at the end and a loss by G times that. The print
    has G²ηT/N, which is for an example that is left out.
    """
    return _validate.real("excess_risk", excess_risk, at_least=0) + 2 * _validate.positive(
        "lipschitz", lipschitz
    ) ** 2 * _validate.positive("step_size", step_size) * _validate.count(
        "steps", steps
    ) / _validate.count("examples", examples)

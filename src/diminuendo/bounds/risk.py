"""Stochastic gradients and unseen data: what they add to the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

from diminuendo import _validate


def psgd_batch_size(*, examples: int, R: float) -> int:
    """n = max(N√R, 1), rounded up, and at most N (the print lets it pass N for R > 1)."""
    examples, R = _validate.count("examples", examples), _validate.positive("R", R)
    return min(examples, max(1, math.ceil(examples * math.sqrt(R))))


def psgd_sampling_term(
    *, parameters: int, strong_convexity: float, examples: int, R: float, gap: float
) -> float:
    """α_g = D/(2μN²R(f(θ₁)−f*)): ERUB grows by α_g σ_g² when batches have gradient noise σ_g.

    Theorem "utility bounds of PSGD", at the batch size of `psgd_batch_size`; likewise with
    momentum.
    """
    return _validate.count("parameters", parameters) / (
        2
        * _validate.positive("strong_convexity", strong_convexity)
        * _validate.count("examples", examples) ** 2
        * _validate.positive("R", R)
        * _validate.positive("gap", gap)
    )


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

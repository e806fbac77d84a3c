"""Releases for convex losses that are one training run each: the model alone is seen.

All are for the regularised mean loss of multinomial logistic regression,

    F(θ) = (1/N) Σ_i ℓ_i(θ) + (Λ/2)‖θ‖²,

with features of norm at most B. An example's gradient x ⊗ (p − y) has norm at most L = √2·B, its
Hessian is at most B²/2 and has trace at most (1 − 1/K)B² and rank at most K − 1. The features'
norm is bounded example by example before anything is trained, so no gradient is clipped.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from diminuendo.budget import Budget, gaussian_epsilon
from diminuendo.compare.models import Linear
from diminuendo.compare.private import Private
from diminuendo.errors import InputError

_MOST_ITERATIONS = 20_000
_LARGEST_EPSILON = 500.0


def lipschitz(private: Private) -> float:
    """L = √2·B."""
    if not isinstance(private.model, Linear):
        raise InputError("the linear one", name="the model", value=type(private.model).__name__)
    return math.sqrt(2) * private.facts.largest_norm


def smoothness(private: Private, ridge: float) -> float:
    """The largest curvature of F: B²/2 + Λ."""
    return private.facts.largest_norm**2 / 2 + ridge


def output_perturbation(private: Private, ridge: float, tolerance: float = 0.01) -> Tensor:
    """F's minimiser plus Gaussian noise.

    Without one example the minimiser moves by at most L/(NΛ) (strong convexity). The solver stops
    at a gradient of norm τ = tolerance·L/N, so each solution is within τ/Λ of the minimiser, and
    the sensitivity is (1 + 2·tolerance)·L/(NΛ).
    """
    per_example = lipschitz(private) / private.facts.examples
    sigma = whole_budget(private)
    theta = minimise(private, ridge, tolerance * per_example)
    return private.noised(theta, (1 + 2 * tolerance) * per_example / ridge, sigma).float()


def bolt_on(private: Private, ridge: float, passes: int, batch: int) -> Tensor:
    """Some passes of gradient descent over batches in a fixed order, then noise (Wu et al. 2017).

    The steps η_t = min(1/β, 1/(Λt)) contract by 1 − η_tΛ, and the one step of each pass that holds
    the example moves by at most η_t·L/batch: `bolt_on_sensitivity` adds that up.
    """
    sigma = whole_budget(private)
    rates = _bolt_on_rates(private, ridge, passes, batch)
    theta = private.start()
    batches = private.facts.examples // batch
    for t, rate in enumerate(rates):
        part = slice((t % batches) * batch, (t % batches + 1) * batch)
        gradient = private.mean_gradient(theta, part) + ridge * theta
        theta = theta - rate * gradient
    bound = bolt_on_sensitivity(rates, batches, ridge, lipschitz(private) / batch)
    return private.noised(theta, bound, sigma)


def _bolt_on_rates(private: Private, ridge: float, passes: int, batch: int) -> list[float]:
    steps = passes * (private.facts.examples // batch)
    longest = 1 / smoothness(private, ridge)
    return [min(longest, 1 / (ridge * t)) for t in range(1, steps + 1)]


def bolt_on_sensitivity(rates: list[float], batches: int, ridge: float, per_step: float) -> float:
    """How far one example can move the last iterate, at the worst of its places in the order."""
    worst = np.zeros(batches)
    for t, rate in enumerate(rates):
        worst *= 1 - rate * ridge
        worst[t % batches] += rate * per_step
    return float(worst.max()) * (1 + 1e-12)


def last_iterate(private: Private, ridge: float, steps: int) -> Tensor:
    """Noisy gradient descent of which the last iterate alone is released.

    θ ← θ − η(∇F(θ) + σ(L/N)z), η = 1/β, contracts by c = 1 − ηΛ, and the last iterate is μ-GDP with
    μ = √((1 − c^T)(1 + c)/((1 + c^T)(1 − c)))/σ (Bok, Su and Altschuler 2024): for constant noise,
    a smooth strongly convex loss, and no clipping.
    """
    per_example = lipschitz(private) / private.facts.examples
    rate = 1 / smoothness(private, ridge)
    whole = whole_budget(private)
    sigma = whole * last_iterate_factor(1 - rate * ridge, steps)
    theta = private.start()
    for _ in range(steps):
        gradient = private.mean_gradient(theta) + ridge * theta
        theta = theta - rate * private.noised(gradient, per_example, sigma, seen=False)
    return theta


def last_iterate_factor(contraction: float, steps: int) -> float:
    """By how much the last iterate leaks more than one step: √((1−c^T)(1+c)/((1+c^T)(1−c)))."""
    power = contraction**steps
    leak = (1 - power) * (1 + contraction) / ((1 + power) * (1 - contraction))
    return math.sqrt(leak) * (1 + 1e-12)


def objective_perturbation(private: Private, ridge: float) -> Tensor:
    """The minimiser of N·F(θ) + ⟨b, θ⟩ with Gaussian b; see `objective_delta` for the proof.

    The solver is inexact, which the original analysis does not cover: what is released is the
    approximate minimiser plus a little noise, under which it is within (ε_a, δ_a) of the exact one.
    """
    examples, budget = private.facts.examples, private.budget
    bound, spare = lipschitz(private), Spare.of(budget)
    multiplier = objective_multiplier(
        spare.budget, examples * ridge, private.facts.largest_norm, private.facts.classes
    )
    whole_budget(private)
    slope = private.noised(torch.zeros_like(private.start()), bound, multiplier, seen=False)
    tolerance = 1e-8 * bound  # so that the noise that hides the solver's error is negligible
    theta = minimise(private, ridge, tolerance, slope / examples)
    distance = tolerance / ridge
    return private.noised(theta, distance, 1 / spare.mu, seen=False).float()


class Spare:
    """What is kept of a budget for the solver's inexactness: μ = 1e-3 between the exact and the
    approximate release, on both sides, so ε = ε₁ + 2ε_a, δ = e^{ε_a}δ₁ + (1 + e^{ε_a + ε₁})δ_a."""

    mu = 1e-3

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    @classmethod
    def of(cls, budget: Budget) -> Spare:
        """What is left for the exact mechanism; InputError where ε is too large to be split."""
        if budget.epsilon > _LARGEST_EPSILON:
            raise InputError(
                f"at most {_LARGEST_EPSILON:g} for objective perturbation",
                name="epsilon",
                value=budget.epsilon,
            )
        small = budget.delta / (100 * (2 + math.exp(budget.epsilon)))
        epsilon = gaussian_epsilon(cls.mu, small) * (1 + 1e-9)
        left = budget.epsilon - 2 * epsilon
        delta = (budget.delta - (1 + math.exp(epsilon + left)) * small) * math.exp(-epsilon)
        return cls(Budget(epsilon=left, delta=delta))


def objective_delta(
    epsilon: float, multiplier: float, ridge: float, largest_norm: float, classes: int
) -> float:
    """An upper bound on δ at ε of the exact minimiser of Σℓ_i + (ridge/2)‖θ‖² + ⟨b, θ⟩,
    b ~ N(0, (multiplier·L)²).

    θ and b determine each other, so densities at θ with and without one example differ by the
    density of b, which moves by the example's gradient x ⊗ r, and by a determinant. The gradient's
    product with b is at most L·‖bᵀx̂‖, a χ variable of K − 1 degrees (r sums to zero); that replaces
    the constant of the original proof, which took the gradient for independent of b. The
    determinants' ratio is at most (1 + B²(1 − 1/K)/((K−1)·ridge))^{K−1}, by the Hessian's rank and
    trace. So the privacy loss is at most U = ln(ratio) + m·χ + m²/2, m = 1/multiplier, and
    δ(ε) ≤ E(1 − e^{ε−U})₊, integrated from above.
    """
    m, free = 1 / multiplier, classes - 1
    trace = largest_norm**2 * (1 - 1 / classes)
    shift = free * math.log1p(trace / (free * ridge)) + m * m / 2
    start = max((epsilon - shift) / m, 0.0)
    edges = start + np.linspace(0.0, 12.0 + math.sqrt(free), 4001)
    tails = stats.chi.sf(edges, free)
    upper = -np.expm1(np.minimum(epsilon - shift - m * edges[1:], 0.0))
    cells = upper * (tails[:-1] - tails[1:])
    return min(float(cells.sum() + tails[-1]) * (1 + 1e-9) + 1e-18, 1.0)


def objective_multiplier(budget: Budget, ridge: float, largest_norm: float, classes: int) -> float:
    """The least noise multiplier of `objective_delta` within the budget; InputError if none is."""
    low, high = math.log(1e-2), math.log(1e6)

    def fits(log: float) -> bool:
        delta = objective_delta(budget.epsilon, math.exp(log), ridge, largest_norm, classes)
        return delta <= budget.delta

    if not fits(high):
        raise InputError(
            "large enough for the budget",
            name="the regularisation",
            value=ridge,
            remedy="The determinant alone costs more than ε.",
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return math.exp(high)


def minimise(
    private: Private, ridge: float, tolerance: float, slope: Tensor | None = None
) -> Tensor:
    """A point where the gradient of F (plus ⟨slope, θ⟩) has norm at most `tolerance`, for each
    replica: Nesterov's method in double precision. Not private: for releases alone."""
    largest = smoothness(private, ridge)
    pull = (math.sqrt(largest) - math.sqrt(ridge)) / (math.sqrt(largest) + math.sqrt(ridge))
    theta = private.start().double()
    ahead = theta
    for _ in range(_MOST_ITERATIONS):
        gradient = private.mean_gradient(ahead) + ridge * ahead
        if slope is not None:
            gradient = gradient + slope
        if float(gradient.norm(dim=1).max()) <= tolerance:
            return ahead
        following = ahead - gradient / largest
        ahead = following + pull * (following - theta)
        theta = following
    raise InputError(
        "large enough for the solver",
        name="the regularisation",
        value=ridge,
        remedy=f"No minimum was found in {_MOST_ITERATIONS} iterations.",
    )


def whole_budget(private: Private) -> float:
    """Charge everything at once; the noise multiplier of one Gaussian release that costs it."""
    sigma = (1 + 1e-9) / math.sqrt(private.budget.R)
    private.pay(sigma)
    return sigma

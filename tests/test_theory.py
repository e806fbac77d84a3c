"""The theorems, checked by simulation: private gradient descent on quadratics, batched in numpy.

f(θ) = ½ Σ λ_i θ_i², gradients with Gaussian noise of deviation C·σ_t/N on each coordinate. A mean
over `REPEATS` runs is compared at 4.5 standard errors: a false alarm in about 1 of 150,000 tests.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

import diminuendo as dim
from diminuendo import bounds, influence, schedules
from diminuendo._validate import Vector

REPEATS = 4000
Z = 4.5

CLIP, EXAMPLES, R = 1.0, 60, 0.5134


class Mean(NamedTuple):
    value: float
    margin: float


def mean(samples: Vector) -> Mean:
    return Mean(float(samples.mean()), Z * float(samples.std()) / math.sqrt(samples.size))


def excess_risk(
    eigenvalues: Vector,
    start: Vector,
    sigmas: Vector,
    *,
    rate: float,
    beta: float = 0.0,
    batch: int = EXAMPLES,
    gradient_noise: float = 0.0,
    seed: int = 0,
) -> Vector:
    """f(θ_{T+1}) of `REPEATS` private runs; β > 0 takes the bias-corrected average."""
    rng = np.random.default_rng(seed)
    theta = np.tile(start, (REPEATS, 1))
    average = np.zeros_like(theta)
    for t, sigma in enumerate(sigmas, start=1):
        deviation = math.hypot(CLIP * sigma, gradient_noise) / batch
        gradient = eigenvalues * theta + deviation * rng.standard_normal(theta.shape)
        average = beta * average + (1 - beta) * gradient
        theta -= rate * average / (1 - beta**t)
    return np.asarray(0.5 * np.sum(eigenvalues * theta**2, axis=1))


SPECTRA = {
    "spread": np.linspace(0.1, 1.0, 10),
    "two": np.array([0.05] * 5 + [1.0] * 5),
    "steep": np.array([0.2] + [4.0] * 9),
}


class Problem(NamedTuple):
    eigenvalues: Vector
    start: Vector
    M: float
    kappa: float
    gap: float
    alpha: float


def problem(name: str) -> Problem:
    eigenvalues = SPECTRA[name]
    start = np.full(eigenvalues.size, 0.7)
    M, gap = float(eigenvalues.max()), 0.5 * float(np.sum(eigenvalues * start**2))
    alpha = bounds.noise_level(
        parameters=eigenvalues.size, clip=CLIP, smoothness=M, examples=EXAMPLES, R=R, gap=gap
    )
    return Problem(eigenvalues, start, M, M / float(eigenvalues.min()), gap, alpha)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [1.0, 0.4])
def test_gradient_descent_stays_under_its_bound(name: str, dynamic: bool, size: float) -> None:
    p = problem(name)
    gamma = 1 - 1 / p.kappa
    rate = 1 - (1 - gamma) * size * (2 - size)
    for steps in (1, 10, 40):
        q = influence.gradient_descent(gamma=gamma, steps=steps, step_size=size)
        sigmas = schedules.optimal(q, R) if dynamic else schedules.uniform(steps, R)
        erub = rate**steps + p.alpha * R * bounds.weighted_noise(q, sigmas)
        risk = mean(excess_risk(p.eigenvalues, p.start, sigmas, rate=size / p.M))
        assert risk.value - risk.margin <= erub * p.gap


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("size", [1.0, 0.5])
@pytest.mark.parametrize("shape", ["optimal", "uniform", "rising"])
def test_spectral_formula_is_exact(name: str, size: float, shape: str) -> None:
    p, steps = problem(name), 25
    q = influence.spectrum(p.eigenvalues, steps=steps, step_size=size)
    sigmas = {
        "optimal": schedules.optimal(q, R),
        "uniform": schedules.uniform(steps, R),
        "rising": schedules.onto_budget(np.arange(1, steps + 1), R),
    }[shape]
    shrink = (1 - size * p.eigenvalues / p.M) ** (2 * steps)
    bias = 0.5 * float(np.sum(p.eigenvalues * p.start**2 * shrink))
    predicted = bias + p.alpha * R * bounds.weighted_noise(q, sigmas) * p.gap
    risk = mean(excess_risk(p.eigenvalues, p.start, sigmas, rate=size / p.M, seed=1))
    assert abs(risk.value - predicted) <= risk.margin
    assert bounds.quadratic(
        p.eigenvalues, influence=q, sigmas=sigmas, alpha=p.alpha, R=R, step_size=size
    ) * p.gap >= predicted * (1 - 1e-12)


def test_optimal_beats_uniform_by_the_predicted_factor() -> None:
    """Started at the optimum, what is left is noise: (Σ√q)²/(TΣq) of what uniform leaves."""
    eigenvalues, steps = SPECTRA["spread"], 60
    q = influence.spectrum(eigenvalues, steps=steps)
    best, uniform = schedules.optimal(q, R), schedules.uniform(steps, R)
    runs = [
        mean(excess_risk(eigenvalues, np.zeros(10), sigmas, rate=1.0, seed=seed))
        for seed, sigmas in enumerate((best, uniform))
    ]
    predicted = np.sum(np.sqrt(q)) ** 2 / (steps * np.sum(q))
    ratio = runs[0].value / runs[1].value
    spread = runs[0].margin / runs[0].value + runs[1].margin / runs[1].value
    assert predicted < 0.65
    assert ratio == pytest.approx(predicted, rel=spread)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("schedule", ["uniform", "optimal", "two-phase"])
def test_momentum_stays_under_its_bound(name: str, beta: float, schedule: str) -> None:
    p = problem(name)
    eta0 = bounds.admissible_step(beta=beta, kappa=p.kappa)
    gamma = 1 - eta0 / (2 * p.kappa)
    for steps in (1, 15, 60):
        q = influence.momentum(gamma=gamma, beta=beta, steps=steps)
        relaxed = influence.momentum_two_phase(gamma=gamma, beta=beta, steps=steps)
        sigmas = {
            "uniform": schedules.uniform(steps, R),
            "optimal": schedules.optimal(q, R),
            "two-phase": schedules.optimal(relaxed, R),
        }[schedule]
        erub = gamma**steps + eta0 * p.alpha * R * bounds.weighted_noise(q, sigmas)
        risk = mean(excess_risk(p.eigenvalues, p.start, sigmas, rate=eta0 / (2 * p.M), beta=beta))
        assert risk.value - risk.margin <= erub * p.gap


def test_momentum_theorem_as_printed_fails() -> None:
    """Without noise, κ = 1, β → 0, η₀ = ½: a step leaves (3/4)² of the risk, the print says ½."""
    eta0, beta, steps = 0.5, 1e-9, 12
    theta, average = 1.0, 0.0
    for t in range(1, steps + 1):
        average = beta * average + (1 - beta) * theta
        theta -= eta0 / 2 * average / (1 - beta**t)
    remaining = theta**2
    assert eta0 <= 8 / (math.sqrt(1 + 64 * beta) + 1)
    assert remaining > (1 - eta0) ** steps
    assert bounds.zeta(eta0=eta0, beta=beta, gamma=1 - eta0 / 2) >= 0
    assert remaining <= (1 - eta0 / 2) ** steps


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_stochastic_gradients_stay_under_their_bound(beta: float) -> None:
    p, steps, sigma_g = problem("spread"), 30, 3.0
    batch = bounds.psgd_batch_size(examples=EXAMPLES, R=R)
    R_prime = R * (EXAMPLES / batch) ** 2
    mu = p.M / p.kappa
    alpha_g = bounds.psgd_sampling_term(
        parameters=10, strong_convexity=mu, examples=EXAMPLES, R=R, gap=p.gap
    )
    if beta:
        factor = bounds.admissible_step(beta=beta, kappa=p.kappa)
        rate = factor / (2 * p.M)
        gamma = 1 - factor / (2 * p.kappa)
        q = influence.momentum(gamma=gamma, beta=beta, steps=steps)
    else:
        factor, rate, gamma = 1.0, 1 / p.M, 1 - 1 / p.kappa
        q = influence.gradient_descent(gamma=gamma, steps=steps)
    sigmas = schedules.optimal(q, R_prime)
    erub = (
        gamma**steps
        + 2 * alpha_g * sigma_g**2
        + factor * p.alpha * R_prime * bounds.weighted_noise(q, sigmas)
    )
    risk = mean(
        excess_risk(
            p.eigenvalues,
            p.start,
            sigmas,
            rate=rate,
            beta=beta,
            batch=batch,
            gradient_noise=sigma_g,
        )
    )
    assert risk.value - risk.margin <= erub * p.gap


def true_risks(steps: int, sigmas: Vector, rate: float, examples: int, seed: int) -> Vector:
    """½‖θ−x‖² on points ±e_i of the unit ball; the true optimum is the origin."""
    rng = np.random.default_rng(seed)
    axes = rng.integers(0, 5, (REPEATS, examples))
    signs = rng.choice([-1.0, 1.0], (REPEATS, examples))
    centre = np.stack([np.where(axes == i, signs, 0).mean(axis=1) for i in range(5)], axis=1)
    theta = np.zeros((REPEATS, 5))
    for t in range(steps):
        noise = 2 * sigmas[t] / examples * rng.standard_normal(theta.shape)
        theta -= rate * (theta - centre + noise)
    return np.asarray(0.5 * np.sum(theta**2, axis=1))


def test_true_risk_bounds_hold() -> None:
    """Losses are 1-smooth and 1-strongly convex, and 2-Lipschitz on the ball that runs stay in."""
    steps, rate, examples, failure = 8, 0.5, 400, 0.1
    sigmas = schedules.uniform(steps, 1.0)
    risks = true_risks(steps, sigmas, rate, examples, seed=3)

    def excess(R: float) -> float:
        noise = np.sum((1 - rate) ** (2 * np.arange(steps)))
        bias = (1 - rate) ** (2 * steps) * 0.5 / examples
        return float(bias + 0.5 * 5 * rate**2 * noise * (2 / examples) ** 2 * steps / R)

    stable = bounds.true_risk_by_stability(
        excess(1.0), lipschitz=2, step_size=rate, steps=steps, examples=examples
    )
    likely = bounds.true_risk_in_probability(
        excess, R=1.0, lipschitz=2, strong_convexity=1, examples=examples, failure=failure
    )
    average = mean(risks)
    assert average.value - average.margin <= stable
    assert (risks > likely).mean() <= failure


def test_paper_numbers() -> None:
    assert (
        pytest.approx(0.39270, abs=1e-5) == dim.Budget(epsilon=4, delta=1e-8, conversion="zcdp").R
    )
    assert dim.Budget(epsilon=4, delta=1e-8, conversion="zcdp").rho == pytest.approx(
        0.19635, abs=1e-5
    )

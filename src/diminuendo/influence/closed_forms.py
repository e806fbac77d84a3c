"""Influences that the theorems give: gradient descent, momentum, and a plain exponential."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from scipy.linalg import solve_banded

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.influence.floor import FLOOR
from diminuendo.influence.learning_rates import LearningRates, learning_rates
from diminuendo.influence.spectral import KINDS, MomentumKind, longest_stable, response


def _check_gamma(gamma: float) -> float:
    return _validate.real(
        "gamma", gamma, at_least=0, below=1, remedy="gamma = 1 − 1/kappa is the convergence rate."
    )


def _check_beta(beta: float) -> float:
    return _validate.real("beta", beta, at_least=0, below=1, remedy="0.9 is usual.")


def _powers(base: float, exponents: Vector) -> Vector:
    """base**exponents, held at FLOOR."""
    if base == 0:
        return np.where(exponents == 0, 1.0, FLOOR)
    lowest = math.log(FLOOR)
    return np.asarray(np.exp(np.maximum(exponents * math.log(base), lowest)))


Real = TypeVar("Real", float, Vector)


def contraction(gamma: float, step_size: Real) -> Real:
    """The rate 1 − 2μη(1 − Mη/2) of gradient descent at η = step_size/M, from γ = 1 − μ/M."""
    return 1 - (1 - gamma) * step_size * (2 - step_size)


def gradient_descent(
    *,
    gamma: float,
    steps: int,
    step_size: float = 1.0,
    lr: LearningRates | None = None,
) -> Vector:
    """q_t = s_t² Π_{u>t} γ_u with γ_u = 1 − (1−γ)s_u(2−s_u), for steps of length η_t = s_t/M.

    Theorem "excess loss" (gradient descent under the PL condition), its proof before η = 1/M is
    put in: a step of length s/M contracts by γ_s and lets noise in with (Mη)² = s². The paper's
    s = 1 gives q_t = γ^{T−t}.

    gamma       convergence rate at s = 1, in [0, 1)
    steps       T
    step_size   one s for all steps, in (0, 1]
    lr          s_1…s_T in units of 1/M, each at most 2, in place of step_size; see
                `learning_rates` for what it may be

    Returns q_1…q_T, positive, without unit.
    """
    gamma, steps = _check_gamma(gamma), _validate.count("steps", steps)
    if lr is not None:
        rates = learning_rates(lr, steps, limit=2.0)
        return _under_learning_rates(rates**2, contraction(gamma, rates))
    size = _validate.real(
        "step_size", step_size, above=0, at_most=1, remedy="It is counted in units of 1/M."
    )
    return size**2 * _powers(float(contraction(gamma, size)), np.arange(steps - 1, -1, -1.0))


def _under_learning_rates(own: Vector, contractions: Vector) -> Vector:
    """own_t times the product of the later steps' contractions, held at FLOOR."""
    with np.errstate(divide="ignore"):
        logs = np.cumsum(np.log(contractions[:0:-1]))[::-1]
        log_q = np.log(own) + np.append(logs, 0.0)
    return np.asarray(np.exp(np.maximum(log_q, math.log(FLOOR))))


def exponential(*, rate: float, steps: int) -> Vector:
    """q_t = e^{−rate·(T−t)}; a negative rate gives an influence that falls."""
    rate, steps = _validate.real("rate", rate), _validate.count("steps", steps)
    exponents = -rate * np.arange(steps - 1, -1, -1.0)
    return np.asarray(np.exp(np.maximum(exponents - max(exponents[0], 0.0), math.log(FLOOR))))


def averaging_weights(beta: float, steps: int) -> Vector:
    """(1−β)/(1−β^t) for t = 1…T: the weight of the newest gradient in the corrected average."""
    t = np.arange(1, steps + 1.0)
    if beta == 0:
        return np.ones(steps)
    return np.asarray((1 - beta) / -np.expm1(t * math.log(beta)))


def momentum(
    *,
    gamma: float,
    beta: float,
    steps: int,
    lr: LearningRates | None = None,
    kind: MomentumKind = "average",
) -> Vector:
    """q_i = Σ_{t≥i} γ^{T−t} ((1−β)/(1−β^t))² β^{2(t−i)}: the coefficients of σ_i² in U₃, exactly.

    Theorem "convergence under PL condition" (momentum). Solved in O(T) from the recursion
    q_i = γ^{T−i} w_i² + β² q_{i+1}, an upper bidiagonal system. The theorem counts the noise of
    each average as fresh. `influence.spectrum(momentum=…)` is exact on a quadratic instead, for
    this average, heavy ball and Nesterov's momentum.

    gamma   convergence rate, in [0, 1)
    beta    β, in [0, 1)
    lr      l_1…l_T, learning rates relative to the one that γ belongs to, in (0, 1/(1−γ)]: step t
            then contracts by 1 − (1−γ)l_t and its average arrives with l_t² (a choice, not part of
            the theorem, which knows a constant learning rate only)
    kind    "average" is the theorem's. "heavy-ball" and "nesterov" (PyTorch's) are those of a
            quadratic on which plain steps of length 1/M converge at the rate γ; lr is then in
            units of 1/M, 1 unless given

    Returns q_1…q_T, positive, without unit.
    """
    gamma, beta = _check_gamma(gamma), _check_beta(beta)
    steps = _validate.count("steps", steps)
    if _validate.choice("kind", kind, KINDS) != "average":
        memory = None if beta == 0 else beta
        limit = longest_stable(memory, kind)
        rates = learning_rates(1.0 if lr is None else lr, steps, limit=limit)
        curvature = np.array([1 - math.sqrt(gamma)])
        return response(curvature, rates, momentum=memory, kind=kind).influence
    if lr is None:
        own = _powers(gamma, np.arange(steps - 1, -1, -1.0))
    else:
        rates = learning_rates(lr, steps, limit=1 / (1 - gamma))
        own = _under_learning_rates(rates**2, 1 - (1 - gamma) * rates)
    own = own * averaging_weights(beta, steps) ** 2
    if beta == 0 or steps == 1:
        return own
    bands = np.empty((2, steps))
    bands[0], bands[1] = -(beta**2), 1.0
    solution = solve_banded((0, 1), bands, own, overwrite_ab=True, check_finite=False)
    return np.maximum(np.asarray(solution, dtype=np.float64), FLOOR)


def momentum_split(*, gamma: float, beta: float) -> int:
    """T̂ = max t with γ^{t−1} ≥ (1−β)/(1−β^t): the last step at which averaging dampens noise.

    γ^{t−1}(1−β^t) rises and then falls in t and starts at 1−β, so the set is an interval [1, T̂],
    found by doubling and bisection.
    """
    gamma = _validate.real("gamma", gamma, above=0, below=1)
    beta = _validate.real("beta", beta, above=0, below=1)

    def inside(t: int) -> bool:
        return (t - 1) * math.log(gamma) + math.log(-math.expm1(t * math.log(beta))) >= math.log1p(
            -beta
        )

    peak = math.log1p(math.log(beta) / math.log(gamma)) / -math.log(beta)
    low = max(1, math.floor(peak))
    while low > 1 and not inside(low):
        low -= 1
    high = 2 * low
    while inside(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if inside(middle) else (low, middle)
    return low


def momentum_two_phase(*, gamma: float, beta: float, steps: int) -> Vector:
    """The paper's relaxation of `momentum`, split at T̂: never below the exact influence.

    Proof of the theorem "dynamic schedule" (momentum): 2γ^{T+t}/(γ(γ−β²)) up to T̂, and
    γ^{2(T̂−1)}(γ^{T+1−t} − β^{2(T+1−t)})/(γ−β²) beyond; for T ≤ T̂ it is γ^{T+t−2}/(1−γβ²)
    throughout. The print writes the split as indicators in T and a c₂ that is too small.
    """
    gamma = _validate.real("gamma", gamma, above=0, below=1)
    beta = _validate.real("beta", beta, above=0, below=1)
    steps = _validate.count("steps", steps)
    if beta >= gamma:
        raise InputError(
            f"below gamma={gamma:g}",
            name="beta",
            value=beta,
            remedy="The relaxation needs beta < gamma; the exact influence.momentum does not.",
        )
    split = momentum_split(gamma=gamma, beta=beta)
    t = np.arange(1, steps + 1.0)
    if steps <= split:
        return _powers(gamma, steps + t - 2) / (1 - gamma * beta**2)
    early = 2 * _powers(gamma, steps + t - 1) / (gamma - beta**2)
    left = steps + 1 - t
    late = gamma ** (2 * (split - 1)) / (gamma - beta**2) * _powers(gamma, left)
    late *= -np.expm1(left * (2 * math.log(beta) - math.log(gamma)))
    return np.maximum(np.where(t <= split, early, late), FLOOR)

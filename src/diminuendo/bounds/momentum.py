"""ERUB of the bias-corrected average (momentum), with its proof's constants put right.

The printed proof writes −⟨b∇, v⟩ as ‖b∇−v‖² − ‖b∇‖² − ‖v‖², which is twice too much. With the
missing ½ everything goes through at γ = 1 − η₀/(2κ) instead of 1 − η₀/κ, noise factor η₀ instead
of 2η₀, and ζ = 1 − η₀/2 − βγη₀²/((γ−β)²(1−β)³). As printed the bound fails: at β → 0, κ = 1,
η₀ = ½ and no noise, the excess risk falls by (3/4)² a step, and the print promises ½.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.influence import momentum


def zeta(*, eta0: float, beta: float, gamma: float) -> float:
    """ζ, the factor of the momentum effect; the bound holds where it is at least 0."""
    return 1 - eta0 / 2 - _drift(beta, gamma) * eta0**2


def _drift(beta: float, gamma: float) -> float:
    return beta * gamma / ((gamma - beta) ** 2 * (1 - beta) ** 3)


def admissible_step_at(*, beta: float, gamma: float) -> float:
    """The largest η₀ with ζ ≥ 0 at a given γ: 4/(1 + √(1 + 16βγ(γ−β)⁻²(1−β)⁻³))."""
    beta = _validate.real("beta", beta, above=0, below=1)
    gamma = _validate.real("gamma", gamma, above=0, below=1)
    if beta >= gamma:
        raise InputError(
            f"below gamma={gamma:g}",
            name="beta",
            value=beta,
            remedy="The theorem's sums converge only for beta < gamma.",
        )
    return _largest_step(beta, gamma)


def _largest_step(beta: float, gamma: float) -> float:
    return 4 / (1 + math.sqrt(1 + 16 * _drift(beta, gamma)))


def admissible_step(*, beta: float, kappa: float) -> float:
    """The largest η₀ that the theorem admits for this κ, solved together with γ = 1 − η₀/(2κ).

    A larger η₀ makes γ smaller and the admissible bound tighter, so the two meet exactly once.
    """
    beta = _validate.real("beta", beta, above=0, below=1)
    kappa = _validate.real("kappa", kappa, at_least=1)
    highest = min(2.0, 2 * kappa * (1 - beta)) * (1 - 1e-12)

    def slack(eta0: float) -> float:
        return _largest_step(beta, 1 - eta0 / (2 * kappa)) - eta0

    return float(brentq(slack, 1e-300, highest, xtol=1e-300, rtol=1e-14))


def momentum_uniform(*, gamma: float, beta: float, eta0: float, alpha: float, steps: int) -> float:
    """γ^T + η₀αT·Σq_t: the bound at σ_t² = T/R."""
    q = momentum(gamma=gamma, beta=beta, steps=steps)
    return float(gamma**steps + eta0 * alpha * steps * np.sum(q))


def momentum_dynamic(*, gamma: float, beta: float, eta0: float, alpha: float, steps: int) -> float:
    """γ^T + η₀α(Σ√q_t)²: the bound at the lemma's schedule."""
    q = momentum(gamma=gamma, beta=beta, steps=steps)
    return float(gamma**steps + eta0 * alpha * np.sum(np.sqrt(q)) ** 2)

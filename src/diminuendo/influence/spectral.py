"""The influence on a quadratic, exact from its Hessian's eigenvalues."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.influence.floor import FLOOR
from diminuendo.influence.learning_rates import LearningRates, learning_rates

MomentumKind = Literal["average", "heavy-ball", "nesterov"]
KINDS: tuple[MomentumKind, ...] = ("average", "heavy-ball", "nesterov")
"""The bias-corrected average, and PyTorch's SGD(momentum=β) without and with nesterov=True."""

_BLOCK = 1 << 22


class Response(NamedTuple):
    """What noise and the starting point leave in the final loss of a quadratic.

    influence   q_1…q_T: Σ_i share_i (λ_i/M)(M ∂θ_T/∂noise_t)², without unit
    residual    ∂θ_T/∂θ_1 for each eigenvalue, without unit
    """

    influence: Vector
    residual: Vector


def spectrum(
    eigenvalues: ArrayLike,
    *,
    steps: int,
    weights: ArrayLike | None = None,
    step_size: float = 1.0,
    lr: LearningRates | None = None,
    momentum: float | None = None,
    kind: MomentumKind = "average",
    max_lr: float | None = None,
) -> Vector:
    """q_t = s_t²·mean_i (λ_i/M) Π_{u>t}(1 − s_u λ_i/M)², M = max λ_i, s_t = η_t M.

    Exact for a quadratic: noise of variance v on each coordinate in step t adds
    ½ Σ_i λ_i η_t² Π_{u>t}(1−η_uλ_i)²·v to the final loss.

    eigenvalues   λ_i ≥ 0 of the Hessian
    steps         T
    weights       turn the mean into a weighted one, for a spectrum stated as a density
    step_size     a constant learning rate in units of 1/M, in (0, 2)
    lr            η_1…η_T in units of 1/λ, in place of step_size (see `learning_rates`); at most
                  2/M, with Nesterov's momentum 2(1+β)/(1+2β)/M, or max_lr where that is given
    momentum      β in (0, 1), with `kind` "average" (bias-corrected), "heavy-ball" or "nesterov"

    Returns q_1…q_T, positive, without unit.
    """
    values = _validate.vector("eigenvalues", eigenvalues, positive=False)
    steps = _validate.count("steps", steps)
    size = _validate.real("step_size", step_size, above=0, below=2, remedy="In units of 1/M.")
    largest = _validate.positive(
        "max(eigenvalues)", float(values.max()), remedy="A flat loss has no influence to plan with."
    )
    shares = np.ones_like(values) if weights is None else _validate.vector("weights", weights)
    _validate.same_length("weights", shares, "eigenvalues", values)
    if lr is None and momentum is None:
        return _constant(values / largest, shares / shares.sum(), steps, size)
    limit = longest_stable(momentum, kind) / largest
    if max_lr is not None:
        limit = _validate.positive("max_lr", max_lr)
    rates = learning_rates(size / largest if lr is None else lr, steps, limit=limit)
    return response(values, rates, weights=shares, momentum=momentum, kind=kind).influence


def longest_stable(momentum: float | None, kind: MomentumKind) -> float:
    """The longest step, in units of 1/M: the others' momentum allows what plain descent does."""
    if momentum is None or kind != "nesterov":
        return 2.0
    beta = _validate.real("momentum", momentum, above=0, below=1, remedy="0.9 is usual.")
    return 2 * (1 + beta) / (1 + 2 * beta)


def response(
    eigenvalues: Vector,
    lr: Vector,
    *,
    weights: Vector | None = None,
    momentum: float | None = None,
    kind: MomentumKind = "average",
) -> Response:
    """Influence and residuals of T steps with learning rates lr (units of 1/λ) on a quadratic."""
    largest = float(eigenvalues.max())
    scaled, rates = eigenvalues / largest, lr * largest
    shares = np.full(scaled.size, 1.0) if weights is None else weights
    shares = shares / shares.sum()
    if momentum is None:
        found = _plain(scaled, shares, rates)
    else:
        beta = _validate.real("momentum", momentum, above=0, below=1, remedy="0.9 is usual.")
        _validate.choice("kind", kind, KINDS)
        found = _with_momentum(scaled, shares, rates, beta, kind)
    return Response(np.maximum(found.influence, FLOOR), found.residual)


def _constant(scaled: Vector, shares: Vector, steps: int, size: float) -> Vector:
    """One matrix product: with B ≈ √T, the power 2(jB + r) splits into two factors."""
    block = math.isqrt(steps - 1) + 1
    squared = (1 - size * scaled) ** 2
    within = squared[:, None] ** np.arange(block)
    between = (squared**block)[:, None] ** np.arange(-(-steps // block))
    mass = size**2 * shares * scaled
    ages = np.asarray((between * mass[:, None]).T @ within).ravel()[:steps]
    return np.asarray(np.maximum(ages[::-1], FLOOR))


def _plain(scaled: Vector, shares: Vector, rates: Vector) -> Response:
    """Products over the later steps, for a few eigenvalues at a time."""
    total, residual = np.zeros(rates.size), np.empty(scaled.size)
    size = max(1, _BLOCK // rates.size)
    with np.errstate(under="ignore"):
        for start in range(0, scaled.size, size):
            part = slice(start, start + size)
            factors = 1 - rates[::-1, None] * scaled[part]
            later = np.multiply.accumulate(factors, axis=0)
            residual[part] = later[-1]
            later[1:] = later[:-1]
            later[0] = 1.0
            total += (later**2 @ (shares[part] * scaled[part]))[::-1]
    return Response(rates**2 * total, residual)


def _with_momentum(
    scaled: Vector, shares: Vector, rates: Vector, beta: float, kind: MomentumKind
) -> Response:
    """Backwards through the run: by how much noise in each gradient moves the final parameters.

    `later` is ∂θ_T/∂θ after the step, `held` ∂θ_T/∂(momentum buffer) after it.
    """
    mass = shares * scaled
    later, held = np.ones_like(scaled), np.zeros_like(scaled)
    result = np.empty(rates.size)
    for t in range(rates.size, 0, -1):
        eta = rates[t - 1]
        if kind == "average":
            held = beta * held - eta / -math.expm1(t * math.log(beta)) * later
            gradient = (1 - beta) * held
        elif kind == "heavy-ball":
            held = beta * held - eta * later
            gradient = held
        else:
            held = beta * (held - eta * later)
            gradient = held - eta * later
        result[t - 1] = float(mass @ gradient**2)
        later = later + scaled * gradient
    return Response(result, later)

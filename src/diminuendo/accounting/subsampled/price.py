"""What one more subsampled step costs, beside the steps that are there: the true price curve.

δ depends on a schedule only through the product of the steps' transforms. Around a given schedule
one more step of noise multiplier σ raises δ(ε) by

    1/(2π) ∫ e^{−sε} Ψ(s) (ψ_σ(s) − 1) / (s(s+1)) du,

Ψ being the schedule's transform and ψ_σ the step's: a function of σ, the same for every place in
the schedule. To first order a schedule may exchange steps at these prices, so they are what a
planner needs. They steer; what is claimed for the result comes from the certified bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.bounds import distinct
from diminuendo.accounting.subsampled.composition import Kernel, combine, compose
from diminuendo.accounting.subsampled.estimate import Estimate, choose_settings
from diminuendo.accounting.subsampled.solve import TAIL_SHARE
from diminuendo.accounting.subsampled.transform import outcome_range, tilted_transforms
from diminuendo.errors import InputError

_SPACING = 0.1
_WIDTH = 1e-3
_NODES = 80


@dataclass(frozen=True)
class PriceCurve:
    """price(σ) over a range of σ in which it is positive, decreasing and convex in σ²."""

    sigma_range: tuple[float, float]
    _log_price: CubicSpline

    def __call__(self, sigmas: Vector) -> Vector:
        return np.asarray(np.exp(self._log_price(np.log(sigmas))))


def price_curve(sigmas: Vector, delta: float, rate: float) -> PriceCurve:
    """The price of a step at `rate` around a schedule whose every step has that rate."""
    values, counts = np.unique(sigmas, return_counts=True)
    at = np.exp(np.linspace(math.log(0.5 * values[0]), math.log(20 * values[-1]), _NODES))
    rates = np.full(values.size, rate)
    prices = marginal_prices(values, rates, counts.astype(np.float64), delta, at=at, rate=rate)
    if not (np.isfinite(prices).all() and (prices > 0).all()):
        raise InputError("low enough that one more step has a price", name="delta", value=delta)
    log_price = CubicSpline(np.log(at), np.log(prices))
    with np.errstate(invalid="ignore"):
        marginal = np.log(prices) - 2 * np.log(at) + np.log(-log_price(np.log(at), 1))
    rising = np.flatnonzero(~(np.diff(marginal) < 0))
    lowest = at[rising.max() + 1] if rising.size else at[0]
    return PriceCurve((float(lowest) * (1 + 1e-9), float(at[-1]) * (1 - 1e-9)), log_price)


def marginal_prices(
    sigmas: Vector, rates: Vector, counts: Vector, delta: float, *, at: Vector, rate: float
) -> Vector:
    """By what share of δ one more step at each σ of `at` raises δ(ε), ε being the schedule's."""
    mixture = distinct(sigmas, rates, counts).mixture(_SPACING, upper=True)
    log_tail = math.log(delta) + math.log(TAIL_SHARE / mixture.total_weight)
    bounds = outcome_range(mixture.mu, mixture.rate, log_tail)
    estimate = Estimate(mixture, bounds, remove=True)
    tilt = estimate.tilt_for_delta(math.log(delta))
    epsilon = max(estimate.epsilon(tilt), 0.0)
    settings, _, _ = choose_settings(
        estimate,
        estimate.log_psi,
        tilt,
        epsilon,
        0.5 * epsilon,
        math.log(delta),
        0.0,
        _WIDTH * max(epsilon, _WIDTH),
    )
    kernel = Kernel(settings, mixture.gaussian_variance)

    def transforms(mu: Vector, rate: Vector) -> tuple[Vector, NDArray[np.complex128]]:
        span = outcome_range(mu, rate, log_tail)
        made = tilted_transforms(
            mu, rate, span, settings.tilt, kernel.du, settings.size, remove=True
        )
        return made.log_mass, made.phi

    log_mass, phi = transforms(mixture.mu, mixture.rate)
    _, share = combine(mixture, log_mass)
    weights = kernel.upper * compose(mixture, phi, share) * np.exp(-1j * epsilon * kernel.u)
    step_mass, step_phi = transforms(1 / at, np.full(at.size, rate))
    rises = np.exp(step_mass)[:, None] * step_phi - 1
    return np.asarray((rises @ weights).real / np.sum(weights.real))

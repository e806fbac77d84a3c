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
_NODES = 100
_LARGEST_SIGMA = 1e5


@dataclass(frozen=True)
class PriceCurve:
    """price(σ), tabulated up to `_edge`; beyond it, proportional to e^{1/σ²} − 1."""

    sigma_range: tuple[float, float]
    _log_price: CubicSpline
    _edge: float

    def __call__(self, sigmas: Vector) -> Vector:
        inner = self._log_price(np.log(np.minimum(sigmas, self._edge)))
        beyond = np.maximum(sigmas, self._edge)
        decay = np.expm1(beyond**-2.0) / math.expm1(self._edge**-2.0)
        return np.asarray(np.exp(inner) * decay)


def price_curve(sigmas: Vector, delta: float, rate: float) -> PriceCurve:
    """The price of a step at `rate` around a schedule whose every step has that rate."""
    values, counts = np.unique(sigmas, return_counts=True)
    low, edge = max(0.4 * values[0], 0.06), max(20.0, 2 * values[0])
    at = np.exp(np.linspace(math.log(low), math.log(edge), _NODES))
    rates = np.full(values.size, rate)
    prices = marginal_prices(values, rates, counts.astype(np.float64), delta, at=at, rate=rate)
    usable = np.isfinite(prices) & (prices > 0)
    if not usable[_NODES // 2 :].all():
        raise InputError("low enough that one more step has a price", name="delta", value=delta)
    first = int(np.flatnonzero(~usable).max()) + 1 if not usable.all() else 0
    log_price = CubicSpline(np.log(at[first:]), np.log(prices[first:]))
    return PriceCurve((float(at[first]), _LARGEST_SIGMA), log_price, float(edge))


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

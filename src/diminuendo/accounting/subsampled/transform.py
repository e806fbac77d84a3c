"""Characteristic functions of truncated, exponentially tilted privacy losses.

For a step (mu, p) let y = mu z - mu^2/2 with z standard normal and L(y) = log(1 - p + p e^y).
Removing a record: the loss is L under the density e^L phi(z).  Adding one: -L under phi(z).
Outcomes outside a range of z are removed (``outcome_range``); the caller accounts for them.

With tilt lam the transform is  int e^{(a + i s u) L} phi(z) dz,  a = 1 + lam, s = 1 (remove) or
a = -lam, s = -1 (add).  It is computed by Gauss-Legendre panels whose error is bounded by
analyticity: if |f| <= M on the Bernstein ellipse with parameter rho of a panel of half-width r,
the n-point rule errs by at most 8 r M rho^(1-2n) / (rho - 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri_exp

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.closed_form import EPS
from diminuendo.accounting.subsampled.nodes import IntArray

ComplexArray = NDArray[np.complex128]
Range = tuple[Vector, Vector]

POINTS = 32
PANEL_LOG_ERROR = -39.0
NEGLIGIBLE_LOG = -46.0
EMPTY_LOG = -1e5
MAX_PANELS = 1 << 14
_CHUNK = 4096
_ONE_THREAD = 1 << 16
"""Multiplications that a product may have so that BLAS does it on one thread."""
_ABSCISSA, _WEIGHT = np.polynomial.legendre.leggauss(POINTS)
_RHO = np.array([1.6, 2.0, 2.5, 3.2, 4.2, 6.0]).reshape(-1, 1)
_LOG_SQRT_2PI = 0.5 * float(np.log(2.0 * np.pi))


@dataclass(frozen=True)
class Transforms:
    """Per node: log of the tilted mass, normalised transform at k*du, relative error bound."""

    log_mass: Vector
    phi: ComplexArray
    error: Vector


def loss(y: Vector, rate: Vector) -> Vector:
    """log(1 - p + p e^y) without overflow and with small relative error near y = 0."""
    small = np.log1p(rate * np.expm1(np.minimum(y, 30.0)))
    large = np.log(rate) + y + np.log1p((1.0 - rate) / rate * np.exp(-np.maximum(y, 30.0)))
    return np.where(y > 30.0, large, small)


def outcome_range(mu: Vector, rate: Vector, log_tail: float) -> Range:
    """Range of z outside which each step has probability at most exp(log_tail).

    Below: Phi(low) <= tail/2 in both directions.  Above: Phi(-high) and p Phi(mu - high) are
    both at most tail/4.  In terms of the loss the range widens with mu and with the rate, which
    extrapolation needs in order to stay non-negative.
    """
    edge = max(1.0, -float(ndtri_exp(log_tail - np.log(4.0))) + 1e-6)
    sampled = -ndtri_exp(np.minimum(log_tail - np.log(4.0 * rate), -1.0)) + 1e-6
    return np.full(mu.shape, -edge), np.maximum(edge, mu + np.maximum(sampled, 0.0))


def outcome_probability(mu: Vector, rate: Vector, bounds: Range) -> Vector:
    """Bound, in both directions, on the probability of outcomes outside a range."""
    low, high = bounds
    return np.asarray((ndtr(low) + ndtr(-high) + rate * ndtr(mu - high)) * (1.0 + 1e-12))


def unamplified(eps: float, rate: Vector) -> Vector:
    """log(1 + (e^eps - 1)/rate) without overflow: the Gaussian loss behind a subsampled one."""
    if eps > 30.0:
        return np.asarray(eps - np.log(rate) + np.log1p((rate - 1.0) * np.exp(-eps)))
    return np.asarray(np.log1p(np.expm1(eps) / rate))


def split_range(mu: Vector, rate: Vector, bounds: Range, level: float) -> tuple[Range, Range]:
    """Divide a range at the outcome whose loss is ``level`` (the same loss for all nodes)."""
    low, high = bounds
    y = unamplified(level, rate)
    middle = np.clip(y / mu + 0.5 * mu, low, high)
    return (low, middle), (middle, high)


def coarse_grid(
    mu: Vector, rate: Vector, bounds: Range, points: int = 320
) -> tuple[Vector, Vector]:
    """Losses and log phi(z) dz on a plain uniform grid: for estimates, not for bounds."""
    low, high = (end[:, None] for end in bounds)
    z = low + (high - low) * (np.arange(points) + 0.5) / points
    log_weight = -0.5 * z * z - _LOG_SQRT_2PI + np.log(np.maximum(high - low, 1e-300) / points)
    return loss(mu[:, None] * (z - 0.5 * mu[:, None]), rate[:, None]), log_weight


def tilted_transforms(
    mu: Vector,
    rate: Vector,
    bounds: Range,
    lam: float,
    du: float,
    size: int,
    *,
    remove: bool,
) -> Transforms:
    """Transforms of all nodes at the frequencies 0, du, ..., (size - 1) du."""
    power = 1.0 + lam if remove else -lam
    sign = 1.0 if remove else -1.0
    top = du * max(size - 1, 0)
    estimate = _log_mass_estimate(mu, rate, bounds, power)
    owner, centre, radius, skipped = _panels(mu, rate, bounds, power, top, estimate)
    quadrature = _panel_log_error(mu[owner], rate[owner], power, top, centre, radius)
    first = np.searchsorted(owner, np.arange(mu.size + 1))
    log_mass = np.empty(mu.size)
    error = np.empty(mu.size)
    phi = np.empty((mu.size, size), dtype=np.complex128)
    for node in range(mu.size):
        part = slice(first[node], first[node + 1])
        if first[node] == first[node + 1]:
            log_mass[node], error[node], phi[node] = EMPTY_LOG, 0.0, 0.0
            continue
        z = (centre[part, None] + radius[part, None] * _ABSCISSA).ravel()
        panel_weight = (radius[part, None] * _WEIGHT).ravel()
        value = loss(mu[node] * (z - 0.5 * mu[node]), rate[node : node + 1])
        exponent = power * value - 0.5 * z * z
        peak = float(exponent.max())
        weight = panel_weight * np.exp(exponent - peak)
        mass = float(weight.sum())
        log_mass[node] = peak + np.log(mass) - _LOG_SQRT_2PI
        keep = weight > 1e-21 * mass
        weight, value = weight[keep] / mass, value[keep]
        phi[node] = _fourier_sums(weight, sign * du * value, size)
        spread = np.abs(exponent[keep]) + abs(power) * np.abs(value) + z[keep] ** 2
        rounding = z.size + 256.0 + 32.0 * float(weight @ (spread + top * np.abs(value)))
        relative = np.exp(np.minimum(quadrature[part] - log_mass[node], 300.0)).sum()
        lost = skipped[node] * np.exp(min(estimate[node] - log_mass[node], 30.0))
        error[node] = EPS * rounding + 2.0 * relative + lost + 1e-21 * z.size
    return Transforms(log_mass, phi, error)


def product(left: ComplexArray, right: ComplexArray) -> ComplexArray:
    """left^T right, a few rows at a time where the result is small.

    Such products are too short for several threads, and BLAS would spend more on starting them.
    """
    cells = left.shape[1] * right.shape[1]
    if cells > _ONE_THREAD // 16:
        return np.asarray(left.T @ right)
    rows = _ONE_THREAD // cells
    total = left[:rows].T @ right[:rows]
    for start in range(rows, left.shape[0], rows):
        total += left[start : start + rows].T @ right[start : start + rows]
    return np.asarray(total)


def _fourier_sums(weight: Vector, angle: Vector, size: int) -> ComplexArray:
    """sum_j weight_j exp(i k angle_j) for k < size, as one matrix product."""
    inner = max(1, int(np.ceil(np.sqrt(size))))
    outer = -(-size // inner)
    total = np.zeros((outer, inner), dtype=np.complex128)
    for start in range(0, weight.size, _CHUNK):
        part = angle[start : start + _CHUNK]
        coarse = _powers(part * inner, outer) * weight[start : start + _CHUNK, None]
        total += product(coarse, _powers(part, inner))
    return np.asarray(total.ravel()[:size], dtype=np.complex128)


def _powers(angle: Vector, size: int) -> ComplexArray:
    """exp(i k angle) for k < size by doubling: at most one rounding per doubling."""
    table = np.ones((angle.size, size), dtype=np.complex128)
    filled = 1
    while filled < size:
        stop = min(2 * filled, size)
        factor = np.exp(1j * (filled * angle))[:, None]
        np.multiply(table[:, : stop - filled], factor, out=table[:, filled:stop])
        filled = stop
    return table


def _log_mass_estimate(mu: Vector, rate: Vector, bounds: Range, power: float) -> Vector:
    value, log_weight = coarse_grid(mu, rate, bounds)
    exponent = power * value + log_weight
    peak = exponent.max(axis=1)
    return np.asarray(peak + np.log(np.exp(exponent - peak[:, None]).sum(axis=1)))


def _panels(
    mu: Vector, rate: Vector, bounds: Range, power: float, top: float, estimate: Vector
) -> tuple[IntArray, Vector, Vector, Vector]:
    """Bisect the outcome range until every panel is accurate or carries negligible mass."""
    start = 6
    low, high = bounds
    width = (high - low) / start
    owner = np.repeat(np.arange(mu.size), start)
    centre = (low[:, None] + width[:, None] * (np.arange(start) + 0.5)).ravel()
    radius = np.repeat(0.5 * width, start)
    wide = radius > 0.0
    owner, centre, radius = owner[wide], centre[wide], radius[wide]
    skipped = np.zeros(mu.size)
    done: list[tuple[IntArray, Vector, Vector]] = []
    for _ in range(60):
        level = _log_sup(mu[owner], rate[owner], power, centre, radius, 0.0)[0]
        level += np.log(2.0 * radius) - estimate[owner]
        tiny = level < NEGLIGIBLE_LOG
        np.add.at(skipped, owner[tiny], np.exp(level[tiny]))
        owner, centre, radius = owner[~tiny], centre[~tiny], radius[~tiny]
        bound = _panel_log_error(mu[owner], rate[owner], power, top, centre, radius)
        good = bound <= estimate[owner] + PANEL_LOG_ERROR
        done.append((owner[good], centre[good], radius[good]))
        owner, centre, radius = owner[~good], centre[~good], 0.5 * radius[~good]
        if owner.size == 0 or owner.size > MAX_PANELS:
            break
        owner = np.concatenate([owner, owner])
        centre = np.concatenate([centre - radius, centre + radius])
        radius = np.concatenate([radius, radius])
    done.append((owner, centre, radius))
    owner, centre, radius = (np.concatenate(parts) for parts in zip(*done, strict=True))
    order = np.lexsort((centre, owner))
    return owner[order], centre[order], radius[order], skipped


def _log_sup(
    mu: Vector,
    rate: Vector,
    power: float,
    centre: Vector,
    half_width: Vector,
    height: Vector | float,
) -> tuple[Vector, Vector]:
    """Upper bound of log |e^{power L} phi| over a box in the complex z-plane, and its y-top."""
    low, high = centre - half_width, centre + half_width
    distance = np.maximum(np.maximum(low, -high), 0.0)
    log_phi = 0.5 * (np.square(height) - distance * distance) - _LOG_SQRT_2PI
    y_top = mu * (high - 0.5 * mu)
    if power >= 0.0:
        return power * loss(y_top, rate) + log_phi, y_top
    angle = np.minimum(mu * height, 1.57)
    growth = power * loss(mu * (low - 0.5 * mu), rate) + power * np.log(np.cos(0.5 * angle))
    return growth + log_phi, y_top


def _panel_log_error(
    mu: Vector,
    rate: Vector,
    power: float,
    top: float,
    centre: Vector,
    radius: Vector,
) -> Vector:
    """Log of the Gauss-Legendre error bound of each panel, for every |u| <= top.

    On the ellipse |Im y| <= angle <= pi/2, so arg(1 - p + p e^y) is at most its value at the
    right end with that angle, |R| <= R(Re y), and |R| >= cos(angle/2) R(Re y).
    """
    height = radius * (0.5 * (_RHO - 1.0 / _RHO))
    log_sup, y_top = _log_sup(mu, rate, power, centre, radius * (0.5 * (_RHO + 1.0 / _RHO)), height)
    angle = mu * height
    odds = np.exp(np.minimum(y_top + np.log(rate) - np.log1p(-rate), 700.0))
    turn = np.arctan2(odds * np.sin(angle), 1.0 + odds * np.cos(angle))
    bound = log_sup + top * turn + np.log(8.0 * radius / (_RHO - 1.0))
    bound = bound - (2 * POINTS - 1) * np.log(_RHO)
    return np.asarray(np.where(angle <= 1.57, bound, np.inf).min(axis=0))

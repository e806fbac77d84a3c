"""Replace many distinct steps by weighted combinations of a few node mechanisms.

A step is (mu, p): noise multiplier 1/mu and sampling rate p.  Write H(mu, p; alpha) for its
hockey-stick curve and theta = erf(mu / sqrt(8)) for the total variation of its Gaussian pair.

* H is convex in theta for every alpha and convex in p for every alpha, so bilinear
  *interpolation* between nodes (weights >= 0, sum one: a mixture with the label revealed)
  dominates the step.
* Linear *extrapolation* from two nodes on the same side is dominated by the step.  It is the
  curve of a genuine pair as long as the combined measure is non-negative, which is checked
  here in closed form; where the check fails the weight of the further node is set to zero,
  which is the plain monotonicity of H in theta and in p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.closed_form import EPS

IntArray = NDArray[np.int64]

DIRECT_LIMIT = 64
EXACT_RATES = 12


@dataclass(frozen=True)
class Mixture:
    """Steps as combinations of nodes: step t is sum_c weight[t, c] * node[index[t, c]]."""

    mu: Vector
    rate: Vector
    index: IntArray
    weight: Vector
    count: Vector
    weight_error: Vector
    gaussian_variance: float

    @property
    def is_direct(self) -> bool:
        """Whether every step is its own node, so that no interpolation error exists."""
        return bool(self.index.shape[1] == 1)

    @property
    def total_weight(self) -> float:
        """Sum over all steps of the absolute weights: scales the truncated tail mass."""
        return float(np.sum(self.count * np.abs(self.weight).sum(axis=1)))

    def with_counts(self, count: Vector, gaussian_variance: float) -> Mixture:
        """The same steps with other counts; steps and nodes without use are left out."""
        rows = count > 0.0
        used, index = np.unique(self.index[rows], return_inverse=True)
        return Mixture(
            self.mu[used],
            self.rate[used],
            index.reshape(-1, self.index.shape[1]).astype(np.int64),
            self.weight[rows],
            count[rows],
            self.weight_error[rows],
            gaussian_variance,
        )

    def with_rows(self, count: Vector) -> Mixture:
        """The same rows and nodes with other counts (zero allowed)."""
        return replace(self, count=count)

    def with_order(self, rows: IntArray) -> Mixture:
        """Rows picked in the given order, each once; nodes unchanged."""
        return replace(
            self,
            index=self.index[rows],
            weight=self.weight[rows],
            count=np.ones(rows.size),
            weight_error=self.weight_error[rows],
        )


def direct_mixture(mu: Vector, rate: Vector, count: Vector, variance: float) -> Mixture:
    """Mixture in which every distinct step is its own node."""
    size = mu.size
    return Mixture(
        mu,
        rate,
        np.arange(size).reshape(-1, 1),
        np.ones((size, 1)),
        count,
        np.zeros(size),
        variance,
    )


def total_variation(mu: Vector) -> Vector:
    """Total variation of the Gaussian pair, the coordinate in which H is convex."""
    return np.asarray(erf(mu / np.sqrt(8.0)), dtype=np.float64)


def interpolated_mixture(
    mu: Vector,
    rate: Vector,
    count: Vector,
    variance: float,
    spacing: float,
    *,
    upper: bool,
) -> Mixture:
    """Mixture that dominates the steps (``upper``) or is dominated by them (otherwise)."""
    coordinate = np.log(mu) + mu * mu
    below = 0 if upper else 1
    mu_grid = _invert_coordinate(_uniform(coordinate, spacing, below))
    mu_grid[-1] = max(float(mu_grid[-1]), float(mu.max()))
    mu_grid[below] = min(float(mu_grid[below]), float(mu.min()))
    if np.unique(rate).size <= EXACT_RATES:
        rate_grid, exact = np.unique(rate), True
    else:
        rate_grid, exact = np.exp(_uniform(np.log(rate), spacing, 2 * below)), False
        rate_grid[-1] = min(max(rate_grid[-1], rate.max()), 1.0)
    theta_grid = total_variation(mu_grid)
    theta = total_variation(mu)
    if upper:
        first, second, weight, error = _interpolate(theta_grid, theta)
    else:
        first, second, weight, error = _extrapolate(theta_grid, theta, 1)
        ratio = _concentration_ratio(mu_grid[second], mu_grid[first])
        weight = np.where(weight * ratio < 1.0 + weight, weight, 0.0)
    if exact:
        column = np.searchsorted(rate_grid, rate)
        rows = np.stack([first, second], axis=1)
        columns = np.stack([column, column], axis=1)
        weights = np.stack([1.0 + weight, -weight], axis=1)
    else:
        if upper:
            near, far, slope, more = _interpolate(rate_grid, rate)
        else:
            near, far, slope, more = _extrapolate(rate_grid, rate, 2)
            allowed = _rate_weight_allowed(
                slope, weight, mu_grid[second], mu_grid[first], rate_grid[far] / rate_grid[near]
            )
            slope = np.where(allowed, slope, 0.0)
        error = error + more
        rows = np.stack([first, second, first, second], axis=1)
        columns = np.stack([near, near, far, far], axis=1)
        weights = np.stack(
            [
                (1.0 + weight) * (1.0 + slope),
                -weight * (1.0 + slope),
                -(1.0 + weight) * slope,
                weight * slope,
            ],
            axis=1,
        )
    keys, index = np.unique(rows * rate_grid.size + columns, return_inverse=True)
    return Mixture(
        mu_grid[keys // rate_grid.size],
        rate_grid[keys % rate_grid.size],
        index.reshape(rows.shape).astype(np.int64),
        weights,
        count,
        error,
        variance,
    )


def _uniform(values: Vector, spacing: float, below: int) -> Vector:
    """Uniform grid covering ``values`` with ``below`` more points under the smallest."""
    low, high = float(values.min()), float(values.max())
    cells = max(1, int(np.ceil((high - low) / spacing)))
    step = max((high - low) / cells, 1e-3 * spacing)
    return np.asarray(low + step * np.arange(-below, cells + 1), dtype=np.float64)


def _invert_coordinate(value: Vector) -> Vector:
    """Solve log(mu) + mu^2 = value by Newton's method (a convenience: any mu would do)."""
    mu = np.where(value > 1.0, np.sqrt(np.maximum(value, 1.0)), np.exp(np.minimum(value, 1.0)))
    for _ in range(40):
        mu = np.maximum(mu - (np.log(mu) + mu * mu - value) / (1.0 / mu + 2.0 * mu), 0.05 * mu)
    return np.sort(mu)


def _interpolate(grid: Vector, value: Vector) -> tuple[IntArray, IntArray, Vector, Vector]:
    """Neighbours (a, b) and weight w <= 0 with value = (1 + w) a - w b, a <= value <= b."""
    grid_low = np.clip(np.searchsorted(grid, value, side="right") - 1, 0, grid.size - 2)
    gap = grid[grid_low + 1] - grid[grid_low]
    weight = -np.clip((value - grid[grid_low]) / gap, 0.0, 1.0)
    return grid_low, grid_low + 1, weight, 32.0 * EPS * np.abs(value) / gap


def _extrapolate(
    grid: Vector, value: Vector, distance: int
) -> tuple[IntArray, IntArray, Vector, Vector]:
    """Nodes (a, b), b < a <= value, and w >= 0 with value = (1 + w) a - w b."""
    near = np.clip(np.searchsorted(grid, value, side="right") - 1, distance, grid.size - 1)
    far = near - distance
    gap = grid[near] - grid[far]
    weight = np.clip((value - grid[near]) / gap, 0.0, None)
    return near, far, weight, 32.0 * EPS * np.abs(value) / gap


def _concentration_ratio(mu_far: Vector, mu_near: Vector) -> Vector:
    """Largest density ratio N(-b^2/2, b^2) / N(-a^2/2, a^2) for b = mu_far <= a = mu_near."""
    return np.asarray((mu_near / mu_far) * np.exp((mu_near**2 - mu_far**2) / 8.0) * (1.0 + 1e-12))


def _rate_weight_allowed(
    slope: Vector,
    weight: Vector,
    mu_far: Vector,
    mu_near: Vector,
    ratio: Vector,
) -> NDArray[np.bool_]:
    """Whether bilinear extrapolation with these weights is a non-negative measure.

    In the coordinate y = log(1 + (e^loss - 1)/p), with D(y) = log(r + (1 - r) e^|y|) for the
    ratio r of the two rates, the density ratio of far to near rate is at most
    exp(max over 0 <= |y| <= 3 mu^2 of D (3/2 - (2|y| - D) / (2 mu^2))) / r.  D increases and
    2|y| - D increases, so taking D at the right and 2|y| - D at the left end of short
    intervals gives a rigorous maximum.
    """
    edges = np.linspace(0.0, 1.0, 129)
    y = 3.0 * mu_near[:, None] ** 2 * edges[None, :]
    spread = y + np.log1p(-ratio[:, None] * -np.expm1(-y))
    factor = 1.5 - (2.0 * y - spread)[:, :-1] / (2.0 * mu_near[:, None] ** 2)
    worst = np.max(np.maximum(spread[:, 1:] * factor, 0.0), axis=1)
    density_ratio = np.exp(np.minimum(worst, 500.0)) / ratio * (1.0 + 1e-9)
    inner = 1.0 + weight - weight * _concentration_ratio(mu_far, mu_near)
    return np.asarray(slope * density_ratio * (1.0 + weight) <= (1.0 + slope) * inner)

"""δ(ε) as a smooth function of the noise multipliers, with its derivatives: for planners only.

On one contour, with ψ_k the transform of a step of kind k and n_k the number of such steps,

    δ(ε) = 1/(2π) ∫ e^{−sε} Π_k ψ_k(s)^{n_k} / (s(s+1)) du,   s = λ + iu,

so a change of ln σ_k changes δ by n_k ∫ (…) (∂ ln ψ_k(s)/∂ ln σ_k) du: the marginal price of noise
is in ln ψ. The transforms are tabulated over ln σ for each sampling rate and interpolated. Nothing
here is certified: the values steer, and what is claimed comes from `bounds`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.interpolate import CubicSpline

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.bounds import distinct
from diminuendo.accounting.subsampled.composition import Kernel
from diminuendo.accounting.subsampled.estimate import Estimate, choose_settings
from diminuendo.accounting.subsampled.solve import TAIL_SHARE
from diminuendo.accounting.subsampled.transform import (
    ComplexArray,
    outcome_range,
    product,
    tilted_transforms,
)
from diminuendo.errors import InputError

_SPACING = 0.1
_WIDTH = 2e-3
_LEAST_LOG_SIGMA = math.log(0.06)
_EDGE = 20.0
_BELOW, _FINEST, _COARSEST = 0.5, 0.03, 0.25
_MOST_FREQUENCIES = 1 << 14
_MOST_CELLS = 1 << 22
_AGREED = 0.05


class LogDelta(NamedTuple):
    """ln δ(ε), its gradient and its Hessian in the ln σ_k."""

    value: float
    gradient: Vector
    hessian: Vector


class _Table:
    """Transforms of one step over x = ln σ: mass e^{m(x)} and shape 1 + e^{−2x} G(x)."""

    def __init__(self, rate: float, x: Vector, log_tail: float, kernel: Kernel) -> None:
        self.high = float(x[-1])
        mu, rates = np.exp(-x), np.full(x.size, rate)
        made = tilted_transforms(
            mu,
            rates,
            outcome_range(mu, rates, log_tail),
            kernel.settings.tilt,
            kernel.du,
            kernel.settings.size,
            remove=True,
        )
        self._log_mass = CubicSpline(x, np.log(np.maximum(made.log_mass, 1e-300)))
        self._shape = CubicSpline(x, (made.phi - 1) * np.exp(2 * x)[:, None])

    def __call__(self, x: Vector) -> tuple[Vector, Vector, tuple[ComplexArray, ...]]:
        """ln ψ at zero frequency and ψ over it at all, each with two derivatives in x.

        Beyond the last node the mass falls like 1/σ² and the shape stays as it is there.
        """
        inner = np.minimum(x, self.high)
        inside = x <= self.high
        mass = np.exp(self._log_mass(inner) - 2 * (x - inner))
        slope = np.where(inside, self._log_mass(inner, 1), -2.0)
        bend = np.where(inside, self._log_mass(inner, 2), 0.0)
        shape = self._shape(inner)
        one, two = (inside[:, None] * self._shape(inner, order) for order in (1, 2))
        scale = np.exp(-2 * x)[:, None]
        return (
            mass,
            np.stack([mass * slope, mass * (bend + slope**2)]),
            (
                1 + scale * shape,
                scale * (one - 2 * shape),
                scale * (two - 4 * one + 4 * shape),
            ),
        )


def _grid(anchor: float, finest: float) -> Vector:
    """Nodes in ln σ around the smallest one, denser below: losses and their phases go as 1/σ²."""
    nodes = [max(anchor - _BELOW, _LEAST_LOG_SIGMA)]
    while nodes[-1] < max(anchor + 1.0, math.log(_EDGE)):
        nodes.append(nodes[-1] + min(finest * math.exp(2 * (nodes[-1] - anchor)), _COARSEST))
    return np.array(nodes)


def _agree(rough: Vector, fine: Vector) -> bool:
    """Whether prices differ little: noise above the least is about their mean square error."""
    error = (rough - fine) ** 2 / np.maximum(np.abs(fine), 1e-300)
    return float(error.sum()) <= _AGREED**2 * float(np.abs(fine).sum())


class DeltaModel:
    """ln δ at one ε for steps of a few kinds, on a contour chosen around a schedule.

    sigmas, rates, counts   the schedule around which the contour is chosen, one entry a kind
    epsilon, delta          the budget for add-remove neighbours
    """

    def __init__(
        self, sigmas: Vector, rates: Vector, counts: Vector, epsilon: float, delta: float
    ) -> None:
        self._rates, self._counts = rates, counts
        mixture = distinct(sigmas, rates, counts).mixture(_SPACING, upper=True)
        log_tail = math.log(delta) + math.log(TAIL_SHARE / max(mixture.total_weight, 1.0))
        bounds = outcome_range(mixture.mu, mixture.rate, log_tail)
        estimate = Estimate(mixture, bounds, remove=True)
        width = _WIDTH * epsilon
        while True:
            settings, _, _ = choose_settings(
                estimate,
                estimate.log_psi,
                estimate.tilt_for_epsilon(epsilon),
                epsilon,
                0.5 * epsilon,
                math.log(delta),
                0.0,
                width,
            )
            if settings.size <= _MOST_FREQUENCIES or width > epsilon:
                break
            width *= 4
        if settings.size > 4 * _MOST_FREQUENCIES:
            raise InputError("within reach of the model", name="delta", value=delta)
        kernel = Kernel(settings, 0.0)
        self._weights = kernel.upper * np.exp(-1j * epsilon * kernel.u)
        self._offset = kernel.log_gain - settings.tilt * epsilon
        s = settings.tilt + 1j * kernel.u
        self._gaussian = 0.5 * s * (s + 1)
        self._tabulate(np.log(sigmas), log_tail, kernel)

    def _tabulate(self, log_sigmas: Vector, log_tail: float, kernel: Kernel) -> None:
        """Tables twice as dense as those whose prices they confirm.

        Where a rare draw decides δ, transforms turn fast with σ: on nodes too far apart the
        prices would be those of the interpolation.
        """
        sampled, finest = self._rates < 1, _FINEST
        rough: Vector | None = None
        while True:
            grid = _grid(float(log_sigmas[sampled].min()), finest)
            self.low = float(grid[0])
            self._tables = {
                float(rate): _Table(float(rate), grid, log_tail, kernel)
                for rate in np.unique(self._rates[sampled])
            }
            try:
                fine = self(log_sigmas, derivatives=False).gradient
            except InputError:
                fine = None
            if rough is not None and fine is not None and _agree(rough, fine):
                return
            if 2 * grid.size * kernel.settings.size > _MOST_CELLS:
                return
            rough, finest = fine, finest / 2

    def __call__(self, log_sigmas: Vector, *, derivatives: bool = True) -> LogDelta:
        """ln δ of steps with these ln σ; without `derivatives` the Hessian is empty."""
        logs = np.empty((log_sigmas.size, self._weights.size), dtype=np.complex128)
        first, second = np.empty_like(logs), np.empty_like(logs)
        full = self._rates == 1
        logs[full] = np.exp(-2 * log_sigmas[full])[:, None] * self._gaussian
        first[full], second[full] = -2 * logs[full], 4 * logs[full]
        for rate, table in self._tables.items():
            mine = self._rates == rate
            mass, slopes, (phi, one, two) = table(np.maximum(log_sigmas[mine], self.low))
            phi = np.where(np.abs(phi) < 1e-12, 1e-12, phi)
            ratio = one / phi
            logs[mine] = mass[:, None] + np.log(phi)
            first[mine] = slopes[0][:, None] + ratio
            second[mine] = slopes[1][:, None] + two / phi - ratio**2
        counts = self._counts
        total = counts @ logs
        peak = float(total[0].real)
        terms = self._weights * np.exp(total - peak)
        size = float(terms.real.sum())
        if not size > 0:
            raise InputError("within reach of the model", name="sigmas", value=peak)
        share = terms / size
        first *= counts[:, None]
        gradient = np.asarray((first @ share).real)
        value = math.log(size) + peak + self._offset
        if not derivatives:
            return LogDelta(value, gradient, np.empty((0, 0)))
        crossed = product((first * share).T, first.T).real - np.outer(gradient, gradient)
        return LogDelta(value, gradient, crossed + np.diag(counts * (second @ share).real))

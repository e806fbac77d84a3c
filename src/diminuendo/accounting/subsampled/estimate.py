"""Saddle-point estimates and the choice of contours: affect width and cost, never validity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import brentq

from diminuendo.accounting.subsampled.composition import FREQUENCY_REACH, Settings, combine
from diminuendo.accounting.subsampled.nodes import Mixture
from diminuendo.accounting.subsampled.transform import Range, coarse_grid

TILT_RANGE = (1e-7, 1e9)
MAX_SMOOTHING = 0.5
MAX_WORK = 3e9
MAX_CELLS = 1 << 24
ROUNDING = 3e-13
_RATIO = 1.18


class Estimate:
    """Saddle-point picture of one direction of a mixture, outcomes restricted to ``bounds``."""

    def __init__(self, mixture: Mixture, bounds: Range, *, remove: bool) -> None:
        self.mixture, self.bounds, self.remove = mixture, bounds, remove
        value, log_weight = coarse_grid(mixture.mu, mixture.rate, bounds)
        self._loss = value if remove else -value
        self._log_weight = log_weight + value if remove else log_weight
        self.reach = float(self._loss.max())
        self.damping = mixture.gaussian_variance
        positive = np.maximum(mixture.weight, 0.0)
        self._steer = replace(mixture, weight=positive / positive.sum(axis=1, keepdims=True))

    def cumulants(self, lam: float) -> tuple[float, float, float]:
        """log psi(lam) of the mixture with its first two derivatives."""
        exponent = lam * self._loss + self._log_weight
        peak = exponent.max(axis=1)
        mass = np.exp(exponent - peak[:, None])
        zero = mass.sum(axis=1)
        one = (mass * self._loss).sum(axis=1)
        two = (mass * self._loss**2).sum(axis=1)
        mixture = self._steer
        log_mass, share = combine(mixture, peak + np.log(zero))
        mean = (share * (one / zero)[mixture.index]).sum(axis=1)
        square = (share * (two / zero)[mixture.index]).sum(axis=1)
        extra = mixture.gaussian_variance
        return (
            float(mixture.count @ log_mass) + 0.5 * extra * lam * (lam + 1.0),
            float(mixture.count @ mean) + extra * (lam + 0.5),
            float(mixture.count @ np.maximum(square - mean**2, 0.0)) + extra,
        )

    def largest_loss(self) -> float:
        """Certified bound on the composed loss: delta is zero from there on; may be infinite."""
        if self.remove or self.mixture.gaussian_variance > 0.0:
            return math.inf
        used = np.where(self.mixture.weight != 0.0, self.mixture.rate[self.mixture.index], 0.0)
        return float(self.mixture.count @ -np.log1p(-used.max(axis=1))) * (1.0 + 1e-9)

    def log_psi(self, lam: float) -> float:
        """log of the moment generating function at lam."""
        return self.cumulants(lam)[0]

    def log_jump(self, level: float, lam: float) -> float:
        """log of the moment of the part with some step's loss above ``level``."""
        exponent = lam * self._loss + self._log_weight
        peak = exponent.max(axis=1)
        mass = np.exp(exponent - peak[:, None])
        total = mass.sum(axis=1)
        part = np.where(self._loss > level, mass, 0.0).sum(axis=1) / total
        log_mass, share = combine(self._steer, peak + np.log(total))
        jump = np.clip((share * part[self.mixture.index]).sum(axis=1), 1e-300, 1.0 - 1e-15)
        some = -math.expm1(float(self.mixture.count @ np.log1p(-jump)))
        extra = 0.5 * self.mixture.gaussian_variance * lam * (lam + 1.0)
        return float(self.mixture.count @ log_mass) + extra + math.log(max(some, 1e-300))

    def epsilon(self, lam: float) -> float:
        """The epsilon whose integrand has its saddle at lam."""
        return self.cumulants(lam)[1] - 1.0 / lam - 1.0 / (lam + 1.0)

    def log_delta(self, lam: float) -> float:
        """Saddle-point approximation of log delta at ``epsilon(lam)``."""
        zero, one, two = self.cumulants(lam)
        eps = one - 1.0 / lam - 1.0 / (lam + 1.0)
        curvature = two + lam**-2 + (lam + 1.0) ** -2
        size = zero - lam * eps - math.log(lam) - math.log1p(lam)
        return size - 0.5 * math.log(2.0 * math.pi * curvature)

    def is_nearly_gaussian(self, lam: float) -> bool:
        """Whether the tilted law has little skewness, so that ``log_delta`` can be trusted."""
        below, above = self.cumulants(lam / 1.05)[2], self.cumulants(lam * 1.05)[2]
        skewness = (above - below) / (0.1 * lam) / max(above, below, 1e-300) ** 1.5
        return bool(abs(skewness) < 0.3)

    def tilt_for_epsilon(self, eps: float) -> float:
        """Saddle point for a given epsilon, clipped to ``TILT_RANGE``."""
        return _root(lambda lam: self.epsilon(lam) - eps)

    def tilt_for_delta(self, log_delta: float) -> float:
        """Saddle point at the epsilon >= 0 whose delta is about the given one."""
        lam = _root(lambda lam: log_delta - self.log_delta(lam))
        return lam if self.epsilon(lam) > 0.0 else self.tilt_for_epsilon(0.0)


def _root(function: Callable[[float], float]) -> float:
    """Root of an increasing function over ``TILT_RANGE`` on a log scale, or the nearer end."""
    low, high = (math.log(end) for end in TILT_RANGE)

    def at(x: float) -> float:
        return function(math.exp(x))

    if at(low) >= 0.0:
        return math.exp(low)
    if at(high) <= 0.0:
        return math.exp(high)
    return math.exp(float(brentq(at, low, high, xtol=1e-3)))


def choose_settings(
    estimate: Estimate,
    log_psi: Callable[[float], float],
    saddle: float,
    eps: float,
    safe: float,
    log_delta: float,
    log_total: float,
    width: float,
) -> tuple[Settings, float, float]:
    """Settings for an epsilon error of about ``width`` near ``eps``; their noise and their work.

    Among the tilts at and below the saddle point take the one with the smallest window,
    provided that rounding stays small against delta.  ``safe`` is an epsilon that the answer is
    not expected to be below; ``log_total`` the log of the law's total mass.
    """
    smoothing = min(math.sqrt(width / (saddle + 1.0)), MAX_SMOOTHING)
    tilts = saddle * _RATIO ** np.arange(-18.0, 13.0)
    moments = np.array([log_psi(float(tilt)) for tilt in tilts])
    moments += 0.5 * smoothing**2 * tilts * (tilts + 1.0)
    log_goal = log_delta + math.log(min(1e-5, 0.1 * saddle * width))
    noise = math.log(ROUNDING * (1.0 + estimate.mixture.total_weight) / 1e-5) - log_delta
    best = (math.inf, math.inf, saddle, 1.2 * saddle)
    for i in range(19):
        tilt, later = float(tilts[i]), tilts[i + 1 :]
        reach = (moments[i + 1 :] - later * safe - np.log1p(later) - log_goal) / (later - tilt)
        far = int(np.argmin(reach))
        window = max(float(reach[far]), (log_total - log_goal) / tilt, 0.1 / tilt)
        loud = max(0.0, noise + float(moments[i]) - tilt * eps)
        best = min(best, (loud, window, tilt, float(later[far])))
    loud, window, tilt, far_tilt = best
    size, smoothing, work = _fit(estimate, window, smoothing)
    return Settings(tilt, window, smoothing, size, far_tilt), loud, work


def _fit(estimate: Estimate, window: float, smoothing: float) -> tuple[int, float, float]:
    """Number of frequencies, smoothing (raised to stay within the work limit), work wished."""
    nodes = estimate.mixture.mu.size
    wished = 0.0
    while True:
        spread = math.sqrt(smoothing**2 + estimate.damping)
        top = FREQUENCY_REACH / spread
        size = math.ceil(top * window / (2.0 * math.pi)) + 8
        work = size * (300.0 + top * max(estimate.reach, 0.0)) * nodes
        wished = max(wished, work)
        if size * nodes <= MAX_CELLS and work <= MAX_WORK:
            return size, smoothing, wished
        smoothing *= 1.3

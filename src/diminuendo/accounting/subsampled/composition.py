"""Certified bounds on delta(epsilon) of a composed law, from contour integrals.

Let m be a measure of privacy losses with moment generating function psi(s).  Its share of delta
is the integral of max(0, 1 - e^{eps - l}) over m, that is

    1/(2 pi) int e^{-s eps} psi(s) / (s (s + 1)) du,     s = lam + i u, lam > 0.

Composing with one more Gaussian mechanism of parameter w multiplies psi by
exp(w^2 s (s+1) / 2), can only raise delta, and raises it by at most w^2 e^{w^2/8} times the
density at eps of the losses so smoothed.  The factor makes the integrand negligible beyond
u = FREQUENCY_REACH / w, whatever the steps are.  The trapezoidal rule with spacing 2 pi / window
adds the non-negative terms e^{lam k window} delta(eps + k window), k != 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.closed_form import EPS
from diminuendo.accounting.subsampled.nodes import Mixture
from diminuendo.accounting.subsampled.transform import (
    ComplexArray,
    Range,
    Transforms,
    tilted_transforms,
)

FREQUENCY_REACH = 5.5
DEAD = 1e-25
LARGEST_SMOOTHING = 30.0
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Settings:
    """Where the contour runs (tilt), how wide the window is and how much is smoothed.

    ``far_tilt > tilt`` is where the moment is taken that bounds the periodic images.
    """

    tilt: float
    window: float
    smoothing: float
    size: int
    far_tilt: float


class Kernel:
    """Quadrature weights of the inversion integral, for any law on the same contour."""

    def __init__(self, settings: Settings, gaussian_variance: float) -> None:
        lam, w = settings.tilt, settings.smoothing
        self.settings = settings
        self.variance = gaussian_variance + w * w
        self.du = 2.0 * np.pi / settings.window
        self.u = self.du * np.arange(settings.size)
        s = lam + 1j * self.u
        fold = np.where(self.u > 0.0, 2.0, 1.0) * (self.du / (2.0 * np.pi))
        size = fold * np.exp(-0.5 * self.variance * self.u**2)
        self.drift = self.variance * (lam + 0.5)
        base = size * np.exp(1j * self.drift * self.u)
        blur = w * w * np.exp(min(w * w / 8.0, 200.0))
        kernel = 1.0 / (s * (s + 1.0))
        self.upper = base * kernel
        self.lower = base * (kernel - blur)
        self.upper_size = float(np.sum(size * np.abs(kernel)))
        self.lower_size = float(np.sum(size * np.abs(kernel - blur)))
        end = self.du * settings.size
        beyond = np.exp(-0.5 * self.variance * end * end) / np.pi
        beyond *= self.du + 1.0 / (self.variance * end)
        self.upper_rest = float(beyond / end**2) + DEAD * self.upper_size
        self.lower_rest = float(beyond * (1.0 / end**2 + blur)) + DEAD * self.lower_size
        self.log_gain = 0.5 * self.variance * lam * (lam + 1.0)

    def far_log_gain(self) -> float:
        """Log of the Gaussian factor at the far tilt."""
        far = self.settings.far_tilt
        return 0.5 * self.variance * far * (far + 1.0)

    def rounding(self, eps: float, log_psi: float, law_error: float) -> float:
        """Relative rounding error of the sum, given the relative error of the law."""
        angle = self.du * self.settings.size * (abs(eps) + self.drift)
        scale = abs(log_psi) + self.settings.tilt * abs(eps)
        local = EPS * (self.settings.size + 64.0 + 8.0 * angle + 8.0 * scale)
        return float(np.expm1(min(4.0 * law_error + local, 50.0)))


class Law:
    """A composed measure of losses on one contour, with certified shares of delta(eps)."""

    def __init__(
        self,
        kernel: Kernel,
        product: ComplexArray,
        log_mass: float,
        error: float,
        far_log_mass: float,
        log_total: float,
    ) -> None:
        """``product``: transform over its value at zero, whose log is ``log_mass``.

        ``error``: relative error of both.  ``far_log_mass``: bound on the log moment at the far
        tilt.  ``log_total``: bound on the log of the untilted total mass.
        """
        self._kernel, self._error = kernel, error
        self._log_psi = log_mass + kernel.log_gain
        self._log_far = far_log_mass + kernel.far_log_gain()
        self._log_total = log_total
        live = np.flatnonzero(product)
        self._u = kernel.u[live]
        self._upper = kernel.upper[live] * product[live]
        self._lower = kernel.lower[live] * product[live]

    def log_upper(self, eps: float) -> float:
        """log of a number that is at least this law's share of delta(eps)."""
        kernel = self._kernel
        value = float(np.sum((self._upper * np.exp(-1j * eps * self._u)).real))
        relative = kernel.rounding(eps, self._log_psi, self._error)
        value += kernel.upper_rest + relative * kernel.upper_size
        return float(np.log(max(value, 1e-300)) + self._log_psi - kernel.settings.tilt * eps)

    def log_lower(self, eps: float) -> float:
        """log of a number that is at most this law's share; -inf if nothing is known."""
        kernel = self._kernel
        value = float(np.sum((self._lower * np.exp(-1j * eps * self._u)).real))
        relative = kernel.rounding(eps, self._log_psi, self._error)
        value -= kernel.lower_rest + relative * kernel.lower_size
        if value <= 0.0 or kernel.settings.smoothing > LARGEST_SMOOTHING:
            return -np.inf
        log_value = float(np.log(value)) + self._log_psi - kernel.settings.tilt * eps
        return log_difference(log_value, self._log_images(eps))

    def _log_images(self, eps: float) -> float:
        """Bound on what the periodic images of delta add to the trapezoidal sum."""
        settings = self._kernel.settings
        lam, far, window = settings.tilt, settings.far_tilt, settings.window * (1.0 - 1e-12)
        left = self._log_total - lam * window - np.log(-np.expm1(-lam * window))
        step = (far - lam) * window
        right = self._log_far - far * eps - np.log1p(far) - step - np.log(-np.expm1(-step))
        return float(np.logaddexp(left, right))


def log_difference(first: float, second: float) -> float:
    """log(e^first - e^second), -inf where that is not clearly positive."""
    gap = second - first
    return float(first + np.log1p(-np.exp(gap))) if gap < -1e-12 else -np.inf


def whole_law(mixture: Mixture, bounds: Range, settings: Settings, *, remove: bool) -> Law:
    """Composition of all steps restricted to outcomes within ``bounds``."""
    kernel = Kernel(settings, mixture.gaussian_variance)
    nodes = tilted_transforms(
        mixture.mu, mixture.rate, bounds, settings.tilt, kernel.du, settings.size, remove=remove
    )
    log_mass, share = combine(mixture, nodes.log_mass)
    error = step_error(mixture, nodes, log_mass, share)
    product = compose(mixture, nodes.phi, share)
    far = tilted_transforms(
        mixture.mu, mixture.rate, bounds, settings.far_tilt, 0.0, 1, remove=remove
    )
    far_mass, far_share = combine(mixture, far.log_mass)
    far_log = float(mixture.count @ far_mass) + 2.0 * step_error(mixture, far, far_mass, far_share)
    return Law(kernel, product, float(mixture.count @ log_mass), error, far_log, 1e-6)


def jump_law(mixture: Mixture, body: Range, jump: Range, settings: Settings) -> Law:
    """Part of the composition in which at least one step has its outcome in ``jump``.

    Direction: the record is removed.  Every step is body + jump; the product of the sums minus
    the product of the bodies is formed without cancellation (see ``_join``).
    """
    kernel = Kernel(settings, mixture.gaussian_variance)
    product, log_mass, error = _jump_product(
        mixture, body, jump, settings.tilt, kernel.du, settings.size
    )
    _, far_mass, far_error = _jump_product(mixture, body, jump, settings.far_tilt, 0.0, 1)
    start = jump[0]
    each = (1.0 - mixture.rate) * ndtr(-start) + mixture.rate * ndtr(mixture.mu - start)
    total = float(mixture.count @ (np.abs(mixture.weight) * each[mixture.index]).sum(axis=1))
    log_total = float(np.log(total * (1.0 + 1e-9) + 1e-300))
    return Law(kernel, product, log_mass, error, far_mass + 2.0 * far_error, log_total)


def _jump_product(
    mixture: Mixture, body: Range, jump: Range, tilt: float, du: float, size: int
) -> tuple[ComplexArray, float, float]:
    """Normalised transform, log mass and relative error of the law with some jump."""
    low = tilted_transforms(mixture.mu, mixture.rate, body, tilt, du, size, remove=True)
    high = tilted_transforms(mixture.mu, mixture.rate, jump, tilt, du, size, remove=True)
    node_mass = np.logaddexp(low.log_mass, high.log_mass)
    log_mass, share = combine(mixture, node_mass)
    low_phi = low.phi * np.exp(low.log_mass - node_mass)[:, None]
    high_phi = high.phi * np.exp(high.log_mass - node_mass)[:, None]
    error = Transforms(node_mass, low.phi, low.error + high.error + 8.0 * EPS)
    bodies = np.ones((1, size), dtype=np.complex128)
    jumps = np.zeros((1, size), dtype=np.complex128)
    everything = np.arange(size)
    block = max(1, _BLOCK // size)
    for start in range(0, mixture.count.size, block):
        part = slice(start, start + block)
        pair = (
            step_block(low_phi, mixture, share, part, everything),
            step_block(high_phi, mixture, share, part, everything),
        )
        bodies, jumps = _join((bodies, jumps), _fold(_power(pair, mixture.count[part])))
    top = float(jumps[0, 0].real)
    if top <= 0.0:
        return np.zeros(size, dtype=np.complex128), -1e5, 0.0
    relative = 2.0 * step_error(mixture, error, log_mass, share) + 64.0 * EPS * mixture.count.size
    return jumps[0] / top, float(mixture.count @ log_mass) + float(np.log(top)), relative


Pair = tuple[ComplexArray, ComplexArray]


def _join(first: Pair, second: Pair) -> Pair:
    """(b, d) stands for bodies b and everything b + d; products of both, kept apart."""
    return first[0] * second[0], first[1] * (second[0] + second[1]) + first[0] * second[1]


def _power(pair: Pair, count: Vector) -> Pair:
    """Each row joined with itself ``count`` times, by repeated squaring."""
    left = count.astype(np.int64)
    if np.all(left == 1):
        return pair
    result: Pair = (np.ones_like(pair[0]), np.zeros_like(pair[1]))
    while True:
        odd = (left & 1).astype(bool)[:, None]
        joined = _join(result, pair)
        result = np.where(odd, joined[0], result[0]), np.where(odd, joined[1], result[1])
        left >>= 1
        if not left.any():
            return result
        pair = _join(pair, pair)


def _fold(pair: Pair) -> Pair:
    """Join all rows into one, pairwise."""
    while pair[0].shape[0] > 1:
        half = pair[0].shape[0] // 2
        joined = _join(
            (pair[0][:half], pair[1][:half]), (pair[0][half : 2 * half], pair[1][half : 2 * half])
        )
        pair = (
            np.concatenate([joined[0], pair[0][2 * half :]]),
            np.concatenate([joined[1], pair[1][2 * half :]]),
        )
    return pair


def combine(mixture: Mixture, log_mass: Vector) -> tuple[Vector, Vector]:
    """Per step: log of the weighted sum of node masses, and each node's share of it."""
    node_mass = np.where(mixture.weight != 0.0, log_mass[mixture.index], -np.inf)
    peak = node_mass.max(axis=1)
    share = mixture.weight * np.exp(node_mass - peak[:, None])
    total = np.maximum(share.sum(axis=1), 1e-300)
    return peak + np.log(total), share / total[:, None]


def step_error(mixture: Mixture, nodes: Transforms, log_mass: Vector, share: Vector) -> float:
    """Sum over all steps of the relative error of the step's tilted transform."""
    size = np.abs(share)
    each = (size * nodes.error[mixture.index]).sum(axis=1) + 16.0 * EPS * size.sum(axis=1)
    ratio = np.exp(np.minimum(nodes.log_mass[mixture.index] - log_mass[:, None], 100.0))
    each = each + mixture.weight_error * ratio.sum(axis=1)
    return float(mixture.count @ each)


def compose(mixture: Mixture, phi: ComplexArray, share: Vector) -> ComplexArray:
    """Product of all step transforms; frequencies that fall below ``DEAD`` become zero.

    Every factor has modulus at most one, so a dead frequency stays dead.
    """
    size = phi.shape[1]
    result = np.ones(size, dtype=np.complex128)
    live = np.arange(size)
    start, steps = 0, mixture.count.size
    while start < steps and live.size:
        stop = min(steps, start + max(1, _BLOCK // live.size))
        block = step_block(phi, mixture, share, slice(start, stop), live)
        powers = mixture.count[start:stop, None]
        if np.any(powers != 1.0):
            modulus = np.maximum(np.abs(block), 1e-300)
            block = np.exp(powers * (np.log(modulus) + 1j * np.angle(block)))
        result[live] *= np.prod(block, axis=0)
        alive = np.abs(result[live]) > DEAD
        result[live[~alive]] = 0.0
        live = live[alive]
        start = stop
    return result


def step_block(
    phi: ComplexArray, mixture: Mixture, share: Vector, part: slice, live: NDArray[np.int64]
) -> ComplexArray:
    """Transforms of the steps in ``part`` at the live frequencies."""
    index = mixture.index[part]
    local = phi if live.size == phi.shape[1] else phi[:, live]
    block = share[part, :1] * local[index[:, 0]]
    for column in range(1, index.shape[1]):
        block += share[part, column : column + 1] * local[index[:, column]]
    return np.asarray(block, dtype=np.complex128)

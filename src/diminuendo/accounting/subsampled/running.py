"""Certified epsilon after every prefix of a sequence of steps.

Prefixes are taken in groups.  A group shares one contour and one set of node transforms; the
transforms of its prefixes follow from each other by one multiplication per step, and delta is
evaluated for all of them at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.composition import (
    Kernel,
    combine,
    compose,
    step_block,
    step_error,
)
from diminuendo.accounting.subsampled.estimate import Estimate, choose_settings
from diminuendo.accounting.subsampled.nodes import IntArray, Mixture
from diminuendo.accounting.subsampled.solve import EPSILON_FLOOR, TAIL_SHARE, mixture_epsilon
from diminuendo.accounting.subsampled.transform import (
    ComplexArray,
    Range,
    outcome_probability,
    outcome_range,
    tilted_transforms,
)

SINGLES = 3
GROWTH = 1.8
LOCATE = 1e-2
WORK = 2e8
GRID = 28
_BLOCK = 1 << 19


def running_upper(
    mixture: Mixture,
    row: IntArray,
    variance: Vector,
    leading: Vector,
    delta: float,
    tolerance: float,
) -> Vector:
    """Upper bounds for all prefixes.

    ``row[t]`` is the mixture's row of step t, -1 for a full-batch step; ``variance[t]`` the sum of
    1/sigma^2 over the full-batch steps up to t; ``leading`` the bounds already known for the
    first prefixes, which include all those without any subsampled step.  Epsilon cannot fall when
    steps are added, so every bound also holds for all shorter prefixes.
    """
    total = row.size
    result = np.full(total, np.inf)
    start = leading.size
    result[:start] = leading
    while start < total:
        stop = min(total, start + 1 if start < SINGLES else int(start * GROWTH) + 1)
        counts = np.bincount(row[:stop][row[:stop] >= 0], minlength=mixture.count.size)
        part = mixture.with_counts(counts.astype(np.float64), float(variance[stop - 1]))
        known = float(result[start - 1]) if start else 0.0
        if stop - start > 1:
            group = _Group(mixture, row[:stop], variance[:stop], start, delta, tolerance, known)
            result[start:stop] = group.bounds(part)
        if not math.isfinite(result[stop - 1]):
            last = mixture_epsilon(part, delta, tolerance).upper
            result[start:stop] = np.minimum(result[start:stop], last)
        start = stop
    return np.asarray(np.minimum.accumulate(result[::-1])[::-1])


class _Group:
    """The prefixes of length start+1 .. stop of a sequence."""

    def __init__(
        self,
        mixture: Mixture,
        row: IntArray,
        variance: Vector,
        start: int,
        delta: float,
        tolerance: float,
        known: float,
    ) -> None:
        self._row, self._variance, self._start = row, variance, start
        self._log_delta, self._tolerance, self._known = math.log(delta), tolerance, known
        self._size = mixture.count.size
        self._common = float(variance[start])

    def bounds(self, part: Mixture) -> Vector:
        """Upper bounds for the group; infinite where the shared contour does not reach."""
        log_tail = self._log_delta + math.log(TAIL_SHARE / part.total_weight)
        bounds = outcome_range(part.mu, part.rate, log_tail)
        sides = []
        for remove in (True, False):
            estimate = Estimate(part, bounds, remove=remove)
            estimate.damping = self._common
            tilt = estimate.tilt_for_delta(self._log_delta)
            sides.append((max(estimate.epsilon(tilt), 0.0), tilt, estimate))
        sides.sort(key=lambda side: -side[0])
        top, tilt, estimate = sides[0]
        certified = math.inf
        if not estimate.is_nearly_gaussian(tilt):
            top = mixture_epsilon(part, math.exp(self._log_delta), LOCATE).upper
            sides[0] = (top, tilt, estimate)
            certified = top
        worst = np.zeros(self._row.size - self._start)
        for guess, _, estimate in sides:
            guess = min(guess, top)
            width = max(0.25 * self._tolerance * max(top, EPSILON_FLOOR), 0.1 * (top - guess))
            worst = np.maximum(worst, self._side(part, estimate, guess, top, width, bounds))
        return np.minimum(worst, certified)

    def _side(
        self,
        part: Mixture,
        estimate: Estimate,
        guess: float,
        top: float,
        width: float,
        bounds: Range,
    ) -> Vector:
        saddle = estimate.tilt_for_epsilon(guess)
        safe = max(min(0.8 * self._known, guess - 3.0 / saddle), 0.0)
        settings, loud, work = choose_settings(
            estimate, estimate.log_psi, saddle, guess, safe, self._log_delta, 0.0, width
        )
        if loud > 0.0 or work > WORK:
            return np.full(self._row.size - self._start, np.inf)
        kernel = Kernel(settings, self._common)
        nodes = tilted_transforms(
            part.mu,
            part.rate,
            bounds,
            settings.tilt,
            kernel.du,
            settings.size,
            remove=estimate.remove,
        )
        log_mass, share = combine(part, nodes.log_mass)
        error = step_error(part, nodes, log_mass, share)
        outside = outcome_probability(part.mu, part.rate, bounds)[part.index]
        removed = float(part.count @ (np.abs(part.weight) * outside).sum(axis=1))
        local = self._local_rows()
        before = np.bincount(
            local[: self._start][local[: self._start] >= 0], minlength=part.count.size
        ).astype(np.float64)
        head = compose(part.with_rows(before), nodes.phi, share)
        grid = np.linspace(min(0.95 * self._known, 0.95 * top), 1.08 * top + 1e-9, GRID)
        curve = _Curve(kernel, error, removed, self._log_delta, grid)
        found = np.empty(self._row.size - self._start)
        log_psi = float(before @ log_mass)
        place = self._start
        while place < self._row.size:
            live = np.flatnonzero(head)
            end = min(self._row.size, place + max(1, _BLOCK // max(live.size, 1)))
            rows = local[place:end]
            steps = np.ones((end - place, live.size), dtype=np.complex128)
            sampled = rows >= 0
            shadow = part.with_order(rows[sampled])
            steps[sampled] = step_block(nodes.phi, shadow, share[rows[sampled]], slice(None), live)
            products = head[live] * np.multiply.accumulate(steps, axis=0)
            logs = log_psi + np.cumsum(np.where(sampled, log_mass[rows], 0.0))
            found[place - self._start : end - self._start] = curve.solve(
                products, logs, self._variance[place:end] - self._common, live
            )
            head[live] = products[-1]
            head[np.abs(head) < 1e-25] = 0.0
            log_psi = float(logs[-1])
            place = end
        return found

    def _local_rows(self) -> IntArray:
        """Rows renumbered as in the mixture restricted to the steps used so far."""
        used = np.zeros(self._size, dtype=bool)
        used[self._row[self._row >= 0]] = True
        number = np.cumsum(used) - 1
        return np.where(self._row >= 0, number[self._row], -1).astype(np.int64)


class _Curve:
    """delta(epsilon) bounds of many laws on the same contour."""

    def __init__(
        self, kernel: Kernel, error: float, removed: float, log_delta: float, grid: Vector
    ) -> None:
        self._kernel, self._error, self._log_delta, self._grid = kernel, error, log_delta, grid
        self._log_removed = math.log(max(removed, 1e-300)) + 2.0 * removed + 1e-9

    def solve(
        self,
        products: ComplexArray,
        log_psi: Vector,
        variance: Vector,
        live: NDArray[np.intp],
    ) -> Vector:
        """Smallest epsilon certified for each row; infinite beyond the grid."""
        kernel, lam = self._kernel, self._kernel.settings.tilt
        u = kernel.u[live]
        phase = np.exp(variance[:, None] * (-0.5 * u * u + 1j * (lam + 0.5) * u))
        weights = products * phase * kernel.upper[live]
        scale = log_psi + kernel.log_gain + 0.5 * variance * lam * (lam + 1.0)
        table = (weights @ np.exp(-1j * u[:, None] * self._grid)).real
        log_delta = self._certify(table, scale[:, None], self._grid[None, :], variance[:, None])
        passed = log_delta <= self._log_delta
        first = np.argmax(passed, axis=1)
        result = np.where(passed.any(axis=1), self._grid[first], np.inf)
        inner = np.flatnonzero(passed.any(axis=1) & (first > 0))
        if inner.size == 0:
            return result
        better = self._interpolate(log_delta[inner], first[inner])
        values = np.einsum("ij,ij->i", weights[inner], np.exp(-1j * better[:, None] * u)).real
        check = self._certify(values, scale[inner], better, variance[inner])
        result[inner] = np.where(check <= self._log_delta, better, result[inner])
        return result

    def _certify(self, value: Vector, scale: Vector, eps: Vector, variance: Vector) -> Vector:
        kernel = self._kernel
        angle = float(np.max(np.abs(variance))) * (kernel.settings.tilt + 0.5)
        largest = float(np.max(np.abs(scale)))
        relative = kernel.rounding(float(np.max(eps)) + angle, largest, self._error)
        total = value + kernel.upper_rest + relative * kernel.upper_size
        log_total = np.log(np.maximum(total, 1e-300)) + scale - kernel.settings.tilt * eps
        return np.asarray(np.logaddexp(log_total, self._log_removed))

    def _interpolate(self, log_delta: Vector, first: IntArray) -> Vector:
        """Where a parabola through three grid points meets the target, a little to the right."""
        rows = np.arange(first.size)
        middle = np.clip(first, 1, self._grid.size - 2)
        step = self._grid[1] - self._grid[0]
        y0, y1, y2 = (log_delta[rows, middle + k] - self._log_delta for k in (-1, 0, 1))
        slope, bend = 0.5 * (y2 - y0), 0.5 * (y2 - 2.0 * y1 + y0)
        x = -y1 / np.minimum(slope, -1e-300)
        for _ in range(6):
            x = x - (y1 + slope * x + bend * x * x) / np.minimum(slope + 2.0 * bend * x, -1e-12)
        x = np.clip(np.nan_to_num(x), first - middle - 1.0, first - middle)
        return np.asarray(self._grid[middle] + step * np.minimum(x + 3e-3, first - middle))

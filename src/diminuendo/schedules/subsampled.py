"""The best schedule when steps are Poisson-subsampled: least Σ q_t σ_t² at a given (ε, δ).

At the solution every step has the same exchange rate: 2 q_t σ_t² = −ν ∂ ln δ/∂ ln σ_t for one
ν > 0. Steps with equal influence and rate share a σ, so the unknowns are the ln σ_k of a few kinds
of steps; where there are many, influences are gathered into kinds on a logarithmic scale and ln σ
is interpolated between them. The equations are solved by Newton's method on the constraint
ln δ(ε) = ln δ, every point on the way being moved onto it by one common factor.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from scipy.interpolate import PchipInterpolator

from diminuendo._validate import Vector
from diminuendo.errors import InputError

MOST_KINDS = 64
_NEGLIGIBLE = math.log(1e-10)
_LARGEST = math.log(1e5)
_STEPS = 30
_ENOUGH = 1e-7


class Constraint(Protocol):
    """ln δ as a function of the ln σ_k, as `accounting.subsampled.DeltaModel` gives it."""

    low: float

    def __call__(
        self, log_sigmas: Vector, *, derivatives: bool = True
    ) -> tuple[float, Vector, Vector]:
        """Value, gradient and Hessian."""
        ...


class Kinds:
    """Steps gathered by (influence, rate): the kinds, how many of each, and the way back."""

    def __init__(self, influence: Vector, rates: Vector) -> None:
        self._log_q, self._step_rates = np.log(influence), rates
        floor = self._log_q.max() + _NEGLIGIBLE
        log_q, kind_rates, counts = [], [], []
        for rate in np.unique(rates):
            mine = np.maximum(self._log_q[rates == rate], floor)
            values, number = np.unique(mine, return_counts=True)
            if values.size > MOST_KINDS:
                edges = np.linspace(values[0], values[-1], MOST_KINDS + 1)
                place = np.clip(np.searchsorted(edges, mine, side="right") - 1, 0, MOST_KINDS - 1)
                number = np.bincount(place, minlength=MOST_KINDS)
                sums = np.bincount(place, weights=mine, minlength=MOST_KINDS)
                used = number > 0
                values, number = sums[used] / number[used], number[used]
            log_q.append(values)
            counts.append(number.astype(np.float64))
            kind_rates.append(np.full(values.size, rate))
        self.log_q = np.concatenate(log_q)
        self.counts = np.concatenate(counts)
        self.rates = np.concatenate(kind_rates)

    def spread(self, log_sigmas: Vector) -> Vector:
        """σ_1…σ_T from the ln σ of the kinds; beyond the last kind, the lemma's q^(−1/4)."""
        found = np.empty(self._log_q.size)
        for rate in np.unique(self._step_rates):
            mine, kind = self._step_rates == rate, self.rates == rate
            knots, values = self.log_q[kind], log_sigmas[kind]
            at = np.clip(self._log_q[mine], knots[0], knots[-1])
            inner = PchipInterpolator(knots, values)(at) if knots.size > 1 else values[0]
            found[mine] = inner - 0.25 * (self._log_q[mine] - at)
        return np.asarray(np.exp(np.minimum(found, _LARGEST)))


def least_noise(
    log_q: Vector, counts: Vector, constraint: Constraint, target: float, start: Vector
) -> Vector:
    """ln σ_k that minimise Σ counts·q·σ² with constraint(ln σ) = target (ln δ).

    Raises InputError where the constraint cannot be met near the start.
    """
    x = _onto(constraint, start, target)
    best = _log_noise(log_q, counts, x)
    for _ in range(_STEPS):
        step = _newton_step(log_q, counts, constraint, x)
        for size in 0.5 ** np.arange(8.0):
            trial = np.clip(x + np.clip(size * step, -1.0, 1.0), constraint.low, _LARGEST)
            try:
                trial = _onto(constraint, trial, target)
            except InputError:
                continue
            noise = _log_noise(log_q, counts, trial)
            if noise < best:
                break
        else:
            return x
        x, gained, best = trial, best - noise, noise
        if gained < _ENOUGH:
            break
    return x


def _newton_step(log_q: Vector, counts: Vector, constraint: Constraint, x: Vector) -> Vector:
    """The step of Newton's method for ln Σ q σ² along the constraint, in well-scaled unknowns."""
    log_terms = np.log(counts) + log_q + 2 * x
    share = np.exp(log_terms - log_terms.max())
    share /= share.sum()
    _, slope, bend = constraint(x)
    rate = -2 / float(slope.sum())
    matrix = 4 * (np.diag(share) - np.outer(share, share)) + rate * bend
    unit = 1 / np.sqrt(4 * share + rate * np.abs(np.diag(bend)) + 1e-14)
    size = x.size
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = unit[:, None] * matrix * unit
    system[:size, :size] += 1e-9 * np.eye(size)
    system[:size, size] = system[size, :size] = unit * slope
    right = np.append(-2 * share * unit, 0.0)
    return np.asarray(unit * np.linalg.lstsq(system, right, rcond=None)[0][:size])


def _onto(constraint: Constraint, x: Vector, target: float) -> Vector:
    """x moved by one common shift until the constraint holds, to 1e-9 in ln δ."""
    for _ in range(30):
        value, slope, _ = constraint(x, derivatives=False)
        total = float(slope.sum())
        if not total < 0:
            break
        shift = (value - target) / -total
        if abs(value - target) < 1e-9:
            return x
        x = np.minimum(x + max(min(shift, 0.5), -0.5), _LARGEST)
    raise InputError("reachable", name="the constraint", value=target)


def _log_noise(log_q: Vector, counts: Vector, x: Vector) -> float:
    return float(np.logaddexp.reduce(np.log(counts) + log_q + 2 * x))

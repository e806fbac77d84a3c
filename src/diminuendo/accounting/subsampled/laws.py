"""One direction of a composition as one or two laws, each on its own contour.

Where single steps can have losses far larger than typical ones (small rate, little noise), no
single tilt suits both.  Then the outcomes of a step are divided at the loss ``level``: one law
holds the compositions without any step above it, the other those with at least one.  Where the
large losses themselves span several orders of magnitude they are divided again, at ``RATIO`` times
the level and so on: law k holds the compositions whose largest loss lies between two such edges.
All are non-negative measures and delta is the sum of their shares, so each may use its own tilt,
window and smoothing; a law whose losses are far above epsilon needs little resolution.
"""

from __future__ import annotations

import math

import numpy as np

from diminuendo.accounting.subsampled.composition import (
    Law,
    Settings,
    jump_law,
    log_difference,
    whole_law,
)
from diminuendo.accounting.subsampled.estimate import MAX_WORK, Estimate, choose_settings
from diminuendo.accounting.subsampled.transform import outcome_probability, split_range

SPLIT_WORK = 3e6
MAX_JUMP = -1.0
RATIO = 16.0
CLEARANCE = 10.0


class Laws:
    """Certified delta(epsilon) of one direction, tuned to be tight near ``guess``."""

    def __init__(
        self, estimate: Estimate, guess: float, safe: float, log_delta: float, width: float
    ) -> None:
        mixture = estimate.mixture
        outside = outcome_probability(mixture.mu, mixture.rate, estimate.bounds)[mixture.index]
        removed = float(mixture.count @ (np.abs(mixture.weight) * outside).sum(axis=1))
        self._log_removed = math.log(max(removed, 1e-300)) + 2.0 * removed + 1e-9
        saddle = estimate.tilt_for_epsilon(guess)
        settings, loud, work = choose_settings(
            estimate, estimate.log_psi, saddle, guess, safe, log_delta, 0.0, width
        )
        self.tilt = settings.tilt
        self.work = min(work, MAX_WORK)
        self.exhausted = work > MAX_WORK
        heavy = loud > 0.0 or work > SPLIT_WORK * mixture.mu.size
        level = _split_level(estimate, guess) if heavy and estimate.remove else math.inf
        if level < estimate.reach:
            self._laws = self._split(estimate, level, guess, safe, log_delta, width)
        else:
            self._laws = [whole_law(mixture, estimate.bounds, settings, remove=estimate.remove)]

    def _split(
        self,
        estimate: Estimate,
        level: float,
        eps: float,
        safe: float,
        log_delta: float,
        width: float,
    ) -> list[Law]:
        mixture = estimate.mixture
        body, jump = split_range(mixture.mu, mixture.rate, estimate.bounds, level)
        inner = Estimate(mixture, body, remove=True)
        saddle = inner.tilt_for_epsilon(eps)
        settings, _, work = choose_settings(
            inner, inner.log_psi, saddle, eps, safe, log_delta, 0.0, width
        )
        laws = [whole_law(mixture, body, settings, remove=True)]
        self.tilt = settings.tilt
        self.work = min(work, MAX_WORK)
        self.exhausted = work > MAX_WORK
        settings, more = _jump_settings(estimate, level, eps, safe, log_delta, width)
        if more <= SPLIT_WORK * mixture.mu.size or RATIO * level >= estimate.reach:
            self._charge(more)
            return [*laws, jump_law(mixture, body, jump, settings)]
        edge = level
        while edge < estimate.reach:
            top = RATIO * edge if 2.0 * RATIO * edge < estimate.reach else math.inf
            span = estimate.bounds
            if math.isfinite(top):
                span = split_range(mixture.mu, mixture.rate, span, top)[0]
            body, jump = split_range(mixture.mu, mixture.rate, span, edge)
            settings, more = _jump_settings(
                Estimate(mixture, span, remove=True), edge, eps, safe, log_delta, width
            )
            self._charge(more)
            laws.append(jump_law(mixture, body, jump, settings))
            edge = top
        return laws

    def _charge(self, work: float) -> None:
        self.work += min(work, MAX_WORK)
        self.exhausted = self.exhausted or work > MAX_WORK

    def log_upper(self, eps: float) -> float:
        """log of a number that is at least delta(eps)."""
        shares = [law.log_upper(eps) for law in self._laws]
        return float(np.logaddexp.reduce([*shares, self._log_removed]))

    def log_lower(self, eps: float) -> float:
        """log of a number that is at most delta(eps); -inf if nothing better is known."""
        shares = np.logaddexp.reduce([law.log_lower(eps) for law in self._laws])
        return log_difference(float(shares), self._log_removed)


def _split_level(estimate: Estimate, eps: float) -> float:
    """The first of eps, 2 eps, 4 eps, ... that hardly any step exceeds; infinite at eps = 0."""
    level = eps if eps > 0.0 else math.inf
    while level < estimate.reach and estimate.log_jump(level, 0.0) >= MAX_JUMP:
        level *= 2.0
    return level


def _jump_settings(
    estimate: Estimate, edge: float, eps: float, safe: float, log_delta: float, width: float
) -> tuple[Settings, float]:
    """Settings for the law with some loss above ``edge`` >= ``eps``, and their work."""

    def moment(lam: float) -> float:
        return estimate.log_jump(edge, lam)

    tilts = np.geomspace(1e-3, 1e3, 61) / edge
    exponents = [moment(t) - t * eps - math.log(t) - math.log1p(t) for t in tilts]
    saddle = float(tilts[int(np.argmin(exponents))])
    mixture = estimate.mixture
    shift = float(mixture.count @ -np.log1p(-mixture.rate[mixture.index].max(axis=1)))
    clear = (edge - eps - shift) / CLEARANCE
    if edge >= RATIO * eps and clear > 0.0:
        width = max(width, (saddle + 1.0) * clear**2)
    settings, _, work = choose_settings(
        estimate, moment, saddle, eps, safe, log_delta, moment(0.0), width
    )
    return settings, work

"""One direction of a composition as one or two laws, each on its own contour.

Where single steps can have losses far larger than typical ones (small rate, little noise), no
single tilt suits both.  Then the outcomes of a step are divided at the loss ``level``: one law
holds the compositions without any step above it, the other those with at least one.  Both are
non-negative measures and delta is the sum of their shares, so each may use its own tilt, window
and smoothing.
"""

from __future__ import annotations

import math

import numpy as np

from diminuendo.accounting.subsampled.composition import Law, jump_law, log_difference, whole_law
from diminuendo.accounting.subsampled.estimate import MAX_WORK, Estimate, choose_settings
from diminuendo.accounting.subsampled.transform import outcome_probability, split_range

SPLIT_WORK = 3e7
MAX_JUMP = -1.0


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
        if heavy and estimate.remove and guess > 0.0 and estimate.log_jump(guess, 0.0) < MAX_JUMP:
            self._laws = self._split(estimate, guess, safe, log_delta, width)
        else:
            self._laws = [whole_law(mixture, estimate.bounds, settings, remove=estimate.remove)]

    def _split(
        self, estimate: Estimate, level: float, safe: float, log_delta: float, width: float
    ) -> list[Law]:
        mixture = estimate.mixture
        body, jump = split_range(mixture.mu, mixture.rate, estimate.bounds, level)
        inner = Estimate(mixture, body, remove=True)
        saddle = inner.tilt_for_epsilon(level)
        settings, _, work = choose_settings(
            inner, inner.log_psi, saddle, level, safe, log_delta, 0.0, width
        )
        laws = [whole_law(mixture, body, settings, remove=True)]
        self.tilt = settings.tilt

        def moment(lam: float) -> float:
            return estimate.log_jump(level, lam)

        tilts = np.geomspace(1e-3, 1e3, 61) / level
        exponents = [moment(t) - t * level - math.log(t) - math.log1p(t) for t in tilts]
        saddle = float(tilts[int(np.argmin(exponents))])
        total = moment(0.0)
        settings, _, more = choose_settings(
            estimate, moment, saddle, level, safe, log_delta, total, width
        )
        self.work = min(work, MAX_WORK) + min(more, MAX_WORK)
        self.exhausted = max(work, more) > MAX_WORK
        return [*laws, jump_law(mixture, body, jump, settings)]

    def log_upper(self, eps: float) -> float:
        """log of a number that is at least delta(eps)."""
        shares = [law.log_upper(eps) for law in self._laws]
        return float(np.logaddexp.reduce([*shares, self._log_removed]))

    def log_lower(self, eps: float) -> float:
        """log of a number that is at most delta(eps); -inf if nothing better is known."""
        shares = np.logaddexp.reduce([law.log_lower(eps) for law in self._laws])
        return log_difference(float(shares), self._log_removed)

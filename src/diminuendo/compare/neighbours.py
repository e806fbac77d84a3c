"""How well one trained model tells whether an example was there: a lower bound on ε.

Many models are trained at once, half of them on data with one example that contradicts all the
others, half without it. Part of its features are its own, so that nothing else holds it back.
Along the direction in which the first half of either kind differ, a threshold is chosen; how often
the other half lie beyond it bounds ε from below, with exact binomial limits. Nothing is assumed of
the method. Where Gaussian noise is added in the end, how far the two kinds lie apart says more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from diminuendo._validate import Vector
from diminuendo.audit import statistics
from diminuendo.audit.statistics import Flags
from diminuendo.budget import Budget, gaussian_epsilon
from diminuendo.compare.lesson import Settings
from diminuendo.compare.models import Linear
from diminuendo.compare.private import Private

_EXAMPLES, _FEATURES = 40, 2
_ODD = (0.5, 0.8660254)


def epsilon_lower(
    run: Callable[[Private, Settings], Tensor],
    settings: Settings,
    budget: Budget,
    *,
    models: int,
    error: float,
    seed: int,
    gaussian: bool,
) -> float:
    """ε is at least this, but with probability `error`; if the noise is Gaussian, where that is
    said."""
    x = torch.zeros(models, _EXAMPLES, _FEATURES)
    x[:, :, 0] = 1.0
    x[:, 0] = torch.tensor(_ODD)
    y = torch.zeros(models, _EXAMPLES, dtype=torch.int64)
    y[:, 0] = 1
    present = torch.arange(models) % 2 == 0
    x[~present, 0] = 0.0  # an example without features adds nothing
    private = Private(
        Linear(_FEATURES, 2), x, y, budget, seeds=range(seed, seed + models), largest_norm=1.0
    )
    with torch.no_grad():
        theta = run(private, settings).double()
    first = torch.arange(models) < models // 2
    chosen, others = theta[first], theta[~first]
    direction = chosen[present[first]].mean(0) - chosen[~present[first]].mean(0)
    if gaussian:
        apart = statistics.effect(
            (others @ direction).numpy()[None], present[~first].numpy()[None], error
        )
        return gaussian_epsilon(apart.lower, budget.delta) if apart.lower > 0 else 0.0
    return _bound(
        (chosen @ direction).numpy(),
        present[first].numpy(),
        (others @ direction).numpy(),
        present[~first].numpy(),
        budget.delta,
        error,
    )


def _bound(
    scores: Vector,
    there: Flags,
    new_scores: Vector,
    new_there: Flags,
    delta: float,
    error: float,
) -> float:
    """The larger of two bounds, from a high and from a low threshold chosen on the first scores."""
    found = 0.0
    for sign in (1.0, -1.0):
        with_it, without = (
            (sign * scores[there], sign * scores[~there])
            if sign > 0
            else (sign * scores[~there], sign * scores[there])
        )
        promised = [
            (_from_counts(with_it > at, without > at, delta, error / 2), at)
            for at in np.quantile(without, np.linspace(0.5, 0.999, 60))
        ]
        threshold = max(promised)[1]
        hit, missed = (sign * new_scores[new_there == (w == (sign > 0))] for w in (True, False))
        found = max(found, _from_counts(hit > threshold, missed > threshold, delta, error / 2))
    return found


def _from_counts(hits: Flags, alarms: Flags, delta: float, error: float) -> float:
    """ln((P(hit) − δ)/P(alarm)) at the limits of two binomial intervals, each half the error."""
    low = float(stats.beta.ppf(error / 2, hits.sum(), hits.size - hits.sum() + 1))
    high = float(stats.beta.ppf(1 - error / 2, alarms.sum() + 1, alarms.size - alarms.sum()))
    if not math.isfinite(low) or low <= delta or not high < 1:
        return 0.0
    return max(math.log((low - delta) / high), 0.0)

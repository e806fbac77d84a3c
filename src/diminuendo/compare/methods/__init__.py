"""All methods of the comparison, by name, in the order of the tables."""

from __future__ import annotations

from diminuendo.compare.method import Method
from diminuendo.compare.methods import (
    adaptive,
    adaptive_rates,
    banded,
    batches,
    clipping,
    convex,
    correlated,
    learned,
    no_claim,
    schedules,
    stochastic,
    uniform,
    variance,
)

_FILES = (
    uniform,
    schedules,
    adaptive,
    adaptive_rates,
    learned,
    clipping,
    batches,
    variance,
    convex,
    stochastic,
    correlated,
    banded,
    no_claim,
)
METHODS: dict[str, Method] = {one.key: one for file in _FILES for one in file.METHODS}
BASELINE, STRONG = "uniform", "uniform-momentum"

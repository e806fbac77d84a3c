"""All methods of the comparison, by name, in the order of the tables."""

from __future__ import annotations

from diminuendo.compare.method import Method
from diminuendo.compare.methods import (
    adaptive,
    batches,
    clipping,
    convex,
    correlated,
    no_claim,
    schedules,
    uniform,
    variance,
)

_FILES = (
    uniform,
    schedules,
    adaptive,
    clipping,
    batches,
    variance,
    convex,
    correlated,
    no_claim,
)
METHODS: dict[str, Method] = {one.key: one for file in _FILES for one in file.METHODS}
BASELINE, STRONG = "uniform", "uniform-momentum"

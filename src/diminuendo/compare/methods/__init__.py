"""All methods of the comparison, by name, in the order of the tables."""

from __future__ import annotations

from dataclasses import replace

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
    whitening,
)
from diminuendo.compare.methods.reported import CHECKED, NOT_COMPARED, REPORTED

_FILES = (
    uniform,
    whitening,
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


def _told(method: Method) -> Method:
    """With what its paper reports and what was checked of it."""
    return replace(
        method,
        reported=REPORTED.get(method.key, NOT_COMPARED),
        checked=method.checked or CHECKED.get(method.key, ""),
    )


METHODS: dict[str, Method] = {one.key: _told(one) for file in _FILES for one in file.METHODS}
BASELINE, STRONG = "uniform", "uniform-momentum"

"""q_t, how much step t's noise hurts the end: vectors q_1…q_T of positive numbers.

All are pure functions of their arguments. An influence is scaled so that the noise part of the
bound is α·R·Σ_t q_t σ_t² (times η₀ for momentum); schedules depend on its ratios alone. Where q_t
would fall below `FLOOR` of its scale it is held there, so that a million steps neither underflow
nor give an infinite σ; the budget and the bound are the same to double precision.
"""

from __future__ import annotations

from typing import Any

from diminuendo import _later
from diminuendo.influence.closed_forms import (
    exponential,
    gradient_descent,
    momentum,
    momentum_split,
    momentum_two_phase,
)
from diminuendo.influence.floor import FLOOR
from diminuendo.influence.learning_rates import (
    constant,
    cosine,
    learning_rates,
    linear,
    step_decay,
    warm_up,
)
from diminuendo.influence.measured import from_file, from_values
from diminuendo.influence.spectral import Response, response, spectrum

__all__ = [
    "FLOOR",
    "Response",
    "constant",
    "cosine",
    "exponential",
    "from_file",
    "from_values",
    "gradient_descent",
    "learning_rates",
    "linear",
    "measure",
    "momentum",
    "momentum_split",
    "momentum_two_phase",
    "response",
    "spectrum",
    "spectrum_of",
    "step_decay",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """`measure` and `spectrum_of`, which need torch, load when they are first used."""
    return _later(__name__, name)

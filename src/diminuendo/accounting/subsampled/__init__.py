"""Poisson-subsampled Gaussian steps: certified bounds on ε and δ (see docs/accounting.md)."""

from diminuendo.accounting.subsampled.bounds import (
    delta_bounds,
    epsilon_bounds,
    epsilon_upper,
    running_epsilon,
)
from diminuendo.accounting.subsampled.model import DeltaModel

__all__ = [
    "DeltaModel",
    "delta_bounds",
    "epsilon_bounds",
    "epsilon_upper",
    "running_epsilon",
]

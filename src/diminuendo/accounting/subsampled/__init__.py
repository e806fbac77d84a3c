"""Poisson-subsampled Gaussian steps: certified bounds on ε and δ (see docs/accounting.md)."""

from diminuendo.accounting.subsampled.bounds import (
    delta_bounds,
    epsilon_bounds,
    epsilon_upper,
    running_epsilon,
)
from diminuendo.accounting.subsampled.price import PriceCurve, price_curve

__all__ = [
    "PriceCurve",
    "delta_bounds",
    "epsilon_bounds",
    "epsilon_upper",
    "price_curve",
    "running_epsilon",
]

"""Intervals cover the mean, and pairs cancel what they share."""

from __future__ import annotations

import numpy as np
import pytest

from diminuendo.errors import InputError
from diminuendo.replicas.statistics import examples_needed, interval, paired


def test_intervals_cover_as_often_as_they_say() -> None:
    """2,000 intervals from 8 Gaussians each: 95% ± 2.4% is five standard errors of the count."""
    draws = np.random.default_rng(0).normal(3.0, 2.0, (2000, 8))
    found = [interval(row) for row in draws]
    covered = np.mean([one.low <= 3.0 <= one.high for one in found])
    assert abs(covered - 0.95) < 0.024


def test_runs_that_failed_are_left_out() -> None:
    assert interval([1.0, np.nan, 3.0]) == interval([1.0, 3.0])
    assert np.isnan(interval([np.nan]).mean)
    assert interval([2.0]) == (2.0, np.inf)


def test_pairs_cancel_what_they_share() -> None:
    rng = np.random.default_rng(1)
    shared, noise = rng.normal(0, 10, 50), rng.normal(0, 0.1, 50)
    difference = paired(shared + 0.5 + noise, shared)
    assert difference.half < 0.05
    assert difference.low < 0.5 < difference.high
    with pytest.raises(InputError):
        paired([1.0, 2.0], [1.0])


def test_examples_needed_lie_on_the_line_over_log_n() -> None:
    grid, reached = [100, 1000, 10_000], [0.5, 0.7, 0.8]
    assert examples_needed(grid, reached, 0.7) == pytest.approx(1000)
    assert examples_needed(grid, reached, 0.6) == pytest.approx(10**2.5)
    assert examples_needed(grid, reached, 0.75) == pytest.approx(10**3.5)
    assert examples_needed(grid, reached, 0.49) is None
    assert examples_needed(grid, reached, 0.81) is None

"""A second referee: Opacus' PRV accountant, whose answer carries an error of its own."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from diminuendo import accounting

ERROR = 0.01


@pytest.mark.parametrize(
    ("phases", "delta"),
    [
        ([(1.0, 0.01, 500)], 1e-5),
        ([(0.7, 0.02, 50)], 1e-6),
        ([(1.5, 0.05, 100), (0.9, 0.05, 40)], 1e-5),
        ([(2.0, 0.2, 60), (1.2, 0.1, 30), (4.0, 0.5, 20)], 1e-6),
    ],
)
def test_brackets_meet(phases: list[tuple[float, float, int]], delta: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant

        accountant = PRVAccountant()
        for sigma, rate, count in phases:
            accountant.history.append((sigma, rate, count))
        theirs = accountant.get_epsilon(delta, eps_error=ERROR)
    sigmas, rates, counts = map(np.array, zip(*phases, strict=True))
    ours = accounting.bracket(np.repeat(sigmas, counts), delta, np.repeat(rates, counts))
    assert theirs - 2 * ERROR <= ours.upper
    assert ours.lower <= theirs

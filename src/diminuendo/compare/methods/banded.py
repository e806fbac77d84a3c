"""Correlated noise where an example takes part every b-th step: banded matrix factorisation."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import Tensor

from diminuendo.accounting.calibrate import calibrate
from diminuendo.budget import Budget
from diminuendo.compare import factors, mixed
from diminuendo.compare.clips import Flat
from diminuendo.compare.method import COMMON, Method, Range, Settings
from diminuendo.compare.private import Private

_FAMILY = "correlated noise"
_CLAIM = (
    "Examples take turns in b fixed groups, and the factor has b bands: an example meets T/b "
    "Gaussian steps of noise multiplier σ/‖column‖, Poisson-sampled where `rate` is below 1, by "
    "the certified accountant (the proof is in `compare.mixed`)."
)
_SPACE = {
    **COMMON,
    "band": Range(choices=(2, 5, 10)),
    "rate": Range(choices=(1.0, 0.5)),
}


@lru_cache(maxsize=512)
def _sigma(norms: tuple[float, ...], budget: Budget, rate: float) -> float:
    """σ at which releases of noise multipliers σ/norm cost the budget."""
    shape = 1 / np.array(norms)
    return float(calibrate(shape, budget, np.full(len(norms), rate))[0] / shape[0]) * (1 + 1e-9)


def _run(private: Private, settings: Settings, gamma: float | None) -> Tensor:
    steps, band, rate = int(settings["steps"]), int(settings["band"]), settings["rate"]
    factor = factors.best_factor(steps, band, gamma)
    norms = tuple(mixed.block_norms(factor, band))
    sigma = _sigma(norms, private.budget, rate)
    noise = mixed.in_turns(private, factor, sigma, band, rate)
    theta, rule = private.start(), Flat(settings["clip"])
    for t in range(steps):
        theta = theta - settings["lr"] * noise.gradient(t, theta, rule)
    return theta


METHODS = (
    Method(
        key="banded-prefix",
        title="banded noise, examples in turns",
        family=_FAMILY,
        paper="Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu 2023 (BandMF)",
        claim=_CLAIM,
        run=lambda private, settings: _run(private, settings, None),
        space=_SPACE,
        differs="Groups are by row number, and the factor's column norms may differ from block to "
        "block.",
    ),
    Method(
        key="banded-influence",
        title="banded noise for the final loss",
        family=_FAMILY,
        paper="this library: BandMF with a factor for the noise in the final loss",
        claim=_CLAIM,
        run=lambda private, settings: _run(private, settings, settings["gamma"]),
        space={**_SPACE, "gamma": Range(choices=(0.8, 0.9, 0.95, 0.98))},
    ),
)

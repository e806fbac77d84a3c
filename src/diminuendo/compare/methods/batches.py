"""Poisson-sampled batches: small, large, and growing."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import Tensor

from diminuendo.accounting.calibrate import calibrate
from diminuendo.budget import Budget
from diminuendo.compare import descent
from diminuendo.compare.method import COMMON, Method, Range, Settings
from diminuendo.compare.private import Private

_CLAIM = "T Poisson-sampled Gaussian steps, fixed in advance, by the certified accountant."
_SMALL = {
    **COMMON,
    "steps": Range(choices=(60, 120, 240)),
    "rate": Range(choices=(0.05, 0.1, 0.2)),
}


@lru_cache(maxsize=512)
def calibrated(rates: tuple[float, ...], budget: Budget, powers: float) -> tuple[float, ...]:
    """Noise multipliers ∝ rate^power, on the budget."""
    shape = np.array(rates) ** powers
    return tuple(float(s) for s in calibrate(shape, budget, np.array(rates)))


def _momentum(private: Private, settings: Settings, lr: float | list[float]) -> Tensor:
    rates = (settings["rate"],) * int(settings["steps"])
    sigmas = calibrated(rates, private.budget, 0.0)
    update = descent.heavy_ball(lr)
    return descent.descend(private, sigmas, settings["clip"], update, rates=rates)


def _constant(private: Private, settings: Settings) -> Tensor:
    return _momentum(private, settings, settings["lr"])


def _falling(private: Private, settings: Settings) -> Tensor:
    lr = descent.falling(settings["lr"], int(settings["steps"]))
    return _momentum(private, settings, lr)


def _growing(private: Private, settings: Settings) -> Tensor:
    """Four stages of equal length, whose batches grow to the full one."""
    steps = int(settings["steps"])
    first = settings["rate"]
    stages = [first ** (1 - k / 3) for k in range(4)]
    rates = tuple(stages[4 * t // steps] for t in range(steps))
    sigmas = calibrated(rates, private.budget, 0.0)
    update = descent.plain(settings["lr"])
    return descent.descend(private, sigmas, settings["clip"], update, rates=rates)


METHODS = (
    Method(
        key="small-batches",
        title="small batches, momentum",
        family="batches",
        paper="Abadi et al. 2016 (sampling), customary optimiser",
        claim=_CLAIM,
        run=_falling,
        space=_SMALL,
    ),
    Method(
        key="batches-heavy-ball",
        title="small batches, momentum, constant rate",
        family="batches",
        paper="Tramèr and Boneh 2021 (the optimiser; their features are a matter of the data)",
        claim=_CLAIM,
        run=_constant,
        space=_SMALL,
        differs="Momentum 0.9 with bias correction; the certified account in place of Rényi's.",
    ),
    Method(
        key="large-batches",
        title="large batches, momentum",
        family="batches",
        paper="e.g. Anil, Ghazi, Gupta, Kumar and Manurangsi 2022; De et al. 2022",
        claim=_CLAIM,
        run=_falling,
        space={**COMMON, "rate": Range(choices=(0.4, 0.6, 0.8))},
    ),
    Method(
        key="snowball",
        title="growing batches",
        family="batches",
        paper="Feldman, Koren and Talwar 2020 (snowball)",
        claim=_CLAIM,
        run=_growing,
        space={**COMMON, "rate": Range(choices=(0.1, 0.2, 0.4))},
        differs="Theirs is one pass over disjoint batches of a smooth convex loss, private by "
        "iteration. Here batches are Poisson samples that grow in four stages, the noise on the "
        "sum is uniform, and every step is accounted, so that any model can be trained.",
    ),
)

"""Uniform noise: the baseline, its strong form, and adaptive optimisers on top of it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from diminuendo.compare import descent
from diminuendo.compare.method import COMMON, Method, Range, Settings, onto_budget
from diminuendo.compare.private import Private

_CLAIM = "T full-batch Gaussian steps of equal noise: exactly μ-GDP."
_SMALL_LR = {"lr": Range(0.01, 1.0), "clip": COMMON["clip"], "steps": COMMON["steps"]}


def _sigmas(private: Private, settings: Settings) -> list[float]:
    return onto_budget(private, np.ones(int(settings["steps"])))


def _plain(private: Private, settings: Settings) -> Tensor:
    update = descent.plain(settings["lr"])
    return descent.descend(private, _sigmas(private, settings), settings["clip"], update)


def _momentum(private: Private, settings: Settings) -> Tensor:
    sigmas = _sigmas(private, settings)
    update = descent.heavy_ball(descent.falling(settings["lr"], len(sigmas)))
    return descent.descend(private, sigmas, settings["clip"], update)


def _heavy_ball(private: Private, settings: Settings) -> Tensor:
    update = descent.heavy_ball(settings["lr"])
    return descent.descend(private, _sigmas(private, settings), settings["clip"], update)


def _falling(private: Private, settings: Settings) -> Tensor:
    sigmas = _sigmas(private, settings)
    update = descent.plain(descent.falling(settings["lr"], len(sigmas)))
    return descent.descend(private, sigmas, settings["clip"], update)


def _adam(private: Private, settings: Settings) -> Tensor:
    update = descent.adam(settings["lr"])
    return descent.descend(private, _sigmas(private, settings), settings["clip"], update)


def _adam_corrected(private: Private, settings: Settings) -> Tensor:
    sigmas = _sigmas(private, settings)
    std = settings["clip"] / private.facts.examples
    update = descent.adam(
        settings["lr"],
        noise_variance=lambda t: (sigmas[t] * std) ** 2,
        floor=settings["floor"] * sigmas[0] * std,
    )
    return descent.descend(private, sigmas, settings["clip"], update)


def _adagrad(private: Private, settings: Settings) -> Tensor:
    update = descent.adagrad(settings["lr"])
    return descent.descend(private, _sigmas(private, settings), settings["clip"], update)


METHODS = (
    Method(
        key="uniform",
        title="uniform noise",
        family="uniform",
        paper="Bassily, Smith and Thakurta 2014; Abadi et al. 2016",
        claim=_CLAIM,
        run=_plain,
        differs="Full batches, and the exact Gaussian account in place of the moments'.",
    ),
    Method(
        key="uniform-falling",
        title="uniform, falling rate",
        family="uniform",
        paper="customary",
        claim=_CLAIM,
        run=_falling,
        differs="A cosine, without momentum.",
    ),
    Method(
        key="uniform-momentum",
        title="uniform, momentum, falling rate",
        family="uniform",
        paper="customary (e.g. De et al. 2022)",
        claim=_CLAIM,
        run=_momentum,
        differs="Momentum 0.9 with bias correction and a cosine.",
    ),
    Method(
        key="uniform-heavy-ball",
        title="uniform, momentum, constant rate",
        family="uniform",
        paper="customary (e.g. Tramèr and Boneh 2021)",
        claim=_CLAIM,
        run=_heavy_ball,
        differs="Momentum 0.9 with bias correction.",
    ),
    Method(
        key="adagrad",
        title="DP-AdaGrad",
        family="uniform",
        paper="Zhou, Chen, Hong, Wu and Banerjee 2020",
        claim=_CLAIM,
        run=_adagrad,
        space=_SMALL_LR,
        differs="Full batches; their generalisation argument plays no part.",
    ),
    Method(
        key="adam",
        title="DP-Adam",
        family="uniform",
        paper="Zhou, Chen, Hong, Wu and Banerjee 2020",
        claim=_CLAIM,
        run=_adam,
        space=_SMALL_LR,
        differs="Full batches.",
    ),
    Method(
        key="adam-corrected",
        title="DP-Adam, the noise's bias removed",
        family="uniform",
        paper="Tang, Shpilevskiy and Lécuyer 2024 (DP-AdamBC)",
        claim=_CLAIM,
        run=_adam_corrected,
        space={**_SMALL_LR, "floor": Range(0.03, 3.0)},
        differs="The floor under the second moment is tuned in units of the noise.",
    ),
)

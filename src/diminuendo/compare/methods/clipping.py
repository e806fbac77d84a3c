"""Other ways to bound one example's gradient."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from diminuendo.compare import clips, descent
from diminuendo.compare.method import COMMON, Method, Range, Settings, onto_budget
from diminuendo.compare.private import Private
from diminuendo.compare.scaled import scaled_gradient

_CLAIM = "T full-batch Gaussian steps of equal noise; every rule keeps a contribution below C."
_COUNTS = 0.05
"""The share of the budget that pays for the counts of quantile clipping."""


def _with(
    rule: type[clips.Automatic] | type[clips.PerLayer], private: Private, s: Settings
) -> Tensor:
    sigmas = onto_budget(private, np.ones(int(s["steps"])))
    return descent.descend(private, sigmas, rule(s["clip"]), descent.plain(s["lr"]))


def _psac(private: Private, settings: Settings) -> Tensor:
    sigmas = onto_budget(private, np.ones(int(settings["steps"])))
    rule = clips.PerSample(settings["clip"], settings["r"])
    return descent.descend(private, sigmas, rule, descent.plain(settings["lr"]))


def _quantile(private: Private, settings: Settings) -> Tensor:
    """C moves geometrically until the wished share of gradients is below it."""
    steps = int(settings["steps"])
    sigma = math.sqrt(steps / private.budget.R / (1 - _COUNTS)) * (1 + 1e-9)
    count_sigma = math.sqrt(steps / private.budget.R / _COUNTS) * (1 + 1e-9)
    theta = private.start()
    bound = torch.full_like(theta[:, 0], settings["clip"])
    for _ in range(steps):
        gradient = private.gradient(theta, clips.Flat(bound), sigma)
        below = private.count_below(theta, bound, count_sigma)
        theta = theta - settings["lr"] * gradient
        bound = bound * torch.exp(-0.2 * (below.clamp(0, 1) - settings["quantile"]))
    return theta


def _adaclip(private: Private, settings: Settings) -> Tensor:
    """Each coordinate is shifted by its running mean and scaled by its running deviation."""
    steps, examples = int(settings["steps"]), private.facts.examples
    sigmas = onto_budget(private, np.ones(steps))
    theta = private.start()
    mean = torch.zeros_like(theta)
    deviation = torch.full_like(theta, settings["clip"] / math.sqrt(theta.shape[1]))
    least, most = (deviation[0, 0] ** 2 * k for k in (1e-2, 1e2))
    for sigma in sigmas:
        scale = deviation.sqrt() * deviation.sum(1, keepdim=True).sqrt()
        gradient = scaled_gradient(private, theta, mean, scale, sigma)
        theta = theta - settings["lr"] * gradient
        noise = (sigma * scale / examples) ** 2
        spread = ((gradient - mean) ** 2 * examples - noise * examples).clamp(least, most)
        mean = 0.9 * mean + 0.1 * gradient
        deviation = (0.9 * deviation**2 + 0.1 * spread).sqrt()
    return theta


METHODS = (
    Method(
        key="quantile",
        title="clip norm follows a quantile",
        family="clipping",
        paper="Andrew, Thakkar, McMahan and Ramaswamy 2021; Thakkar, Andrew and McMahan 2019",
        claim="Gradient and count of every step are Gaussian releases; the counts take 5% of the "
        "budget. C is chosen by what was released, and the noise is in units of C.",
        run=_quantile,
        space={**COMMON, "quantile": Range(0.2, 0.9, "linear")},
        differs="Examples in place of users; full batches.",
        checked="that the clip norm reaches the quantile, in the tests",
    ),
    Method(
        key="auto-s",
        title="automatic clipping",
        family="clipping",
        paper="Bu, Wang, Zha and Karypis 2023 (AUTO-S, γ = 0.01)",
        claim=_CLAIM,
        run=lambda private, s: _with(clips.Automatic, private, s),
    ),
    Method(
        key="psac",
        title="per-sample adaptive clipping",
        family="clipping",
        paper="Xia, Shen, Yao, Fu, Xu, Xu and Fu 2023 (DP-PSAC)",
        claim=_CLAIM,
        run=_psac,
        space={**COMMON, "r": Range(0.01, 1.0)},
    ),
    Method(
        key="per-layer",
        title="clipping layer by layer",
        family="clipping",
        paper="McMahan, Ramage, Talwar and Zhang 2018",
        claim=_CLAIM + " Layers get C/√layers each.",
        run=lambda private, s: _with(clips.PerLayer, private, s),
        differs="On a model of one layer it is the same as uniform noise.",
    ),
    Method(
        key="adaclip",
        title="coordinate-wise clipping",
        family="clipping",
        paper="Pichapati, Suresh, Yu, Reddi and Kumar 2019 (AdaCliP)",
        claim="T Gaussian releases of sums of vectors of norm at most 1; shift and scale come from "
        "what was released before.",
        run=_adaclip,
        space={**COMMON, "clip": Range(0.01, 1.0)},
        layered=True,
        differs="Full batches: the deviation of one example's gradient is estimated from that of "
        "the mean over N, and kept within a factor of 10 of its start.",
    ),
)

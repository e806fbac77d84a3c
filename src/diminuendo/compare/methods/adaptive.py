"""Noise by what was seen: what is looked at is released with noise and paid for like a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diminuendo import _validate
from diminuendo.compare.clips import Flat
from diminuendo.compare.method import COMMON, Method, Range, Settings
from diminuendo.compare.private import Private

_FILTER = (
    "Noise chosen on the way, under a Gaussian filter (Smith and Thakurta 2022): Σ 1/σ² of all "
    "releases stays within the budget."
)
_MOST_STEPS = 400


def _validation(private: Private, settings: Settings) -> Tensor:
    """σ is multiplied by `decay` when the noisy accuracy has not risen since the last look."""
    every, share = 5, 0.1
    final = []
    for one in private.each():
        steps = int(settings["steps"])
        sigma = math.sqrt(steps / one.budget.R / (1 - share))
        look = math.sqrt(steps / every / one.budget.R / share)
        theta, before = one.start(), -1.0
        for t in range(_MOST_STEPS):
            if not one.fits(sigma):
                break
            theta = theta - settings["lr"] * one.gradient(theta, Flat(settings["clip"]), sigma)
            if (t + 1) % every == 0 and one.fits(look):
                now = float(one.accuracy(theta, look)[0])
                if now - before < 0.01:
                    sigma *= settings["decay"]
                before = now
        final.append(theta)
    return torch.cat(final)


def _adaptive_share(private: Private, settings: Settings) -> Tensor:
    """A step is taken only if the noisy losses say that it descends; else the gradient is
    measured again with a larger share and averaged."""
    final = []
    looks = _validate.real(
        "looks", settings["looks"], above=0, below=1, remedy="It is a share of the budget."
    )
    for one in private.each():
        steps = int(settings["steps"])
        sigma = math.sqrt(steps / one.budget.R / (1 - looks))
        look = math.sqrt(steps / one.budget.R / looks)
        most = 2 * math.log(one.facts.classes)
        theta, rule = one.start(), Flat(settings["clip"])
        lengths = [0.0] + [settings["lr"] * 2.0**k for k in (-3, -2, -1, 0, 1)]
        for _ in range(_MOST_STEPS):
            if not one.fits(sigma):
                break
            gradient = one.gradient(theta, rule, sigma)
            weight = sigma**-2
            for _ in range(3):
                if not one.fits(look):
                    break
                candidates = [theta - length * gradient for length in lengths]
                best = int(one.mean_losses(candidates, most, look)[0].argmin())
                if best:
                    theta = candidates[best]
                    break
                sigma /= math.sqrt(1 + settings["more"])
                if not one.fits(sigma):
                    break
                again = one.gradient(theta, rule, sigma)
                gradient = (weight * gradient + sigma**-2 * again) / (weight + sigma**-2)
                weight += sigma**-2
        final.append(theta)
    return torch.cat(final)


METHODS = (
    Method(
        key="validation",
        title="noise falls when accuracy stalls",
        family="noise by what was seen",
        paper="Yu, Liu, Pu, Gursoy and Truex 2019 (validation-based decay)",
        claim=_FILTER + " The looks take a tenth of it.",
        run=_validation,
        alone=True,
        space={**COMMON, "decay": Range(0.5, 0.95, "linear")},
        differs="They validate on public data, or free of charge. Here the accuracy on the "
        "training data is released with noise every five steps, and paid for.",
    ),
    Method(
        key="adaptive-share",
        title="adaptive share per step",
        family="noise by what was seen",
        paper="Lee and Kifer 2018",
        claim=_FILTER,
        run=_adaptive_share,
        alone=True,
        space={**COMMON, "more": Range(0.05, 0.5), "looks": Range(0.1, 0.5)},
        differs="The step length is chosen from the noisy losses of six candidates, released as "
        "one Gaussian vector, where they take a noisy maximum.",
    ),
)

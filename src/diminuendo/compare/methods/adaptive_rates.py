"""Learning rates and noise for each coordinate, by what was released before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diminuendo.compare.method import COMMON, Method, Range, Settings, onto_budget
from diminuendo.compare.private import Private
from diminuendo.compare.scaled import scaled_gradient

_KEPT = 0.9
_WIDEST = 4.0
"""A coordinate's noise stays within this factor of the mean coordinate's."""


def _adadp(private: Private, settings: Settings) -> Tensor:
    """Coordinates that were large get more noise and shorter steps, both in units of the root of
    their running mean square; it starts alike for all."""
    examples, clip = private.facts.examples, settings["clip"]
    theta = private.start()
    start = clip / theta.shape[1] ** 0.5
    square = torch.full_like(theta, start**2)
    for sigma in onto_budget(private, np.ones(int(settings["steps"]))):
        size = (square + (settings["floor"] * start) ** 2).sqrt()
        typical = size.square().mean(1, keepdim=True).sqrt()
        relative = (size / typical).clamp(1 / _WIDEST, _WIDEST)
        scale = clip * relative
        gradient = scaled_gradient(private, theta, torch.zeros_like(theta), scale, sigma)
        noise = (sigma * scale / examples) ** 2
        theta = theta - settings["lr"] * gradient / relative
        square = _KEPT * square + (1 - _KEPT) * (gradient**2 - noise).clamp(min=0)
    return theta


METHODS = (
    Method(
        key="adadp",
        title="noise and rate for each coordinate",
        family="noise by what was seen",
        paper="Xu, Shi, Liu, Zhao and Chen 2020 (ADADP)",
        claim="T Gaussian releases of equal noise, of sums of vectors of norm at most 1 in "
        "coordinates that were scaled by what was released before.",
        run=_adadp,
        space={**COMMON, "floor": Range(0.03, 3.0)},
        layered=True,
        differs="An example is clipped in the coordinates in which the noise is alike, so that the "
        "plain Gaussian account holds; the estimates leave the noise's own share out. Full "
        "batches.",
    ),
)

"""Variance reduction: a gradient at an anchor, and clipped differences from it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from diminuendo.compare.clips import Flat
from diminuendo.compare.method import COMMON, Method, Range, Settings, onto_budget
from diminuendo.compare.private import Private


def _svrg(private: Private, settings: Settings) -> Tensor:
    inner = int(settings["inner"])
    epochs = max(int(settings["steps"]) // (inner + 1), 1)
    sigmas = iter(onto_budget(private, np.ones(epochs * (inner + 1))))
    theta = private.start()
    small = Flat(settings["clip"] * settings["difference"])
    for _ in range(epochs):
        anchor = theta
        base = private.gradient(anchor, Flat(settings["clip"]), next(sigmas))
        for _ in range(inner):
            change = private.gradient(theta, small, next(sigmas), anchor=anchor)
            theta = theta - settings["lr"] * (base + change)
    return theta


METHODS = (
    Method(
        key="svrg",
        title="DP-SVRG",
        family="variance reduction",
        paper="Wang, Ye and Xu 2017 (DP-SVRG)",
        claim="Full-batch Gaussian steps of equal noise: the anchor's gradient, and clipped "
        "differences of each example's gradients.",
        run=_svrg,
        space={
            **COMMON,
            "inner": Range(choices=(2, 4, 8)),
            "difference": Range(0.05, 0.5),
        },
        convex=True,
        differs="Theirs samples inner gradients and bounds them by a Lipschitz constant; here they "
        "are full batches, and what is gained is a smaller clip norm for the differences.",
    ),
)

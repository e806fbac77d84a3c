"""Private stochastic convex optimisation: for the loss on new examples, not on the given ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diminuendo import _validate
from diminuendo.compare import whole
from diminuendo.compare.clips import Flat
from diminuendo.compare.method import Method, Range, Settings
from diminuendo.compare.methods.batches import calibrated
from diminuendo.compare.private import Private

_FAMILY = "not iterative, for convex losses"
_LONGEST = "It is in units of the longest step for which the claim is proven."


def _project(theta: Tensor, radius: float) -> Tensor:
    length = theta.norm(dim=1, keepdim=True).clamp(min=radius)
    return theta * (radius / torch.as_tensor(length))


def _noisy_sgd(private: Private, settings: Settings) -> Tensor:
    """The average of the iterates of projected descent on Poisson batches, without clipping: no
    gradient is longer than the Lipschitz constant."""
    steps, rate, radius = int(settings["steps"]), settings["rate"], settings["radius"]
    rates = (rate,) * steps
    sigmas = calibrated(rates, private.budget, 0.0)
    private.declare(sigmas, rates)
    rule = Flat(math.sqrt(2) * private.facts.largest_norm)
    theta = private.start()
    average = torch.zeros_like(theta)
    for sigma in sigmas:
        average += theta / steps
        gradient = private.gradient(theta, rule, sigma, rate=rate)
        theta = _project(theta - settings["lr"] * gradient, radius)
    return average


def phases(examples: int, batches: int) -> list[slice]:
    """Disjoint rows of ever fewer examples, half of what is left each, in whole batches."""
    found, start = [], 0
    while (examples - start) // 2 >= batches:
        rows = (examples - start) // 2 // batches * batches
        found.append(slice(start, start + rows))
        start += rows
    return found


def _phased_sgd(private: Private, settings: Settings) -> Tensor:
    """One pass of descent over each phase's rows, then noise on the average of its iterates.

    A step of η ≤ 2/β on a convex loss takes no two points further apart, and the one step that
    holds the example moves by at most η·L/batch: so does the average. Phases share no example,
    so each may use the whole budget.
    """
    batches = int(settings["batches"])
    step = _validate.real("step", settings["step"], above=0, at_most=1, remedy=_LONGEST)
    lipschitz, longest = whole.lipschitz(private), 2 / whole.smoothness(private, 0.0)
    sigma = whole.whole_budget(private)
    theta = private.start()
    for number, rows in enumerate(phases(private.facts.examples, batches)):
        rate = longest * step / 4**number
        batch = (rows.stop - rows.start) // batches
        average = torch.zeros_like(theta)
        for at in range(rows.start, rows.stop, batch):
            theta = theta - rate * private.mean_gradient(theta, slice(at, at + batch))
            average += theta / batches
        theta = private.noised(average, rate * lipschitz / batch, sigma, seen=False)
    return theta


METHODS = (
    Method(
        key="stochastic-convex",
        title="noisy SGD, averaged",
        family=_FAMILY,
        paper="Bassily, Feldman, Talwar and Thakurta 2019 (noisy SGD)",
        claim="T Poisson-sampled Gaussian steps, fixed in advance, by the certified accountant; "
        "the average and the projections are post-processing.",
        run=_noisy_sgd,
        space={
            "lr": Range(0.3, 100.0),
            "radius": Range(1.0, 100.0),
            "steps": Range(choices=(20, 40, 80, 160)),
            "rate": Range(choices=(0.1, 0.3, 0.6)),
        },
        convex=True,
        differs="Batch size, number of steps and radius are tuned on auxiliary data, where they "
        "derive them from ε, N and the dimension. Poisson samples and their exact account in place "
        "of uniform ones and the moments' bound.",
    ),
    Method(
        key="phased-sgd",
        title="one pass in phases",
        family=_FAMILY,
        paper="Feldman, Koren and Talwar 2020 (phased SGD)",
        claim="Phases share no example, so each may use the whole budget: a Gaussian release of "
        "an average whose sensitivity is one step's, η·L/batch.",
        run=_phased_sgd,
        space={
            "step": Range(0.003, 1.0),
            "batches": Range(choices=(2, 5, 10, 20)),
        },
        convex=True,
        releases="noised model",
        differs="Batches in place of single examples, so that a phase has few steps.",
        checked="that no example moves a phase's average further than claimed, in the tests",
    ),
)

"""Noise by a schedule that was fixed before training."""

from __future__ import annotations

import warnings

import numpy as np
from torch import Tensor

from diminuendo import influence
from diminuendo.compare import descent
from diminuendo.compare.clips import Flat
from diminuendo.compare.method import COMMON, Method, Range, Settings, onto_budget
from diminuendo.compare.private import Private
from diminuendo.planning import PlanWarning
from diminuendo.planning import plan as make_plan
from diminuendo.schedules import optimal_shape, shapes

_CLAIM = "T full-batch Gaussian steps with Σ 1/σ_t² = R: exactly μ-GDP, whatever the shape."
_FALL = {**COMMON, "fall": Range(0.1, 0.9)}
_SHAPED = "Our exact account in place of theirs, so every shape has the same (ε, δ)."


def _named(private: Private, settings: Settings, name: str) -> Tensor:
    shape = shapes.falling(name, int(settings["steps"]), settings["fall"])
    update = descent.plain(settings["lr"])
    return descent.descend(private, onto_budget(private, shape), settings["clip"], update)


def _optimal(private: Private, settings: Settings) -> Tensor:
    q = influence.gradient_descent(gamma=settings["gamma"], steps=int(settings["steps"]))
    sigmas = onto_budget(private, optimal_shape(q))
    return descent.descend(private, sigmas, settings["clip"], descent.plain(settings["lr"]))


def _optimal_strong(private: Private, settings: Settings) -> Tensor:
    """The optimal noise for a falling learning rate and the average of heavy-ball momentum."""
    steps = int(settings["steps"])
    rates = np.array(descent.falling(1.0, steps)) + 1e-3
    q = influence.gradient_descent(gamma=settings["gamma"], steps=steps, lr=rates)
    sigmas = onto_budget(private, optimal_shape(q))
    update = descent.heavy_ball(descent.falling(settings["lr"], steps))
    return descent.descend(private, sigmas, settings["clip"], update)


def _dynamic(private: Private, settings: Settings) -> Tensor:
    steps = int(settings["steps"])
    sigmas = onto_budget(private, shapes.falling("exponential", steps, settings["fall"]))
    last = max(steps - 1, 1)

    def rule(t: int) -> Flat:
        return Flat(settings["clip"] * settings["clip_fall"] ** (t / last))

    return descent.descend(private, sigmas, rule, descent.plain(settings["lr"]))


def _joint(private: Private, settings: Settings) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        joint = make_plan(
            private.budget,
            examples=private.facts.examples,
            clip=settings["clip"],
            steps=int(settings["steps"]),
            gamma=settings["gamma"],
            alpha=settings["alpha"],
            lr="joint",
        )
    assert joint.lr is not None
    rates = [float(eta) * settings["lr"] for eta in joint.lr]
    sigmas = [float(sigma) for sigma in joint.sigmas]
    return descent.descend(private, sigmas, settings["clip"], descent.plain(rates))


def _yu(name: str) -> Method:
    return Method(
        key=f"yu-{name}",
        title=f"noise falls, {name} decay",
        family="noise by schedule",
        paper="Yu, Liu, Pu, Gursoy and Truex 2019",
        claim=_CLAIM,
        run=lambda private, settings: _named(private, settings, name),
        space=_FALL,
        differs=_SHAPED + " The decay is tuned as σ_T/σ_1.",
    )


METHODS = (
    Method(
        key="optimal",
        title="optimal schedule",
        family="noise by schedule",
        paper="this library's paper (the lemma: σ_t ∝ q_t^{−1/4})",
        claim=_CLAIM,
        run=_optimal,
        space={**COMMON, "gamma": Range(0.7, 0.99, "linear")},
        checked="the lemma's closed form, in the tests",
    ),
    Method(
        key="optimal-momentum",
        title="optimal, momentum, falling rate",
        family="noise by schedule",
        paper="this library's paper, planned for the learning rates that are used",
        claim=_CLAIM,
        run=_optimal_strong,
        space={**COMMON, "gamma": Range(0.7, 0.99, "linear")},
    ),
    Method(
        key="exponential",
        title="exponential schedule",
        family="noise by schedule",
        paper="this library's paper; the same shape as Yu et al. 2019's exponential decay",
        claim=_CLAIM,
        run=lambda private, settings: _named(private, settings, "exponential"),
        space=_FALL,
    ),
    *(_yu(name) for name in ("time", "step", "polynomial")),
    Method(
        key="dynamic",
        title="noise and clip norm fall",
        family="noise by schedule",
        paper="Du, Li, Feng, Chen, Tang and Xu 2021 (Dynamic DP-SGD)",
        claim=_CLAIM + " The clip norms are fixed in advance and the noise is in their units.",
        run=_dynamic,
        space={**_FALL, "clip_fall": Range(0.1, 1.0)},
        differs="Full batches, and the exact account in place of the extended GDP limit.",
    ),
    Method(
        key="joint",
        title="joint plan of noise and rates",
        family="noise by schedule",
        paper='this library: plan(lr="joint")',
        claim=_CLAIM,
        run=_joint,
        space={
            **COMMON,
            "gamma": Range(0.8, 0.995, "linear"),
            "alpha": Range(1e-5, 1e-2),
        },
    ),
)

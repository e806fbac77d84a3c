"""Noise that was learnt on auxiliary data: a schedule, and a policy that looks at what it released.

Both are learnt by differentiating the final loss through whole trainings on auxiliary data, which
costs no privacy. On the private data the schedule is fixed in advance. The policy decides by what
was released, and its steps share out the budget: each takes a share of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diminuendo._validate import Vector
from diminuendo.compare import descent
from diminuendo.compare.clips import Flat
from diminuendo.compare.lesson import Lesson
from diminuendo.compare.method import Method, Settings, onto_budget
from diminuendo.compare.private import Private

_KNOTS = 6
_NOISE = tuple(f"noise_{k}" for k in range(_KNOTS))
_CLIP = tuple(f"clip_{k}" for k in range(_KNOTS))
_POLICY = ("bias", "slope", "signal")
_REACH = 2.0
"""Logarithms of learnt factors stay within ± this."""


def _knots(steps: int) -> Vector:
    """(T, knots): straight lines between so many knots."""
    at = np.linspace(0, _KNOTS - 1, steps)
    return np.asarray(np.maximum(0, 1 - np.abs(at[:, None] - np.arange(_KNOTS)[None, :])))


def _learn_schedule(lesson: Lesson, settings: Settings) -> dict[str, float]:
    steps, lr, clip = int(settings["steps"]), settings["lr"], settings["clip"]
    knots = torch.from_numpy(_knots(steps)).float().to(lesson.x.device)

    def train(values: Tensor, noises: Sequence[Tensor]) -> Tensor:
        shape, clips = (knots @ values.view(2, _KNOTS).T).clamp(-_REACH, _REACH).exp().T
        sigmas = shape * ((shape**-2).sum() / lesson.budget.R).sqrt()
        theta = lesson.start()
        for t, noise in enumerate(noises):
            theta = theta - lr * lesson.gradient(theta, clip * clips[t], sigmas[t], noise)
        return theta

    found = lesson.learn(2 * _KNOTS, train, steps)
    return dict(zip(_NOISE + _CLIP, found, strict=True))


def _shapes(settings: Settings) -> tuple[Vector, Vector]:
    """Factors on noise and clip norm, (T,) each; 1 where nothing has been learnt."""
    knots = _knots(int(settings["steps"]))
    noise, clip = (
        np.exp(np.clip(knots @ [settings[name] for name in names], -_REACH, _REACH))
        for names in (_NOISE, _CLIP)
    )
    return noise, clip


def _schedule(private: Private, settings: Settings) -> Tensor:
    noise, clip = _shapes(settings)

    def rule(t: int) -> Flat:
        return Flat(settings["clip"] * float(clip[t]))

    update = descent.plain(settings["lr"])
    return descent.descend(private, onto_budget(private, noise), rule, update)


def _share(left: int, adjustment: Tensor) -> Tensor:
    """Which share of the remaining budget a step takes, with so many steps left."""
    if left == 1:
        return torch.ones_like(adjustment)
    return ((-2 * adjustment.clamp(-_REACH, _REACH)).exp() / left).clamp(max=0.9)


def _adjustment(weights: Tensor, progress: float, signal: Tensor) -> Tensor:
    return weights[0] + weights[1] * (2 * progress - 1) + weights[2] * signal


def _signal(gradient: Tensor, deviation: Tensor) -> Tensor:
    """How far the released gradient, (R, parameters), stands out of its noise, in (−1, 1)."""
    noise = deviation.square() * gradient.shape[1]
    return torch.tanh((gradient.square().sum(1) / noise).log() / 2)


def _learn_policy(lesson: Lesson, settings: Settings) -> dict[str, float]:
    steps, lr, clip = int(settings["steps"]), settings["lr"], torch.tensor(settings["clip"])

    def train(values: Tensor, noises: Sequence[Tensor]) -> Tensor:
        theta = lesson.start()
        budget = torch.full_like(theta[:, 0], lesson.budget.R)
        signal = torch.zeros_like(budget)
        for t, noise in enumerate(noises):
            share = _share(steps - t, _adjustment(values, t / steps, signal))
            sigma = (share * budget) ** -0.5
            budget = budget * (1 - share)
            gradient = lesson.gradient(theta, clip, sigma.unsqueeze(1), noise)
            signal = _signal(gradient, clip * sigma / lesson.examples)
            theta = theta - lr * gradient
        return theta

    return dict(zip(_POLICY, lesson.learn(len(_POLICY), train, steps), strict=True))


def _policy(private: Private, settings: Settings) -> Tensor:
    steps = int(settings["steps"])
    weights = torch.tensor([settings[name] for name in _POLICY], dtype=torch.float64)
    final = []
    for one in private.each():
        theta, signal = one.start(), torch.zeros(1, dtype=torch.float64)
        left = one.budget.R * (1 - 1e-9)
        for t in range(steps):
            share = float(_share(steps - t, _adjustment(weights, t / steps, signal))[0])
            sigma = math.sqrt(1 / (share * left))
            left *= 1 - share
            gradient = one.gradient(theta, Flat(settings["clip"]), sigma)
            scale = settings["clip"] * sigma / one.facts.examples
            deviation = torch.full_like(gradient[:, 0], scale)
            signal = _signal(gradient, deviation).double()
            theta = theta - settings["lr"] * gradient
        final.append(theta)
    return torch.cat(final)


METHODS = (
    Method(
        key="learned-policy",
        title="policy learnt on auxiliary data",
        family="noise by what was seen",
        paper="Hong, Wang, Wang and Zhou 2021 (Learning Model-Based Privacy Protection under "
        "Budget Constraints)",
        claim="Noise chosen on the way, under a Gaussian filter (Smith and Thakurta 2022): each "
        "step takes a share of what is left. The policy sees released gradients alone, and "
        "learning it on auxiliary data costs nothing.",
        run=_policy,
        learn=_learn_policy,
        learned=_POLICY,
        layered=True,
        alone=True,
        differs="The policy is a linear rule of how much of the training is over and how far the "
        "last released gradient stood out of its noise, in place of their learnt protector, and "
        "decides on the noise alone. It is learnt anew for each budget.",
    ),
    Method(
        key="learned-schedule",
        title="schedule learnt on auxiliary data",
        family="noise by what was seen",
        paper="differentiable-privacy-percentages (Saunders, a repository on GitHub, 2026)",
        claim="T full-batch Gaussian steps with Σ 1/σ_t² = R, fixed before the private data are "
        "touched; learning the shape on auxiliary data costs nothing.",
        run=_schedule,
        learn=_learn_schedule,
        learned=_NOISE + _CLIP,
        layered=True,
        differs="Noise and clip norm follow straight lines between six knots each; full batches; "
        "some ten rounds of learning, where their examples take 200 to 2,000. The data to learn on "
        "are never those to train on.",
    ),
)

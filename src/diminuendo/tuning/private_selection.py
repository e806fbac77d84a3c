"""Repeat and select: train a random number of times on the private data, release the best alone.

With K ~ Poisson(m) trials, all drawn independently from one public distribution, and only the best
trial released (by a score that is part of what a trial releases, with continuous noise), privacy
costs far less than K trials (Papernot and Steinke 2022). The bound used here, with its proof:

Let q, q' be a trial's densities on two neighbouring sets and Q(<y), Q'(<y) the probabilities of a
lower score. The best has density a(y) = q(y)·m·exp(−m(1 − Q(<y))), so for an order λ > 1

    a^λ a'^{1−λ} = q^λ q'^{1−λ} · m · exp(m((λ−1)(1 − Q'(<y)) − λ(1 − Q(<y)))).

If a trial is (ε̂, δ̂)-private, 1 − Q'(<y) ≤ e^ε̂ (1 − Q(<y)) + δ̂; with e^ε̂ = λ/(λ−1) the exponent
is at most m(λ−1)δ̂. No trial at all has probability e^{−m} on both sides. So if a trial's Rényi
divergence of order λ is at most ε_λ, that of the selection is at most

    ln(m·exp((λ−1)(ε_λ + m·δ̂)) + e^{−m}) / (λ−1).
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from diminuendo import _validate
from diminuendo.budget import SENSITIVITY, Budget, Relation, delta_of
from diminuendo.errors import InputError
from diminuendo.planning import SCHEDULES, Plan
from diminuendo.replicas.batch import cross_entropy
from diminuendo.replicas.checks import fitting
from diminuendo.replicas.engine import Model
from diminuendo.tuning.auxiliary import Labelled
from diminuendo.tuning.auxiliary_tuning import LOGARITHMIC, Candidate, Space, make_plan
from diminuendo.tuning.private_tuning import noisy_right, trained_by

_ORDERS: list[float] = [*(1 + np.geomspace(0.05, 10, 80)), *np.geomspace(11.5, 1000, 60)]
_UP = 1 + 1e-9
SCORE_SHARE = 0.1
"""Of a trial's cost, what its score takes unless its noise is given."""


def divergence_of_best(order: float, R: float, mean_trials: float, relation: Relation) -> float:
    """An upper bound on the Rényi divergence of the selection, for trials with Σ 1/σ² = R."""
    one = order * SENSITIVITY[relation] ** 2 * R / 2
    missed = delta_of(R, epsilon=math.log1p(1 / (order - 1)), relation=relation)
    several = math.log(mean_trials) + (order - 1) * (one + mean_trials * missed)
    larger, smaller = max(several, -mean_trials), min(several, -mean_trials)
    return (larger + math.log1p(math.exp(smaller - larger))) / (order - 1)


def epsilon_of_best(
    R: float, mean_trials: float, *, delta: float, relation: Relation = "add-remove"
) -> float:
    """An upper bound on ε at δ of releasing the best of Poisson(mean_trials) trials.

    From Rényi divergences by the conversion of Canonne, Kamath and Steinke (2020), best order.
    """
    R, mean_trials = _validate.positive("R", R), _validate.positive("mean_trials", mean_trials)
    delta = _validate.real("delta", delta, above=0, below=1)
    found = min(
        divergence_of_best(order, R, mean_trials, relation)
        + math.log1p(-1 / order)
        - math.log(delta * order) / (order - 1)
        for order in _ORDERS
    )
    return max(found, 0.0) * _UP


def share(budget: Budget, mean_trials: float) -> float:
    """The largest Σ 1/σ² of a trial, score included, for which the selection fits the budget."""
    low, high = 0.0, budget.R
    for _ in range(60):
        middle = (low + high) / 2
        spent = epsilon_of_best(middle, mean_trials, delta=budget.delta, relation=budget.relation)
        low, high = (middle, high) if spent <= budget.epsilon else (low, middle)
    if low <= budget.R * 1e-9:
        raise InputError(
            "small enough to leave something for each trial",
            name="mean_trials",
            value=mean_trials,
            remedy=f"At ({budget.epsilon:g}, {budget.delta:g}) nothing is left.",
        )
    return low


@dataclass(frozen=True, kw_only=True, eq=False)
class Selected:
    """The best model, and its settings. How many trials there were is not told: that would cost.

    Where chance gave no trial at all, `candidate` is None and the model is untrained.
    """

    model: nn.Module
    candidate: Candidate | None
    plan: Plan | None
    score: float | None
    epsilon: float


def select_on_private(
    budget: Budget,
    data: Labelled,
    *,
    model: Model,
    family: str = "exponential",
    space: Space | None = None,
    mean_trials: float = 10.0,
    device: torch.device | str | None = None,
) -> Selected:
    """Train Poisson(mean_trials) times on the private data, release the best.

    Formal guarantee: what is returned is (epsilon, δ)-differentially private for the budget's
    relation, epsilon ≤ budget.epsilon, as long as nothing else of the call is seen: not its
    duration, which tells the number of trials. So there is no progress bar.
    """
    space = space or Space()
    _validate.choice("family", family, SCHEDULES)
    if family == "optimal" or not space.searched(family):
        raise InputError(
            "a family with something to tune, and not optimal", name="family", value=family
        )
    mean_trials = _validate.real("mean_trials", mean_trials, above=0, at_most=10_000)
    each = share(budget, mean_trials)
    noise = 1 / math.sqrt(SCORE_SHARE * each)
    part = Budget.from_R(
        each * (1 - SCORE_SHARE) * (1 - 1e-9), delta=budget.delta, relation=budget.relation
    )
    chance = np.random.default_rng(secrets.randbits(128))
    template = model()
    x, y = data = fitting(data, template, cross_entropy, "data")
    parameters = sum(p.numel() for p in template.parameters() if p.requires_grad)
    best = Selected(
        model=template,
        candidate=None,
        plan=None,
        score=None,
        epsilon=epsilon_of_best(
            part.R + 1 / noise**2, mean_trials, delta=budget.delta, relation=budget.relation
        ),
    )
    for _ in range(int(chance.poisson(mean_trials))):
        candidate = drawn(family, space, chance)
        plan = make_plan(candidate, part, len(x), parameters)
        trained = trained_by(plan, candidate.lr, model, data, device)
        score = noisy_right(trained, x, y, noise) / len(x)
        if best.score is None or score > best.score:
            best = Selected(
                model=trained, candidate=candidate, plan=plan, score=score, epsilon=best.epsilon
            )
    return best


def drawn(family: str, space: Space, chance: np.random.Generator) -> Candidate:
    """A candidate, evenly from the space: the same distribution for every trial."""
    values = {n: getattr(space, n) for n in ("steps", "lr", "clip", "momentum", "fall")}
    for name in space.searched(family):
        low, high = values[name]
        if name == "steps":
            values[name] = int(chance.integers(low, high + 1))
        elif name in LOGARITHMIC:
            values[name] = float(np.exp(chance.uniform(math.log(low), math.log(high))))
        else:
            values[name] = float(chance.uniform(low, high))
    if family == "uniform":
        values["fall"] = None
    return Candidate(family=family, **values)

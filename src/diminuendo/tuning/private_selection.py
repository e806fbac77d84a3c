"""select_on_private(...): train a random number of times on private data, release only the best.

There are K ~ Poisson(m) trials, all drawn independently from one public distribution. Only the best
one is released, by a score with continuous noise that is part of the trial's release. That costs
far less privacy than K trials (Papernot and Steinke 2022). The bound used here, with its proof:

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
from diminuendo.budget import SENSITIVITY, Budget, Relation, as_budget, check_delta, delta_of
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.replicas.batch import cross_entropy
from diminuendo.replicas.checks import checked_pair
from diminuendo.replicas.replica import Model
from diminuendo.training.compute import check_device
from diminuendo.tuning.auxiliary import Labelled
from diminuendo.tuning.private_tuning import noisy_correct, train_privately
from diminuendo.tuning.space import (
    LOGARITHMIC,
    Candidate,
    Space,
    as_printed,
    check_private_family,
    make_plan,
)

_ORDERS: list[float] = [*(1 + np.geomspace(0.05, 10, 80)), *np.geomspace(11.5, 1000, 60)]
_ROUNDING = 1 + 1e-9
"""Covers the rounding errors of an upper bound on ε."""
SCORE_SHARE = 0.1
"""The share of a trial's cost that its score takes."""


def divergence_of_best(order: float, R: float, mean_trials: float, relation: Relation) -> float:
    """An upper bound on the selection's Rényi divergence of this order (> 1), for trials with
    Σ 1/σ² = R.
    """
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
    delta = check_delta(delta)
    epsilon = min(
        divergence_of_best(order, R, mean_trials, relation)
        + math.log1p(-1 / order)
        - math.log(delta * order) / (order - 1)
        for order in _ORDERS
    )
    return max(epsilon, 0.0) * _ROUNDING


def share(budget: Budget | tuple[float, float], mean_trials: float) -> float:
    """The largest Σ 1/σ² of a trial, score included, for which the selection fits the budget."""
    budget = as_budget(budget)
    low, high = 0.0, budget.R
    for _ in range(60):
        middle = (low + high) / 2
        spent = epsilon_of_best(middle, mean_trials, delta=budget.delta, relation=budget.relation)
        low, high = (middle, high) if spent <= budget.epsilon else (low, middle)
    if low <= budget.R * 1e-9:
        raise InputError(
            "small enough to leave a share for each trial",
            name="mean_trials",
            value=mean_trials,
            remedy=f"At ({budget.epsilon:g}, {budget.delta:g}) no share is left.",
        )
    return low


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionResult:
    """The best model and its settings. The number of trials is not part of it: that would cost.

    Where chance gave no trial at all, the model is untrained, and candidate, plan and score are
    None.

    score    noisy accuracy on the private data
    epsilon  ε of everything here, at the budget's δ
    """

    model: nn.Module
    candidate: Candidate | None
    plan: Plan | None
    score: float | None
    epsilon: float


def select_on_private(
    budget: Budget | tuple[float, float],
    data: Labelled,
    *,
    model: Model,
    family: str = "exponential",
    space: Space | None = None,
    mean_trials: float = 10.0,
    device: torch.device | str | None = None,
) -> SelectionResult:
    """Train Poisson(mean_trials) times on the private data, and return only the best.

    Formal guarantee: what is returned is (epsilon, δ)-differentially private for the budget's
    relation, epsilon ≤ budget.epsilon, as long as nobody sees how long the call takes, which would
    tell the number of trials. For the same reason there is no progress bar.

    family       the family of schedules that is searched; not "optimal"
    space        the ranges from which every trial draws its settings
    mean_trials  the expected number of trials, above 0 and at most 10,000
    """
    budget, space = as_budget(budget), as_printed(space)
    check_private_family(family, space)
    mean_trials = _validate.real("mean_trials", mean_trials, above=0, at_most=10_000)
    check_device(device)
    each = share(budget, mean_trials)
    noise = 1 / math.sqrt(SCORE_SHARE * each)
    part = Budget.from_R(
        each * (1 - SCORE_SHARE) * (1 - 1e-9), delta=budget.delta, relation=budget.relation
    )
    chance = np.random.default_rng(secrets.randbits(128))
    template = model()
    x, y = data = checked_pair(data, template, cross_entropy, "data")
    parameters = sum(p.numel() for p in template.parameters() if p.requires_grad)
    best = SelectionResult(
        model=template,
        candidate=None,
        plan=None,
        score=None,
        epsilon=epsilon_of_best(
            part.R + 1 / noise**2, mean_trials, delta=budget.delta, relation=budget.relation
        ),
    )
    for _ in range(int(chance.poisson(mean_trials))):
        candidate = random_candidate(family, space, chance)
        plan = make_plan(candidate, part, len(x), parameters)
        trained = train_privately(plan, candidate.lr, model, data, device)
        score = noisy_correct(trained, x, y, noise) / len(x)
        if best.score is None or score > best.score:
            best = SelectionResult(
                model=trained, candidate=candidate, plan=plan, score=score, epsilon=best.epsilon
            )
    return best


def random_candidate(family: str, space: Space, chance: np.random.Generator) -> Candidate:
    """A candidate drawn uniformly from the space: the same distribution for every trial."""

    def choose(name: str, low: float, high: float) -> float:
        if name == "steps":
            return int(chance.integers(int(low), int(high) + 1))
        if name in LOGARITHMIC:
            return float(np.exp(chance.uniform(math.log(low), math.log(high))))
        return float(chance.uniform(low, high))

    return space.candidate(family, choose)

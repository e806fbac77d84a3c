"""Tuning on the private data itself, with every trial charged.

Formal guarantee: all of it together, the trials, their scores and the final run by the returned
plan, is (epsilon, δ)-differentially private for the budget's relation, and epsilon ≤
budget.epsilon, whichever trial is chosen and however the proposals follow from earlier scores.

Why: every full-batch step is a Gaussian mechanism whose cost is 1/σ², and costs add up to R even
when later steps are chosen by what earlier ones showed. A score is the number of examples that the
trial's model gets right, which one example changes by at most one, released with noise of deviation
σ_s: one more Gaussian mechanism. With k trials, each trial and the final run get the same share
(R − k/σ_s²)/(k + 1), so that what was tried is what will be run.

One final run is paid for. Processes that share a study therefore get a plan only once all of its
trials have ended, when it is the same plan for everybody: the lowest score, the earlier trial in a
tie. A trial given up as cut short is closed, and what it may still report is not taken any more.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import torch
from torch import nn

from diminuendo import _validate
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.planning import SCHEDULES, Plan
from diminuendo.replicas.batch import cross_entropy
from diminuendo.replicas.checks import fitting
from diminuendo.replicas.engine import Model, bar
from diminuendo.replicas.fingerprint import identity
from diminuendo.training.loop import fit
from diminuendo.tuning.auxiliary import Labelled
from diminuendo.tuning.auxiliary_tuning import Candidate, Search, Space, make_plan

SCORE_SHARE = 0.05
"""Of the budget, what the scores of all trials may cost unless their noise is given."""
_SAFE = 1 - 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Charged:
    """The chosen candidate as a plan on what is left, and what everything costs together."""

    plan: Plan
    lr: float
    candidate: Candidate
    scores: tuple[tuple[Candidate, float], ...]
    score_noise: float
    spent: float
    epsilon: float
    """Of trials, scores and the final run together, at the budget's δ."""


def share(budget: Budget, trials: int, score_noise: float) -> float:
    """What Σ 1/σ² of one trial, or of the final run, may come to."""
    trials = _validate.count("trials", trials)
    left = budget.R - trials / _validate.positive("score_noise", score_noise) ** 2
    if left <= 0:
        raise BudgetRefused(
            f"{trials} scores with noise {score_noise:g} cost more than the whole budget "
            f"(R = {budget.R:.4g}). Try fewer, or add more noise to a score."
        )
    return left / (trials + 1) * _SAFE


def tune_on_private(
    budget: Budget,
    data: Labelled,
    *,
    model: Model,
    family: str = "exponential",
    space: Space | None = None,
    trials: int = 8,
    score_noise: float | None = None,
    storage: str | None = None,
    name: str = "charged tuning",
    patience: float = 3600.0,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Charged:
    """Choose on the private data, and pay for it out of the same budget.

    trials       how many candidates, decided beforehand; each costs its share, finished or not
    score_noise  σ_s of a released score; unless given, the scores cost 5% of the budget
    storage      as in `tune`; a trial that a crash cut short stays charged
    patience     seconds after which another process's unfinished trial counts as cut short; until
                 then no plan is handed out. Zero gives up all that are under way elsewhere
    """
    trials = _validate.count("trials", trials)
    patience = _validate.real("patience", patience, at_least=0)
    space = space or Space()
    _validate.choice("family", family, SCHEDULES)
    if family == "optimal" or not space.searched(family):
        raise InputError(
            "a family with something to tune, and not optimal", name="family", value=family
        )
    noise = math.sqrt(trials / (SCORE_SHARE * budget.R)) if score_noise is None else score_noise
    each = share(budget, trials, noise)
    part = Budget.from_R(
        each, delta=budget.delta, relation=budget.relation, conversion=budget.conversion
    )
    template = model()
    x, y = data = fitting(data, template, cross_entropy, "data")
    examples = len(x)
    parameters = sum(p.numel() for p in template.parameters() if p.requires_grad)
    settings = {
        "budget": asdict(budget),
        "space": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(space).items()},
        "trials": trials,
        "score_noise": noise,
        "examples": examples,
        "parameters": parameters,
        "model": identity(template),
        "shapes": [f"{tuple(part.shape)} {part.dtype}" for part in data],
    }
    # Two processes may both be handed a trial that waits, and train it twice: none waits there.
    alone = storage is None
    seed = secrets.randbits(31)
    search = Search(family, space, settings, storage, name, seed, ends_first=alone)
    with bar("charged tuning", trials, progress) as advance:
        advance(search.asked())
        while search.asked() < trials:
            trial = search.study.ask()
            if trial.number >= trials:  # others who share the storage have asked for the last
                search.tell(trial.number, None)
                break
            try:
                candidate = search.candidate(trial)
                plan = make_plan(candidate, part, examples, parameters)
                trained = trained_by(plan, candidate.lr, model, data, device)
                score = 1 - noisy_right(trained, x, y, noise) / examples
            except BaseException:
                search.tell(trial.number, None)
                raise
            search.tell(trial.number, score)
            advance(1)
    _all_ended(search, trials, patience)
    done = search.trials(trials)
    if not done:
        raise InputError(
            "with at least one finished trial",
            name="the study",
            value=f"{trials} charged, none finished",
            remedy="What they cost stays spent. Begin another study with another budget.",
        )
    best = min(done, key=lambda t: t.score if t.score is not None else math.inf)
    final = make_plan(best.candidate, part, examples, parameters)
    total = (trials + 1) * part.R + trials / noise**2
    return Charged(
        plan=final,
        lr=best.candidate.lr,
        candidate=best.candidate,
        scores=tuple((t.candidate, float(t.score)) for t in done if t.score is not None),
        score_noise=noise,
        spent=total,
        epsilon=_within(budget, total),
    )


def _all_ended(search: Search, trials: int, patience: float) -> None:
    """Give up what is under way for longer than patience; refuse while there is anything else."""
    from optuna.trial import TrialState

    now = datetime.now()  # as Optuna notes when a trial began
    under_way = 0
    for trial in search.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.number >= trials:
            continue
        begun = trial.datetime_start or now
        if (now - begun).total_seconds() >= patience:
            search.tell(trial.number, None)
        else:
            under_way += 1
    if under_way:
        raise InputError(
            f"ended in all of its {trials} trials before a plan is handed out",
            name="the study",
            value=f"{under_way} under way in other processes",
            remedy="Call again with the same storage when they are done. A trial that a crash cut "
            f"short stays charged, and is given up {patience:g} seconds after it began; "
            "patience=0 gives it up now.",
        )


def _within(budget: Budget, total: float) -> float:
    epsilon = budget.epsilon_of(total)
    if epsilon > budget.epsilon:
        raise BudgetRefused(f"Everything together costs ε = {epsilon!r} of {budget.epsilon!r}.")
    return epsilon


def trained_by(
    plan: Plan, lr: float, model: Model, data: Labelled, device: torch.device | str | None
) -> nn.Module:
    """A new model, trained privately by the plan."""
    made = model().to(device)
    fit(
        made,
        data,
        plan,
        loss=cross_entropy,
        lr=lr,
        device=device,
        progress=False,
    )
    return made


@torch.no_grad()
def noisy_right(model: Any, x: torch.Tensor, y: torch.Tensor, noise: float) -> float:
    """How many examples the model gets right, with Gaussian noise from the operating system."""
    device = next(model.parameters()).device
    right = (model(x.to(device)).argmax(dim=1).cpu() == y.cpu()).sum()
    return float(right) + secrets.SystemRandom().gauss(0.0, noise)

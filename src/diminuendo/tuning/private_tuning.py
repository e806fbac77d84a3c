"""tune_on_private(...): tuning on the private data itself, with every trial charged to the budget.

Formal guarantee: the trials, their scores and the final run by the returned plan, all together, are
(epsilon, δ)-differentially private for the budget's relation, and epsilon ≤
budget.epsilon, whichever trial is chosen and however the proposals follow from earlier scores.

Why: every full-batch step is a Gaussian mechanism whose cost is 1/σ², and costs add up to R even
when later steps are chosen by what earlier ones showed. A score is the number of examples that the
trial's model classifies correctly. One example changes it by at most one, and it is released with
noise of standard deviation σ_s: one more Gaussian mechanism. With k trials, each trial and the
final run get the same share (R − k/σ_s²)/(k + 1), so that the final run has the noise of the trial
that chose it.

One final run is paid for. Processes that share a study therefore get a plan only when all of its
trials have ended. Then it is the same plan for all of them: the lowest score, the earlier trial in
a tie. A trial whose process died is closed after some time, and a score that it might still report
is ignored.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import asdict, dataclass
from datetime import datetime

import torch
from torch import nn

from diminuendo import _progress, _validate
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.planning import Plan
from diminuendo.replicas.batch import cross_entropy
from diminuendo.replicas.checks import checked_pair
from diminuendo.replicas.fingerprint import fingerprint
from diminuendo.replicas.replica import Model
from diminuendo.training.compute import check_device
from diminuendo.training.loop import fit
from diminuendo.training.mechanism import ExactNoise
from diminuendo.training.mechanism.keys import Keys
from diminuendo.tuning.auxiliary import Labelled
from diminuendo.tuning.search import Search
from diminuendo.tuning.space import (
    Candidate,
    Space,
    as_printed,
    check_private_family,
    make_plan,
)

SCORE_SHARE = 0.05
"""The share of the budget that the scores of all trials cost, unless their noise is given."""
_ROUNDING = 1 - 1e-9
"""Keeps the sum of all shares below the budget in floating point."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateTuningResult:
    """The best candidate as a plan for the final run, and the cost of everything together.

    plan         the final run, on the share of the budget that is left for it
    lr           the learning rate to run it at
    scores       every finished candidate with its noisy error rate; lower is better
    score_noise  σ_s, the standard deviation of the noise on a count of correct examples
    spent        Σ 1/σ² of trials, scores and the final run
    epsilon      ε of trials, scores and the final run together, at the budget's δ
    """

    plan: Plan
    lr: float
    candidate: Candidate
    scores: tuple[tuple[Candidate, float], ...]
    score_noise: float
    spent: float
    epsilon: float


def share(budget: Budget | tuple[float, float], trials: int, score_noise: float) -> float:
    """The largest Σ 1/σ² of one trial, and of the final run."""
    budget, trials = as_budget(budget), _validate.count("trials", trials)
    left = budget.R - trials / _validate.positive("score_noise", score_noise) ** 2
    if left <= 0:
        raise BudgetRefused(
            f"{trials} scores with noise {score_noise:g} cost more than the whole budget "
            f"(R = {budget.R:.4g}). Use fewer trials, or more noise on a score."
        )
    return left / (trials + 1) * _ROUNDING


def tune_on_private(
    budget: Budget | tuple[float, float],
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
) -> PrivateTuningResult:
    """Choose a candidate on the private data, and charge every trial to the same budget.

    family       the family of schedules that is searched; not "optimal"
    space        the ranges that are searched
    trials       how many candidates, fixed beforehand; each costs its share, finished or not
    score_noise  σ_s of a released score, above 0; by default the scores cost 5% of the budget
    storage      as in `tune`; a trial that a crash cut short stays charged
    patience     seconds after which another process's unfinished trial counts as dead; until then
                 no plan is returned. Zero closes all trials that run in other processes
    """
    trials = _validate.count("trials", trials)
    patience = _validate.real("patience", patience, at_least=0)
    check_device(device)
    budget, space = as_budget(budget), as_printed(space)
    check_private_family(family, space)
    noise = math.sqrt(trials / (SCORE_SHARE * budget.R)) if score_noise is None else score_noise
    each = share(budget, trials, noise)
    part = Budget.from_R(
        each, delta=budget.delta, relation=budget.relation, conversion=budget.conversion
    )
    template = model()
    x, y = data = checked_pair(data, template, cross_entropy, "data")
    examples = len(x)
    parameters = sum(p.numel() for p in template.parameters() if p.requires_grad)
    settings = {
        "budget": asdict(budget),
        "space": space.to_dict(),
        "trials": trials,
        "score_noise": noise,
        "examples": examples,
        "parameters": parameters,
        "model": fingerprint(template),
        "shapes": [f"{tuple(part.shape)} {part.dtype}" for part in data],
    }
    seed = secrets.randbits(31)
    search = Search(family, space, settings, storage, name, seed, ends_first=storage is None)
    with _progress.bar("tuning on private data", total=trials, shown=progress) as bar:
        bar.advance(search.proposed())
        while search.proposed() < trials:
            trial = search.study.ask()
            if trial.number >= trials:  # other processes have taken the last ones
                search.finish(trial.number, None)
                break
            try:
                candidate = search.candidate(trial)
                plan = make_plan(candidate, part, examples, parameters)
                trained = train_privately(plan, candidate.lr, model, data, device)
                score = 1 - noisy_correct(trained, x, y, noise) / examples
            except BaseException:
                search.finish(trial.number, None)
                raise
            search.finish(trial.number, score)
            bar.advance(1)
    _check_ended(search, trials, patience)
    finished = search.trials(trials)
    if not finished:
        raise InputError(
            "with at least one finished trial",
            name="the study",
            value=f"{trials} charged, none finished",
            remedy="Their cost stays spent. Begin another study with another budget.",
        )
    best = min(finished, key=lambda t: t.score if t.score is not None else math.inf)
    final = make_plan(best.candidate, part, examples, parameters)
    total = (trials + 1) * part.R + trials / noise**2
    return PrivateTuningResult(
        plan=final,
        lr=best.candidate.lr,
        candidate=best.candidate,
        scores=tuple((t.candidate, float(t.score)) for t in finished if t.score is not None),
        score_noise=noise,
        spent=total,
        epsilon=_within(budget, total),
    )


def _check_ended(search: Search, trials: int, patience: float) -> None:
    """Close trials that run for longer than `patience`; refuse while any other still runs."""
    from optuna.trial import TrialState

    now = datetime.now()  # Optuna's start times are local, without a time zone
    running = 0
    for trial in search.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.number >= trials:
            continue
        begun = trial.datetime_start or now
        if (now - begun).total_seconds() >= patience:
            search.finish(trial.number, None)
        else:
            running += 1
    if running:
        raise InputError(
            f"ended in all of its {trials} trials before it returns a plan",
            name="the study",
            value=f"{running} running in other processes",
            remedy="Call again with the same storage when they are done. A trial whose process "
            f"died stays charged, and is closed {patience:g} seconds after it began; "
            "patience=0 closes it now.",
        )


def _within(budget: Budget, total: float) -> float:
    epsilon = budget.epsilon_of(total)
    if epsilon > budget.epsilon:
        raise BudgetRefused(f"Everything together costs ε = {epsilon!r} of {budget.epsilon!r}.")
    return epsilon


def train_privately(
    plan: Plan, lr: float, model: Model, data: Labelled, device: torch.device | str | None
) -> nn.Module:
    """A new model, trained privately by the plan."""
    module = model().to(device)
    fit(
        module,
        data,
        plan,
        loss=cross_entropy,
        lr=lr,
        device=device,
        progress=False,
    )
    return module


@torch.no_grad()
def noisy_correct(model: nn.Module, x: torch.Tensor, y: torch.Tensor, noise: float) -> float:
    """How many examples the model classifies correctly, plus Gaussian noise of this deviation.

    The noise is exact, of keys that the operating system gives.
    """
    device = next(model.parameters()).device
    correct = (model(x.to(device)).argmax(dim=1).cpu() == y.cpu()).sum()
    source = ExactNoise(Keys.make())
    count = correct.double().reshape(1)
    return float(source.add_noise(count, noise_std=noise, sensitivity=1.0, step=0))

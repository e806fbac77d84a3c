"""Families of schedules compared on auxiliary data, each with the same effort.

Candidates are trained on auxiliary data of the private set's public shape, many at once by the
replicas engine, all with the same seeds; Optuna proposes them. Every family of schedules gets the
same number of candidates. A study in a shared storage can be resumed, and several machines can work
on it at the same time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import ArrayLike

from diminuendo import _progress, _validate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.influence.measured import mark, origin_of
from diminuendo.replicas.engine import train
from diminuendo.replicas.fingerprint import fingerprint
from diminuendo.replicas.initial import initialise
from diminuendo.replicas.replica import Model, Outcome, Replica
from diminuendo.tuning.auxiliary import Labelled, Shape, check_auxiliary, synthetic_sets
from diminuendo.tuning.networks import TwoLayers
from diminuendo.tuning.results import FamilyResult, Trial, TuningResult
from diminuendo.tuning.search import Search
from diminuendo.tuning.space import (
    Candidate,
    CurveOf,
    Space,
    as_printed,
    check_family,
    make_plan,
)

OBJECTIVES = ("train-loss", "test-loss")
"""What the families of schedules are compared by."""


def tune_families(
    budget: Budget,
    shape: Shape,
    *,
    families: Sequence[str] = ("uniform", "exponential"),
    space: Space | None = None,
    model: Model | None = None,
    auxiliary: str | Labelled | Sequence[Labelled] = "teacher",
    held_out: Sequence[Labelled] | None = None,
    influence: CurveOf | ArrayLike | None = None,
    minimise: str = "train-loss",
    trials: int = 32,
    repeats: int = 4,
    batch: int = 8,
    seed: int = 0,
    storage: str | None = None,
    name: str = "tuning",
    device: torch.device | str | None = None,
    progress: bool = True,
) -> TuningResult:
    """The best candidate of every family; the arguments are those of `tune`."""
    space = as_printed(space)
    for family in families:
        check_family(family, space, "families")
    if not families or len(set(families)) != len(families):
        raise InputError("at least one, each once", name="families", value=list(families))
    for label, number in (("trials", trials), ("repeats", repeats), ("batch", batch)):
        _validate.count(label, number)
    _validate.choice("minimise", minimise, OBJECTIVES)
    curve_of = _curve_of(influence, space, families)
    sets, tests = _data_sets(auxiliary, held_out, shape, repeats, seed, minimise)
    model = model or TwoLayers(shape.features, 1000, shape.classes)
    template = initialise(model, 0)
    parameters = sum(p.numel() for p in template.parameters() if p.requires_grad)
    settings = {
        "budget": asdict(budget),
        "shape": asdict(shape),
        "space": space.to_dict(),
        "auxiliary": _digest(sets + tests),
        "labels": auxiliary if isinstance(auxiliary, str) else "given",
        "minimise": minimise,
        "repeats": repeats,
        "seed": seed,
        "parameters": parameters,
        "model": fingerprint(template),
    }
    if curve_of is not None:
        settings["influence"] = _curve_digest(curve_of, space)

    def scores(candidates: Sequence[Candidate]) -> list[float | None]:
        replicas = [
            Replica(
                sigmas=candidate.sigmas(budget, curve_of),
                lr=candidate.lr,
                clip=candidate.clip,
                beta=candidate.momentum,
                seed=seed + i,
                data=i % len(sets),
            )
            for candidate in candidates
            for i in range(repeats)
        ]
        outcomes = train(
            model,
            sets,
            replicas,
            evaluate={"test": tests} if tests else None,
            device=device,
            progress=False,
        )
        return [
            _score(outcomes[k * repeats : (k + 1) * repeats], minimise)
            for k in range(len(candidates))
        ]

    results = {}
    with _progress.bar("tuning", total=trials * len(families), shown=progress) as bar:
        for family in families:
            search = Search(family, space, settings, storage, f"{name}: {family}", seed)
            search.run(scores, trials, batch, bar.advance)
            results[family] = _best_of(
                search, trials, budget, shape.examples, parameters, curve_of, model
            )
    return TuningResult(
        families=results,
        minimise=minimise,
        settings=settings,
        warning=None if curve_of is None else _warning(curve_of, results["optimal"].trials),
    )


def _score(outcomes: Sequence[Outcome], minimise: str) -> float | None:
    """The mean objective of a candidate's runs, or None where one of them was not finite."""
    if any(outcome.status != "done" for outcome in outcomes):
        return None
    values = [
        outcome.train_loss if minimise == "train-loss" else outcome.evaluations["test"]["loss"]
        for outcome in outcomes
    ]
    mean = float(np.mean([math.nan if v is None else v for v in values]))
    return mean if math.isfinite(mean) else None


def _best_of(
    search: Search,
    most: int,
    budget: Budget,
    examples: int,
    parameters: int,
    influence: CurveOf | None,
    model: Model,
) -> FamilyResult:
    trials = search.trials(most)
    scored = [(trial.score, trial.candidate) for trial in trials if trial.score is not None]
    if not scored:
        raise InputError(
            "a space in which some candidate's loss stays finite",
            name=f"the space of {search.family!r}",
            value=f"{len(trials)} candidates, none finite",
            remedy="Lower the learning rate.",
        )
    score, candidate = min(scored, key=lambda pair: pair[0])
    return FamilyResult(
        family=search.family,
        plan=make_plan(candidate, budget, examples, parameters, influence),
        lr=candidate.lr,
        score=score,
        candidate=candidate,
        model=model,
        searched=search.space.searched(search.family),
        trials=trials,
    )


def _curve_of(
    influence: CurveOf | ArrayLike | None, space: Space, families: Sequence[str]
) -> CurveOf | None:
    if "optimal" not in families:
        if influence is not None:
            raise InputError(
                'left out without the family "optimal"', name="influence", value=list(families)
            )
        return None
    if influence is None:
        raise InputError(
            "a curve, since the optimal schedule follows it",
            name="influence",
            value=None,
            remedy="dim.influence.measure estimates it on auxiliary data.",
        )
    if callable(influence):
        return influence
    values = mark(_validate.vector("influence", influence), origin_of(influence))
    if space.steps != values.size:
        raise InputError(
            f"the length of the influence curve ({values.size})",
            name="steps",
            value=space.steps,
            remedy="A curve of fixed length plans that many steps; a function of T plans any.",
        )
    return lambda _: values


def _warning(curve_of: CurveOf, trials: Sequence[Trial]) -> str | None:
    """The warning of any curve that was tried: the choice was between all of them."""
    steps = sorted({trial.candidate.steps for trial in trials})
    warnings = (origin_of(curve_of(number)) for number in steps)
    return next((text for text in warnings if text is not None), None)


def _data_sets(
    auxiliary: str | Labelled | Sequence[Labelled],
    held_out: Sequence[Labelled] | None,
    shape: Shape,
    repeats: int,
    seed: int,
    minimise: str,
) -> tuple[list[Labelled], list[Labelled]]:
    """Auxiliary sets and, where they are needed, a test set for each."""
    if isinstance(auxiliary, str):
        if held_out is not None:
            raise InputError("left out with synthetic data", name="held_out", value="given")
        if minimise == "train-loss":
            return synthetic_sets(shape, repeats, labels=auxiliary, seed=seed), []
        n = shape.examples
        double = replace(shape, examples=2 * n)
        both = synthetic_sets(double, repeats, labels=auxiliary, seed=seed)
        return [(x[:n], y[:n]) for x, y in both], [(x[n:], y[n:]) for x, y in both]
    public = [auxiliary] if isinstance(auxiliary[0], torch.Tensor) else list(auxiliary)
    sets = [check_auxiliary(one, shape) for one in public]  # type: ignore[arg-type]
    tests = list(held_out or [])
    if minimise == "test-loss" and len(tests) != len(sets):
        raise InputError(
            f"a test set for each auxiliary set ({len(sets)})", name="held_out", value=len(tests)
        )
    return sets, tests


def _digest(sets: Sequence[Labelled]) -> str:
    digest = hashlib.sha256()
    for x, y in sets:
        digest.update(x.detach().cpu().contiguous().numpy().tobytes())
        digest.update(y.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _curve_digest(curve_of: CurveOf, space: Space) -> str:
    assert space.steps is not None  # filled with the paper's
    longest = space.steps[1] if isinstance(space.steps, tuple) else space.steps
    values = np.asarray(curve_of(longest), dtype=np.float64)
    return hashlib.sha256((values / values.max()).round(12).tobytes()).hexdigest()[:16]

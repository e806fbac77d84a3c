"""tune(...): choose how to train within a budget, without private data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypedDict, Unpack

import torch
from numpy.typing import ArrayLike

from diminuendo import _progress, _validate
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import InputError
from diminuendo.replicas.fingerprint import fingerprint
from diminuendo.replicas.initial import initialise
from diminuendo.replicas.replica import Model
from diminuendo.training.compute import check_device
from diminuendo.tuning import joint
from diminuendo.tuning.auxiliary import Labelled, Shape
from diminuendo.tuning.auxiliary_tuning import tune_families
from diminuendo.tuning.judge import OBJECTIVES, Judge, Objective
from diminuendo.tuning.networks import Linear, Models, named_models
from diminuendo.tuning.proposals import Proposals, whole
from diminuendo.tuning.restrictions import restrictions
from diminuendo.tuning.results import Ablation, FamilyResult, Trial, TuningResult
from diminuendo.tuning.sets import Auxiliary, auxiliary_sets
from diminuendo.tuning.space import CurveOf, Space, make_plan

MODELS = ("linear", 32, 128)
"""What is chosen from unless models are given."""


class Families(TypedDict, total=False):
    """Arguments of a comparison of families of schedules, each searched by a study of its own."""

    families: Sequence[str]
    influence: CurveOf | ArrayLike | None
    trials: int
    batch: int
    storage: str | None
    name: str


def tune(
    budget: Budget | tuple[float, float],
    shape: Shape,
    *,
    models: Models | None = None,
    model: Model | None = None,
    space: Space | None = None,
    auxiliary: Auxiliary = None,
    held_out: Sequence[Labelled] | None = None,
    minimise: str | None = None,
    rounds: int = 4,
    repeats: int = 4,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    **families: Unpack[Families],
) -> TuningResult:
    """Choose on auxiliary data, which costs no privacy: noise, learning rate, clipping and model.

    budget      what the run may spend: a Budget, or the pair (ε, δ)
    shape       public facts about the private set: examples, features, classes, largest norm
    models      what to choose from: "linear", numbers of hidden units, functions that make a
                module; or such by names of your own. By default "linear", 32 and 128
    model       short for models=[model]
    space       what is searched and what is fixed; by default everything but the sampling rate
    auxiliary   kinds of labels of synthetic data ("teacher", "network", "clusters", "mixtures",
                "random"; by default the first, second and fourth take turns, since a linear teacher
                always favours a linear model), or public data of the same kind: one set of more
                rows than the private one, from which samples are drawn, or a list of sets of its
                size
    held_out    a test set for each public set of a list
    minimise    "test-error" (the default), "test-loss" or "train-loss" on auxiliary data
    rounds      of proposals; each tries some 30 candidates
    repeats     runs of each candidate; finalists get three times as many, and what is reported is
                measured in four times as many on other sets
    families, influence, trials, batch, storage, name
                compare families of schedules instead ("uniform", "exponential", "step", "time",
                "polynomial", "linear", "optimal"), each by an Optuna study of `trials` candidates,
                `batch` at a time, that machines may share in a `storage` under a `name`; with the
                paper's values for what `space` leaves out, and its network unless a model is given.
                `influence` is the curve that "optimal" follows, or a function that returns it for
                T steps; `minimise` is "train-loss" unless stated

    Returns a `TuningResult`: `fit(tuned.best.model(), data, tuned.best, loss=…)` trains by it,
    `tuned.ablations` says what each choice gives.
    """
    if not isinstance(shape, Shape):
        raise InputError(
            "a Shape",
            name="shape",
            value=shape,
            remedy="Shape(examples=…, features=…, classes=…, largest_norm=…).",
        )
    if space is not None and not isinstance(space, Space):
        raise InputError("a Space", name="space", value=space)
    check_device(device)
    _validate.flag("progress", progress)
    if models is not None and model is not None:
        raise InputError("left out where models are given", name="model", value=model)
    if families:
        if models is not None:
            raise InputError(
                "left out where families of schedules are compared",
                name="models",
                value=models,
                remedy="Give one model, or leave out " + ", ".join(sorted(families)) + ".",
            )
        return tune_families(
            as_budget(budget),
            shape,
            space=space,
            model=model,
            auxiliary="teacher" if auxiliary is None else auxiliary,  # type: ignore[arg-type]
            held_out=held_out,
            minimise="train-loss" if minimise is None else minimise,
            repeats=repeats,
            seed=seed,
            device=device,
            progress=progress,
            **families,
        )
    budget = as_budget(budget)
    _validate.count("repeats", repeats)
    _validate.count("rounds", rounds, at_least=0)
    _validate.count("seed", seed, at_least=0)
    minimise = "test-error" if minimise is None else minimise
    objective: Objective = _validate.choice("minimise", minimise, OBJECTIVES)  # type: ignore[assignment]
    chosen_from = named_models(
        (MODELS if model is None else [model]) if models is None else models,
        shape.features,
        shape.classes,
    )
    space = _layered((space or Space()).filled(whole(shape.largest_norm)), chosen_from.values())
    effort = joint.Effort(rounds, repeats, finals=3 * repeats, held_out=4 * repeats)
    search, unseen, words = auxiliary_sets(
        auxiliary,
        held_out,
        shape,
        objective,
        finals=effort.finals,
        unseen=effort.held_out,
        seed=seed,
    )
    judge = Judge(budget, chosen_from, shape.examples, search, unseen, objective, seed, device)
    with _progress.bar("tuning", total=1.0, shown=progress) as bar:
        found = joint.search(
            judge,
            Proposals(space, shape.largest_norm, seed),
            restrictions(space, chosen_from),
            effort,
            bar.update,
        )
    if found is None:
        raise InputError(
            "a space in which some candidate's loss stays finite",
            name="the space",
            value="none was finite",
            remedy="Lower the learning rate.",
        )
    settings = {
        "budget": asdict(budget),
        "shape": asdict(shape),
        "space": space.to_dict(),
        "auxiliary": words,
        "minimise": objective,
        "rounds": rounds,
        "repeats": repeats,
        "seed": seed,
        "models": {name: fingerprint(initialise(one, 0)) for name, one in chosen_from.items()},
    }
    return _result(found, judge, settings)


def _layered(space: Space, models: Any) -> Space:
    """Without clipping by layers, where no model has more than one."""
    rules = space.clipping
    if isinstance(rules, tuple) and all(isinstance(one, Linear) for one in models):
        return replace(space, clipping=tuple(rule for rule in rules if rule != "per-layer"))
    return space


def _result(found: joint.Found, judge: Judge, settings: dict[str, Any]) -> TuningResult:
    trials = [Trial(candidate=one, score=score) for one, score in found.tried.items()]

    def result(measured: joint.Measured) -> FamilyResult:
        own = measured.candidate
        model = judge.models[own.model]
        parameters = sum(p.numel() for p in initialise(model, 0).parameters() if p.requires_grad)
        return FamilyResult(
            family=own.family,
            plan=make_plan(own, judge.budget, judge.examples, parameters),
            lr=own.lr,
            candidate=own,
            model=model,
            score=measured.score,
            searched=("steps", "lr", "clip", "momentum"),
            trials=tuple(trial for trial in trials if trial.candidate.family == own.family),
            held_out=measured.objective,
            accuracy=measured.accuracy,
        )

    ablations = tuple(
        Ablation(name=name, best=result(measured), loss=measured.above(found.best))
        for name, measured in found.restricted.items()
    )
    best = result(found.best)
    ranked = sorted([best, *(one.best for one in ablations)], key=lambda one: one.score)
    families = {one.family: one for one in reversed(ranked)}
    return TuningResult(
        families=families,
        minimise=judge.minimise,
        settings=settings,
        chosen=best,
        ablations=ablations,
    )

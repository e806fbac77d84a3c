"""Noise, learning rate and model together: what each is worth at one budget.

In every cell (task, N, budget) each model is tuned on auxiliary data alone in four ways: uniform
noise at a constant learning rate, fading noise at a constant one, uniform noise at a falling one,
and whatever is best; clip, clipping rule, momentum, steps and size of the learning rate are tuned
in all of them. The model that does best on further auxiliary sets, the same for all models, is the
one chosen. Every part is stored when it is done, so that an interrupted run resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.paper.data import Sample
from diminuendo.paper.results import JointCell, JointResults
from diminuendo.paper.setting import PAPER, JointTask, Run
from diminuendo.paper.sources import Source
from diminuendo.replicas.engine import train
from diminuendo.replicas.replica import Outcome
from diminuendo.replicas.statistics import interval, paired
from diminuendo.tuning.auxiliary import Shape
from diminuendo.tuning.choosing import tune
from diminuendo.tuning.judge import Judge, Sets
from diminuendo.tuning.networks import named_models
from diminuendo.tuning.results import TuningResult
from diminuendo.tuning.sets import auxiliary_sets
from diminuendo.tuning.space import Candidate, Space, make_plan

METHODS = ("uniform", "fading", "falling", "joint")
"""Noise and learning rate constant, one of them falling, or what is best: one, both or neither."""
FIRST_SEED = 10_000
"""Seeds of the repeats start here: tuning uses none of them."""
_AT_ONCE = 64
_COMPARED, _FIRST_COMPARED = 16, 60_000
"""Auxiliary sets on which models are compared, and the first of their seeds."""
_SPACE = Space(lr_shape=("constant", "linear", "cosine"))


@dataclass(frozen=True)
class _Tuned:
    """One model of a cell: the candidate of each method, and its score while tuning."""

    candidates: Mapping[str, Candidate]
    score: float


def joint(sources: Mapping[str, Source], run: Run) -> JointResults:
    """Every cell of the setting, in its order."""
    cells: list[JointCell] = []
    for task in run.setting.joint:
        source = sources[task.name]
        drawn: dict[int, Callable[[], list[Sample]]] = {}
        for examples, epsilon, delta in task.cells:
            if examples > source.available:
                run.say(f"{task.name}: N = {examples} is left out, the data have too few")
                continue
            if examples not in drawn:  # samples of one N at a time
                drawn = {examples: _drawn(run, source, examples)}
            budget = Budget(epsilon=epsilon, delta=delta)
            cells += _cells(run, task, source, examples, budget, drawn[examples])
    used = {task.name: sources[task.name] for task in run.setting.joint}
    return JointResults(
        data={name: source.description for name, source in used.items()},
        public={name: source.auxiliary_description for name, source in used.items()},
        repeats=run.setting.repeats,
        cells=cells,
    )


def _drawn(run: Run, source: Source, examples: int) -> Callable[[], list[Sample]]:
    """The samples of all repeats, drawn when they are first needed."""

    @cache
    def samples() -> list[Sample]:
        run.say(f"{source.name}, N = {examples}: drawing {run.setting.repeats} samples")
        return source.samples(examples, range(run.setting.repeats))

    return samples


def _cells(
    run: Run,
    task: JointTask,
    source: Source,
    examples: int,
    budget: Budget,
    samples: Callable[[], list[Sample]],
) -> list[JointCell]:
    place = f"{task.name}-{examples}-{budget.epsilon:g}".replace(" ", "-")
    extra = (PAPER,) if (examples, budget.epsilon) in task.paper else ()
    compared = (*task.compared, *extra)
    named = named_models(
        {name: hidden_of(name) for name in (*task.models, *extra)}, source.features, source.classes
    )
    tuned = {
        name: _tuned(run, source, examples, budget, place, name, one) for name, one in named.items()
    }
    errors = _errors(run, source, examples, budget, place, named, tuned)
    chosen = min(errors, key=lambda name: errors[name])
    shown = [name for name in named if name in compared or name == chosen]
    found = []
    for name in shown:
        methods = METHODS if name in compared else METHODS[-1:]
        wanted = {method: tuned[name].candidates[method] for method in methods}
        values = _repeats(run, place, name, named[name], wanted, budget, samples)
        for method, candidate in wanted.items():
            own = values[candidate_key(candidate)]
            base = values[candidate_key(wanted[methods[0]])]
            found.append(
                JointCell(
                    task=task.name,
                    examples=examples,
                    epsilon=budget.epsilon,
                    delta=budget.delta,
                    model=name,
                    parameters=named[name].parameters,  # type: ignore[attr-defined]
                    method=method,
                    chosen=name == chosen and method == "joint",
                    steps=candidate.steps,
                    lr=candidate.lr,
                    lr_shape=candidate.lr_shape,
                    lr_fall=candidate.lr_fall,
                    fall=candidate.fall or 1.0,
                    clip=candidate.clip,
                    clipping=candidate.clipping,
                    momentum=candidate.momentum,
                    auxiliary_error=errors[name],
                    spent=make_plan(candidate, budget, examples, 1).epsilon,
                    failed=int(np.isnan(own["test_accuracy"]).sum()),
                    train_loss=interval(own["train_loss"]),
                    test_accuracy=interval(own["test_accuracy"]),
                    against_uniform=paired(own["test_accuracy"], base["test_accuracy"]),
                )
            )
    return found


def _errors(
    run: Run,
    source: Source,
    examples: int,
    budget: Budget,
    place: str,
    named: Mapping[str, Any],
    tuned: Mapping[str, _Tuned],
) -> dict[str, float]:
    """Each model's mean error on the same auxiliary sets, on which nothing was tuned."""
    shape = _shape(source, examples)

    def compute() -> dict[str, float]:
        run.say(f"{place}: comparing models")
        auxiliary, tests = source.auxiliary(examples, _COMPARED, first=_FIRST_COMPARED)
        if auxiliary is None or tests is None:
            _, unseen, _ = auxiliary_sets(
                None, None, shape, "test-error", finals=1, unseen=_COMPARED, seed=1
            )
        else:
            unseen = Sets(auxiliary, tests)
        judge = Judge(budget, named, examples, unseen, unseen, "test-error", device=run.device)
        best = [replace(tuned[name].candidates["joint"], model=name) for name in named]
        runs = judge.unseen(best, _COMPARED)
        return {
            name: float(np.mean([one.objective for one in own]))
            for name, own in zip(named, runs, strict=True)
        }

    stored = run.folder.stored_or(f"joint-errors-{place}-{len(named)}", compute)
    return {name: stored[name] for name in named}


def _shape(source: Source, examples: int) -> Shape:
    return Shape(
        examples=examples,
        features=source.features,
        classes=source.classes,
        largest_norm=source.largest_norm,
    )


def hidden_of(name: str) -> str | int:
    """A model of the setting as `tune` takes it."""
    if name == PAPER:
        return 1000
    kind = name.replace("hidden ", "")
    return int(kind) if kind.isdecimal() else kind


def candidate_key(candidate: Candidate) -> str:
    """A name for files: candidates of two methods may be one and the same."""
    return str(sorted(asdict(candidate).items()))


def _tuned(
    run: Run, source: Source, examples: int, budget: Budget, place: str, name: str, model: Any
) -> _Tuned:
    """The best candidate of each method for one model, on auxiliary data."""
    setting = run.setting

    def compute() -> dict[str, Any]:
        run.say(f"{place}: tuning {name}")
        large = model.parameters * examples > setting.joint_large
        effort = setting.joint_effort[large]
        auxiliary, tests = source.auxiliary(examples, 7 * effort.repeats)
        result = tune(
            budget,
            _shape(source, examples),
            models={name: model},
            space=_SPACE,
            auxiliary=auxiliary,
            held_out=tests,
            rounds=effort.rounds,
            repeats=effort.repeats,
            device=run.device,
            progress=run.progress,
        )
        return {
            "candidates": {m: asdict(c) for m, c in _by_method(result).items()},
            "score": result.best.score,
        }

    stored = run.folder.stored_or(f"joint-tuned-{place}-{name.replace(' ', '-')}", compute)
    candidates = {m: Candidate(**values) for m, values in stored["candidates"].items()}
    run.say(f"{place}: {name}: {candidates['joint']}: {stored['score']:.4f}")
    return _Tuned(candidates, stored["score"])


def _by_method(result: TuningResult) -> dict[str, Candidate]:
    restricted = {one.name: one.best.candidate for one in result.ablations}
    return {
        "uniform": restricted["uniform noise, constant rate"],
        "fading": restricted["fading noise, constant rate"],
        "falling": restricted["uniform noise, falling rate"],
        "joint": result.best.candidate,
    }


def _repeats(
    run: Run,
    place: str,
    name: str,
    model: Any,
    wanted: Mapping[str, Candidate],
    budget: Budget,
    samples: Callable[[], list[Sample]],
) -> dict[str, dict[str, Any]]:
    """The repeats of every distinct candidate; repeat r has the same sample and seed in all."""
    distinct = list(dict.fromkeys(wanted.values()))

    def compute() -> dict[str, Any]:
        repeats = run.setting.repeats
        run.say(f"{place}: {repeats} repeats of {name}, {len(distinct)} candidates")
        drawn = samples()
        replicas = [
            candidate.replica(budget, seed=FIRST_SEED + r, data=r)
            for candidate in distinct
            for r in range(repeats)
        ]
        outcomes = train(
            model,
            [one.train for one in drawn],
            replicas,
            evaluate={"test": [one.test for one in drawn]},
            at_once=_AT_ONCE,
            device=run.device,
            progress=run.progress,
        )
        return {
            candidate_key(candidate): _values(outcomes[k * repeats : (k + 1) * repeats])
            for k, candidate in enumerate(distinct)
        }

    stored = run.folder.stored_or(f"joint-runs-{place}-{name.replace(' ', '-')}", compute)
    return {
        key: {metric: _array(own) for metric, own in one.items()} for key, one in stored.items()
    }


def _array(values: Sequence[float | None]) -> Vector:
    return np.array([math.nan if value is None else value for value in values])


def _values(outcomes: Sequence[Outcome]) -> dict[str, list[float | None]]:
    """Training loss and test accuracy of each run; None for a run that was not finite."""

    def finite(outcome: Outcome, value: float | None) -> float | None:
        return value if outcome.status == "done" else None

    return {
        "train_loss": [finite(o, o.train_loss) for o in outcomes],
        "test_accuracy": [finite(o, o.evaluations["test"]["accuracy"]) for o in outcomes],
    }

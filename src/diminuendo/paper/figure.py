"""The paper's figure: every variant at every number of examples, tuned on auxiliary data alone.

Every part is stored when it is done, so that an interrupted run resumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.measuring.result import MeasuredInfluence
from diminuendo.paper import data
from diminuendo.paper import influence as influences
from diminuendo.paper.data import Pool
from diminuendo.paper.digits import Digits
from diminuendo.paper.results import METRICS, Cell, Efficiency, FigureResults, Metric
from diminuendo.paper.setting import Run, Setting
from diminuendo.paper.variants import DELTA, EPSILON, MOMENTUM, UNIFORM, VARIANTS, Variant
from diminuendo.replicas.engine import train
from diminuendo.replicas.replica import Outcome, Replica
from diminuendo.replicas.statistics import examples_needed, interval, paired
from diminuendo.tuning.auxiliary import Shape, gaussian
from diminuendo.tuning.choosing import tune
from diminuendo.tuning.networks import TwoLayers
from diminuendo.tuning.space import NAMES, Candidate, CurveOf, make_plan

Measured = Mapping[tuple[str, float], MeasuredInfluence]
"""Measured influences by task and momentum."""

FIRST_SEED = 10_000
"""Seeds of the repeats start here: tuning uses none of them."""


def figure(digits: Digits, run: Run) -> FigureResults:
    """The measured influences, and all variants of both tasks."""
    pools = {name: data.pool(digits, data.TASKS[name]) for name in run.setting.grids}
    measured = {
        (task, beta): _measure(run, task, beta)
        for task in run.setting.grids
        for beta in (0.0, MOMENTUM)
    }
    cells = [
        cell
        for pool in pools.values()
        for n in _counts(run.setting, pool)
        for cell in _cells(run, pool, n, measured)
    ]
    return FigureResults(
        data=digits.source,
        epsilon=EPSILON,
        delta=DELTA,
        repeats=run.setting.repeats,
        grids={name: list(_counts(run.setting, pool)) for name, pool in pools.items()},
        focus={name: _focus(run.setting, pool) for name, pool in pools.items()},
        influence=[influences.summary(one, *key) for key, one in measured.items()],
        cells=cells,
        efficiency=_efficiency(cells),
    )


def _counts(setting: Setting, pool: Pool) -> tuple[int, ...]:
    """The numbers of examples in the grid for which the pool is large enough."""
    return tuple(n for n in setting.grids[pool.task.name][0] if n <= pool.labels.size)


def _focus(setting: Setting, pool: Pool) -> int:
    return min(setting.grids[pool.task.name][1], max(_counts(setting, pool)))


def _network(setting: Setting, task: str) -> TwoLayers:
    facts = data.TASKS[task]
    return TwoLayers(facts.features, setting.hidden, facts.classes)


def _shape(task: str, examples: int) -> Shape:
    facts = data.TASKS[task]
    return Shape(
        examples=examples,
        features=facts.features,
        classes=facts.classes,
        largest_norm=facts.largest_norm,
    )


def _measure(run: Run, task: str, beta: float) -> MeasuredInfluence:
    """On auxiliary data of the size in focus, around uniform noise of the exact budget."""
    setting = run.setting
    examples = setting.grids[task][1]

    def compute() -> dict[str, Any]:
        run.say(f"influence by retraining: {task}, N = {examples}, momentum {beta:g}")
        measured = influences.around_uniform(
            _network(setting, task),
            gaussian(_shape(task, examples), seed=7),
            Budget(epsilon=EPSILON, delta=DELTA),
            steps=setting.influence_steps,
            points=setting.influence_points,
            repeats=setting.influence_repeats,
            beta=beta,
            device=run.device,
            progress=run.progress,
        )
        return {"measured": measured.to_json()}

    stored = run.folder.stored_or(f"influence-{task}-{beta:g}", compute)
    return MeasuredInfluence.from_json(stored["measured"])


def _cells(run: Run, pool: Pool, examples: int, measured: Measured) -> list[Cell]:
    """All variants of one task at one N: tuned, then run on the same samples, starts and noise."""
    task, setting = pool.task.name, run.setting
    curves = {
        variant.key: _curve_of(variant, task, measured)
        for variant in VARIANTS
        if variant.everywhere or examples == _focus(setting, pool)
    }
    variants = [v for v in VARIANTS if v.key in curves and _can_plan(run, task, v, curves[v.key])]
    tuned = {v.key: _tuned(run, task, examples, v, curves[v.key]) for v in variants}
    outcomes = _outcomes(run, pool, examples, variants, tuned, curves)
    values = {key: _values(own) for key, own in outcomes.items()}
    parameters = _network(setting, task).parameters
    return [
        Cell(
            task=task,
            examples=examples,
            variant=v.key,
            title=v.title,
            conversion=v.conversion,
            **{name: getattr(tuned[v.key], name) for name in ("family", *NAMES)},
            epsilon=make_plan(tuned[v.key], v.budget, examples, parameters, curves[v.key]).epsilon,
            failed=int(np.isnan(values[v.key]["train_loss"]).sum()),
            train_loss=interval(values[v.key]["train_loss"]),
            test_loss=interval(values[v.key]["test_loss"]),
            test_accuracy=interval(values[v.key]["test_accuracy"]),
            against_uniform={m: paired(values[v.key][m], values[UNIFORM.key][m]) for m in METRICS},
            against_same_budget={
                m: paired(values[v.key][m], values[_reference(v, values)][m]) for m in METRICS
            },
        )
        for v in variants
    ]


def _curve_of(variant: Variant, task: str, measured: Measured) -> CurveOf | None:
    beta = variant.measured_momentum
    return None if beta is None else influences.curve_of(measured[task, beta], beta)


def _can_plan(run: Run, task: str, variant: Variant, curve: CurveOf | None) -> bool:
    """Whether a variant that follows a measured influence has a curve to follow."""
    if variant.measured_momentum is None or curve is not None:
        return True
    run.say(
        f"{task}: the measured influence is positive at too few steps, so {variant.title!r} is "
        "left out; more repeats would help"
    )
    return False


def _tuned(
    run: Run, task: str, examples: int, variant: Variant, curve: CurveOf | None
) -> Candidate:
    setting = run.setting

    def compute() -> dict[str, Any]:
        run.say(f"{task}, N = {examples}: tuning {variant.title}")
        best = tune(
            variant.budget,
            _shape(task, examples),
            families=(variant.family,),
            space=variant.space,
            model=_network(setting, task),
            auxiliary=variant.auxiliary,
            influence=curve,
            minimise=variant.minimise,
            trials=setting.trials,
            repeats=max(setting.tuning_repeats, setting.tuning_examples // examples),
            device=run.device,
            progress=run.progress,
        ).best
        return {
            "candidate": asdict(best.candidate),
            "score": best.score,
            "trials": [{**asdict(t.candidate), "score": t.score} for t in best.trials],
        }

    stored = run.folder.stored_or(f"tuned-{task}-{examples}-{variant.key}", compute)
    candidate = Candidate(**stored["candidate"])
    run.say(f"{task}, N = {examples}: {variant.title}: {_described(candidate)}")
    return candidate


def _described(candidate: Candidate) -> str:
    parts = [f"T = {candidate.steps}"]
    if candidate.fall is not None:
        parts.append(f"σ falls to {candidate.fall:.2f} of its start")
    parts.append(f"lr {candidate.lr:.3g}, clip {candidate.clip:.3g}")
    if candidate.momentum:
        parts.append(f"momentum {candidate.momentum:.2f}")
    return ", ".join(parts)


def _outcomes(
    run: Run,
    pool: Pool,
    examples: int,
    variants: Sequence[Variant],
    tuned: Mapping[str, Candidate],
    curves: Mapping[str, CurveOf | None],
) -> dict[str, Sequence[Outcome]]:
    """The repeats of every variant, by its key; repeat r has the same sample and seed in all."""
    task, repeats = pool.task.name, run.setting.repeats
    run.say(f"{task}, N = {examples}: {repeats} repeats of {len(variants)} variants")
    samples = data.draw_many(pool, examples, range(repeats))
    replicas = [
        Replica(
            sigmas=tuned[v.key].sigmas(v.budget, curves[v.key]),
            lr=tuned[v.key].lr,
            clip=tuned[v.key].clip,
            beta=tuned[v.key].momentum,
            seed=FIRST_SEED + r,
            data=r,
        )
        for v in variants
        for r in range(repeats)
    ]
    outcomes = train(
        _network(run.setting, task),
        [sample.train for sample in samples],
        replicas,
        evaluate={"test": [sample.test for sample in samples]},
        device=run.device,
        progress=run.progress,
        store=run.folder.path / "runs" / f"{task}-{examples}.jsonl",
    )
    return {v.key: outcomes[k * repeats : (k + 1) * repeats] for k, v in enumerate(variants)}


def _reference(variant: Variant, values: Mapping[str, Any]) -> str:
    """The key of uniform noise under the same conversion, where that was run."""
    same = "uniform-exact" if variant.conversion == "exact" else UNIFORM.key
    return same if same in values else UNIFORM.key


def _values(outcomes: Sequence[Outcome]) -> dict[Metric, Vector]:
    """Each metric over the runs; NaN for a run that was not finite."""

    def value(outcome: Outcome, metric: Metric) -> float:
        if outcome.status != "done":
            return math.nan
        if metric == "train_loss":
            return outcome.train_loss
        number = outcome.evaluations["test"][metric.removeprefix("test_")]
        return math.nan if number is None else number

    return {m: np.array([value(outcome, m) for outcome in outcomes]) for m in METRICS}


def _efficiency(cells: Sequence[Cell]) -> list[Efficiency]:
    """For every variant: how many examples uniform noise, as printed, needs for its accuracy."""
    rows = []
    for cell in cells:
        if cell.variant == UNIFORM.key:
            continue
        uniform = sorted(
            (c for c in cells if c.task == cell.task and c.variant == UNIFORM.key),
            key=lambda c: c.examples,
        )
        needed = examples_needed(
            [c.examples for c in uniform],
            [c.test_accuracy.mean for c in uniform],
            cell.test_accuracy.mean,
        )
        rows.append(
            Efficiency(
                task=cell.task,
                variant=cell.variant,
                title=cell.title,
                examples=cell.examples,
                uniform_needs=needed,
                ratio=None if needed is None else needed / cell.examples,
            )
        )
    return rows

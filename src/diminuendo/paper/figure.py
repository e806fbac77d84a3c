"""The paper's figure and tables, from data to numbers. Every part is stored when it is done.

A folder belongs to one setting: with another one it is refused, so that nothing is mixed or lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diminuendo import _files, _validate, bounds
from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.measuring.retraining import MeasuredInfluence
from diminuendo.paper import data
from diminuendo.paper import influence as influences
from diminuendo.paper import quadratics as excess
from diminuendo.paper.data import Pool
from diminuendo.paper.digits import Digits
from diminuendo.paper.variants import DELTA, EPSILON, MOMENTUM, UNIFORM, VARIANTS, Variant
from diminuendo.replicas.engine import Outcome, Replica, train
from diminuendo.replicas.statistics import examples_needed, interval, paired
from diminuendo.tuning import auxiliary
from diminuendo.tuning.auxiliary import Shape
from diminuendo.tuning.auxiliary_tuning import Candidate, make_plan, tune
from diminuendo.tuning.networks import TwoLayers

Say = Callable[[str], None]
METRICS = ("train_loss", "test_loss", "test_accuracy")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much is run. The grid of each task is (its numbers of examples, the one in focus).

    A candidate is trained at least `tuning_repeats` times, and as often as it takes to have seen
    `tuning_examples`: where N is small, runs are noisy and cheap.
    """

    repeats: int = 100
    trials: int = 16
    tuning_repeats: int = 4
    tuning_examples: int = 3000
    influence_steps: int = 100
    influence_repeats: int = 12
    influence_points: int = 10
    hidden: int = 1000
    grids: Mapping[str, tuple[tuple[int, ...], int]]

    def __post_init__(self) -> None:
        _validate.count("repeats", self.repeats, at_least=2)


def full(repeats: int = 100) -> Setting:
    """At most 45 minutes on two cores."""
    return Setting(
        repeats=repeats,
        grids={"MNIST35": ((250, 500, 1000), 500), "MNIST": ((500, 1000, 2000), 1000)},
    )


def quick(repeats: int = 8) -> Setting:
    """At most three minutes on two cores: the same story with wide intervals."""
    return Setting(
        repeats=repeats,
        trials=6,
        tuning_repeats=2,
        tuning_examples=0,
        influence_steps=60,
        influence_repeats=4,
        influence_points=6,
        grids={"MNIST35": ((250, 500), 500), "MNIST": ((500,), 500)},
    )


class Folder:
    """The results of one setting, each part in its own file."""

    def __init__(self, path: str | Path, setting: Mapping[str, Any]) -> None:
        self.path = _files.make_folder(path)
        _files.make_folder(self.path / "runs")
        wanted = json.loads(json.dumps(setting))
        marker = self.path / "setting.json"
        if not marker.exists():
            _files.write_text(marker, json.dumps(wanted, indent=1, ensure_ascii=False))
            return
        stored = _files.parse_json(
            _files.read_text(marker, name="the setting"), name="the setting", source=str(marker)
        )
        differing = sorted(k for k in {*wanted, *stored} if wanted.get(k) != stored.get(k))
        if differing:
            raise InputError(
                "a folder of the same setting, or a new one",
                name="--out",
                value=str(path),
                remedy=f"It was begun with other values of {', '.join(differing)}. Nothing was "
                "changed.",
            )

    def remembered(self, name: str, compute: Callable[[], Any]) -> Any:
        """The stored part, or the computed one, stored."""
        path = self.path / "runs" / f"{name}.json"
        if path.exists():
            text = _files.read_text(path, name="a stored part")
            return _files.parse_json(text, name="a stored part", source=str(path))
        value = json.loads(json.dumps(compute()))
        _files.write_text(path, json.dumps(value, ensure_ascii=False))
        return value


@dataclass(frozen=True)
class Run:
    """Who runs where, and who is told."""

    folder: Folder
    setting: Setting
    device: str | None
    progress: bool
    say: Say


def figure(digits: Digits, run: Run) -> dict[str, Any]:
    """Influence, and every variant at every N, tuned on auxiliary data alone."""
    pools = {name: data.pool(digits, data.TASKS[name]) for name in run.setting.grids}
    measured = {
        (task, beta): _influence(run, task, beta)
        for task in run.setting.grids
        for beta in (0.0, MOMENTUM)
    }
    cells = [
        cell
        for task, pool in pools.items()
        for n in _counts(run.setting, pool)
        for cell in _at(run, pool, n, measured)
    ]
    return {
        "data": digits.source,
        "epsilon": EPSILON,
        "delta": DELTA,
        "repeats": run.setting.repeats,
        "grids": {name: list(_counts(run.setting, pool)) for name, pool in pools.items()},
        "focus": {name: _focus(run.setting, pool) for name, pool in pools.items()},
        "influence": [
            {"task": task, "momentum": beta, **influences.facts(one)}
            for (task, beta), one in measured.items()
        ],
        "cells": cells,
        "efficiency": _efficiency(cells),
    }


def _counts(setting: Setting, pool: Pool) -> tuple[int, ...]:
    """The grid as far as the pool reaches."""
    return tuple(n for n in setting.grids[pool.task.name][0] if n <= pool.labels.size)


def _focus(setting: Setting, pool: Pool) -> int:
    return min(setting.grids[pool.task.name][1], max(_counts(setting, pool)))


def _network(setting: Setting, task: str) -> TwoLayers:
    shape = data.TASKS[task]
    return TwoLayers(shape.features, setting.hidden, shape.classes)


def _shape(task: str, examples: int) -> Shape:
    facts = data.TASKS[task]
    return Shape(
        examples=examples,
        features=facts.features,
        classes=facts.classes,
        largest_norm=facts.largest_norm,
    )


def _influence(run: Run, task: str, beta: float) -> MeasuredInfluence:
    """On auxiliary data of the size in focus, around uniform noise of the exact budget."""
    setting = run.setting
    examples = setting.grids[task][1]

    def compute() -> dict[str, Any]:
        run.say(f"influence by retraining: {task}, N = {examples}, momentum {beta:g}")
        found = influences.around_uniform(
            _network(setting, task),
            auxiliary.gaussian(_shape(task, examples), seed=7),
            Budget(epsilon=EPSILON, delta=DELTA),
            steps=setting.influence_steps,
            points=setting.influence_points,
            repeats=setting.influence_repeats,
            beta=beta,
            device=run.device,
            progress=run.progress,
        )
        return {"measured": found.to_json()}

    stored = run.folder.remembered(f"influence-{task}-{beta:g}", compute)
    return MeasuredInfluence.from_json(stored["measured"])


def _at(
    run: Run, pool: Pool, examples: int, measured: Mapping[tuple[str, float], MeasuredInfluence]
) -> list[dict[str, Any]]:
    """All variants of one task at one N: tuned, then run on the same samples, starts and noise."""
    task, setting = pool.task.name, run.setting
    network = _network(setting, task)
    wanted = [v for v in VARIANTS if v.everywhere or examples == _focus(setting, pool)]
    curves = {v.key: _curve(v, task, measured) for v in wanted}
    chosen = [v for v in wanted if v.measured_momentum is None or curves[v.key] is not None]
    for variant in wanted:
        if variant not in chosen:
            run.say(
                f"{task}: no curve can be made of the measured influence, so {variant.title!r} "
                "is left out; more repeats would help"
            )
    tuned = {v.key: _tuned(run, task, examples, v, curves[v.key]) for v in chosen}
    run.say(f"{task}, N = {examples}: {setting.repeats} repeats of {len(chosen)} variants")
    samples = data.draw_many(pool, examples, range(setting.repeats))
    replicas = [
        Replica(
            sigmas=tuned[v.key].sigmas(v.budget, curves[v.key]),
            lr=tuned[v.key].lr,
            clip=tuned[v.key].clip,
            beta=tuned[v.key].momentum,
            seed=_FIRST_SEED + r,
            data=r,
        )
        for v in chosen
        for r in range(setting.repeats)
    ]
    outcomes = train(
        network,
        [sample.train for sample in samples],
        replicas,
        evaluate={"test": [sample.test for sample in samples]},
        device=run.device,
        progress=run.progress,
        store=run.folder.path / "runs" / f"{task}-{examples}.jsonl",
    )
    values = {
        v.key: _values(outcomes[k * setting.repeats : (k + 1) * setting.repeats])
        for k, v in enumerate(chosen)
    }
    return [
        {
            "task": task,
            "examples": examples,
            "variant": v.key,
            "title": v.title,
            "conversion": v.conversion,
            **asdict(tuned[v.key]),
            "epsilon": make_plan(
                tuned[v.key], v.budget, examples, network.parameters, curves[v.key]
            ).epsilon,
            "failed": int(np.isnan(values[v.key]["train_loss"]).sum()),
            **{m: interval(values[v.key][m])._asdict() for m in METRICS},
            "against_uniform": {
                m: paired(values[v.key][m], values[UNIFORM.key][m])._asdict() for m in METRICS
            },
            "against_same_budget": {
                m: paired(values[v.key][m], values[_reference(v, values)][m])._asdict()
                for m in METRICS
            },
        }
        for v in chosen
    ]


_FIRST_SEED = 10_000
"""Seeds of the repeats: none that tuning has used."""


def _curve(
    variant: Variant, task: str, measured: Mapping[tuple[str, float], MeasuredInfluence]
) -> Callable[[int], Vector] | None:
    beta = variant.measured_momentum
    return None if beta is None else influences.curve(measured[task, beta], beta)


def _reference(variant: Variant, values: Mapping[str, Any]) -> str:
    """Uniform noise under the same conversion, where that was run."""
    same = "uniform-exact" if variant.conversion == "exact" else UNIFORM.key
    return same if same in values else UNIFORM.key


def _values(outcomes: Sequence[Outcome]) -> dict[str, Vector]:
    def of(outcome: Outcome, metric: str) -> float:
        if outcome.status != "done":
            return math.nan
        if metric == "train_loss":
            return outcome.train_loss
        found = outcome.evaluations["test"][metric.removeprefix("test_")]
        return math.nan if found is None else found

    return {m: np.array([of(outcome, m) for outcome in outcomes]) for m in METRICS}


def _tuned(
    run: Run,
    task: str,
    examples: int,
    variant: Variant,
    curve: Callable[[int], Vector] | None,
) -> Candidate:
    setting = run.setting

    def compute() -> dict[str, Any]:
        run.say(f"{task}, N = {examples}: tuning {variant.title}")
        result = tune(
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
        )
        best = result.best
        return {
            "candidate": asdict(best.candidate),
            "score": best.score,
            "trials": [{**asdict(t.candidate), "score": t.score} for t in best.trials],
        }

    stored = run.folder.remembered(f"tuned-{task}-{examples}-{variant.key}", compute)
    candidate = Candidate(**stored["candidate"])
    run.say(f"{task}, N = {examples}: {variant.title}: {_words(candidate)}")
    return candidate


def _words(candidate: Candidate) -> str:
    words = [f"T = {candidate.steps}"]
    if candidate.fall is not None:
        words.append(f"σ falls to {candidate.fall:.2f}")
    words.append(f"lr {candidate.lr:.3g}, clip {candidate.clip:.3g}")
    if candidate.momentum:
        words.append(f"momentum {candidate.momentum:.2f}")
    return ", ".join(words)


def _efficiency(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every variant: how many examples uniform noise, as printed, needs for its accuracy."""
    rows = []
    for task in dict.fromkeys(cell["task"] for cell in cells):
        mine = [cell for cell in cells if cell["task"] == task]
        uniform = sorted(
            (cell for cell in mine if cell["variant"] == UNIFORM.key), key=lambda c: c["examples"]
        )
        for cell in mine:
            if cell["variant"] == UNIFORM.key:
                continue
            needed = examples_needed(
                [u["examples"] for u in uniform],
                [u["test_accuracy"]["mean"] for u in uniform],
                cell["test_accuracy"]["mean"],
            )
            rows.append(
                {
                    "task": task,
                    "variant": cell["variant"],
                    "title": cell["title"],
                    "examples": cell["examples"],
                    "uniform_needs": needed,
                    "ratio": None if needed is None else needed / cell["examples"],
                }
            )
    return rows


def tables(run: Run) -> dict[str, Any]:
    """Both tables of bounds over N, and the bounds against the measured excess risk."""
    budget = Budget(epsilon=EPSILON, delta=DELTA)
    counts = [100, 1000, 10_000, 100_000, 1_000_000]

    def rows(table: Callable[..., list[bounds.Row]]) -> list[dict[str, Any]]:
        columns = [table(budget, examples=n, parameters=_DIMENSION) for n in counts]
        return [
            {
                "algorithm": row[0].algorithm,
                "formula": row[0].formula,
                "ours": row[0].ours,
                "bounds": [r.bound for r in row],
            }
            for row in zip(*columns, strict=True)
        ]

    run.say("both tables, and bounds against measured excess risk")
    return {
        "examples": counts,
        "parameters": _DIMENSION,
        "empirical": rows(bounds.empirical_risk_table),
        "true": rows(bounds.true_risk_table),
        "excess": run.folder.remembered(
            "excess", lambda: excess.compare(budget, counts=(50, 100, 200, 500, 1000))
        ),
    }


_DIMENSION = 100

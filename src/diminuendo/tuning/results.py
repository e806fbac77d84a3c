"""What tuning on auxiliary data returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diminuendo import _files
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.replicas.replica import Model
from diminuendo.replicas.statistics import Interval
from diminuendo.report import figures
from diminuendo.report.figures import Point
from diminuendo.training.clipping import Automatic, Clip, Flat, PerLayer
from diminuendo.tuning.networks import Linear, TwoLayers
from diminuendo.tuning.space import Candidate

CHOICE = "diminuendo.choice/1"
"""The schema of a choice as JSON."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate and its score (lower is better); None where a run was not finite."""

    candidate: Candidate
    score: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """How to train: `fit(choice.model(), data, choice, loss=…)` follows it in everything.

    plan       σ_1…σ_T, steps, clip norm, momentum, sampling rate and the shape of the learning rate
    lr         the learning rate; where the plan has learning rates, what those are multiplied by
    candidate  all settings by their names
    model      makes the module when called; None for a choice read from a file whose model was the
               user's own
    """

    plan: Plan
    lr: float
    candidate: Candidate
    model: Model | None = None

    @property
    def clip(self) -> Clip:
        """The clipping rule, for `fit(clip=…)`."""
        rules = {"flat": Flat, "automatic": Automatic, "per-layer": PerLayer}
        rule: Clip = rules[self.candidate.clipping](self.plan.clip)
        return rule

    @property
    def hidden(self) -> int | None:
        """Units of the hidden layer, 0 for a linear model; None for the user's own models, and for
        those that scale their features."""
        if not isinstance(self.model, (Linear, TwoLayers)) or self.model.ordered:
            return None
        return self.model.hidden if isinstance(self.model, TwoLayers) else 0

    def to_json(self) -> str:
        """One JSON object, for `diminuendo train`; a model of the user's own is left out."""
        model = None
        if isinstance(self.model, (Linear, TwoLayers)):
            model = {"hidden": 0, **asdict(self.model)}
        return json.dumps(
            {
                "schema": CHOICE,
                "lr": self.lr,
                "candidate": asdict(self.candidate),
                "model": model,
                "plan": json.loads(self.plan.to_json()),
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str, *, source: str = "the given text") -> Choice:
        """Read a choice; its plan is checked as `Plan.from_json` does it."""
        values = _files.parse_json(text, name="the choice", source=source)
        try:
            if values["schema"] != CHOICE:
                raise KeyError(values["schema"])
            model = values["model"]
            own = None
            if model is not None:
                ends = int(model["features"]), int(model["classes"])
                hidden, ordered = int(model["hidden"]), bool(model.get("ordered", False))
                own = TwoLayers(ends[0], hidden, ends[1]) if hidden else Linear(*ends)
                own = replace(own, ordered=ordered)
            candidate, lr = Candidate(**values["candidate"]), float(values["lr"])
            plan = json.dumps(values["plan"], ensure_ascii=False)
        except (TypeError, KeyError, ValueError):
            raise InputError(
                "a choice that `diminuendo tune` wrote", name="the choice", value=source
            ) from None
        return cls(plan=Plan.from_json(plan, source=source), lr=lr, candidate=candidate, model=own)


@dataclass(frozen=True, kw_only=True, eq=False)
class FamilyResult(Choice):
    """The best candidate of one family of schedules, or under one restriction.

    score     the objective that it reached on auxiliary data while searching; lower is better
    searched  the names of the settings that were searched
    trials    all candidates
    held_out  the objective on auxiliary data that no choice was made on, with a 95% interval; None
              where families of schedules are compared
    accuracy  test accuracy in [0, 1] there, with a 95% interval
    """

    family: str
    score: float
    searched: tuple[str, ...]
    trials: tuple[Trial, ...]
    held_out: Interval | None = None
    accuracy: Interval | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Ablation:
    """What is left when one choice is taken away, everything else tuned again without it.

    name    what is left: "uniform noise, constant rate", "no momentum", "linear alone"
    best    the best candidate under the restriction
    loss    by how much its objective is above `TuningResult.best`'s on held-out auxiliary data:
            the mean of paired differences with its 95% interval; above zero the choice helps
    """

    name: str
    best: FamilyResult
    loss: Interval

    @property
    def matters(self) -> bool:
        """Whether the whole interval of `loss` lies above zero."""
        return self.loss.low > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningResult:
    """What was found: the best of all, of each family of schedules, and without each choice.

    minimise   the objective: "train-loss", "test-loss" or "test-error"
    settings   the arguments of the search, as JSON values
    warning    says that the influence was measured on private data, where it was; else None
    chosen     the best of all, where everything was chosen together
    ablations  what each choice gives, where everything was chosen together
    """

    families: Mapping[str, FamilyResult]
    minimise: str
    settings: Mapping[str, Any]
    warning: str | None = None
    chosen: FamilyResult | None = None
    ablations: tuple[Ablation, ...] = ()

    @property
    def best(self) -> FamilyResult:
        """The best of all: the one chosen, or the family with the lowest score."""
        if self.chosen is not None:
            return self.chosen
        return min(self.families.values(), key=lambda family: family.score)

    def points(self) -> list[Point]:
        """Every candidate with a finite score, for `report.figures.landscape`."""
        return [
            Point(
                name,
                {key: getattr(trial.candidate, key) for key in family.searched},
                trial.score,
            )
            for name, family in self.families.items()
            for trial in family.trials
            if trial.score is not None
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The ablations as headers and rows: the best first, then what each choice gives."""
        headers = ["", "settings", self.minimise, "accuracy", "above the best"]
        rows = [["best", str(self.best.candidate), *_shown(self.best), ""]]
        rows += [
            [one.name, str(one.best.candidate), *_shown(one.best), one.loss.signed()]
            for one in self.ablations
        ]
        return headers, rows

    def picture(self, path: str | Path) -> Path:
        """The ablations with their intervals, as SVG, PNG or PDF by the path's ending."""
        if self.best.held_out is None:
            raise InputError(
                "a result of tuning that chose everything together",
                name="the picture of ablations",
                value=sorted(self.families),
                remedy="report.figures.landscape(tuned.points(), …) draws compared families.",
            )
        return figures.ranking(
            ["best", *(one.name for one in self.ablations)],
            [0.0, *(one.loss.mean for one in self.ablations)],
            [0.0, *(one.loss.half for one in self.ablations)],
            path,
            title="What each choice gives: everything else tuned without it",
            xlabel=f"{self.minimise} above the best's, on held-out auxiliary data",
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it but the σ_t, as JSON values.

        These are public facts about public data, unless `warning` says otherwise.
        """
        told: dict[str, Any] = {
            "best": self.best.family,
            "warning": self.warning,
            "minimise": self.minimise,
            "settings": dict(self.settings),
            "families": {
                name: {
                    **_told(family),
                    "trials": [
                        {**asdict(trial.candidate), "score": trial.score} for trial in family.trials
                    ],
                }
                for name, family in self.families.items()
            },
        }
        if self.chosen is not None:
            told["chosen"] = _told(self.chosen)
            told["ablations"] = [
                {"name": one.name, "loss": one.loss._asdict(), **_told(one.best)}
                for one in self.ablations
            ]
        return told


def _shown(result: FamilyResult) -> list[str]:
    return ["–" if one is None else str(one) for one in (result.held_out, result.accuracy)]


def _told(family: FamilyResult) -> dict[str, Any]:
    told = {
        "score": family.score,
        "lr": family.lr,
        **{k: v for k, v in asdict(family.candidate).items() if k != "lr"},
        "plan": family.plan.digest,
        "assumptions": list(family.plan.assumptions),
    }
    for name in ("held_out", "accuracy"):
        value = getattr(family, name)
        if value is not None:
            told[name] = value._asdict()
    return told

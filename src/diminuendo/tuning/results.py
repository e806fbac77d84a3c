"""What tuning on auxiliary data returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diminuendo.planning import Plan
from diminuendo.report.figures import Point
from diminuendo.tuning.space import Candidate


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate and its score (lower is better); None where a run was not finite."""

    candidate: Candidate
    score: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FamilyResult:
    """The best candidate of one family.

    plan      the candidate as a plan for the private data
    lr        the learning rate to run the plan at
    score     the objective that it reached on auxiliary data; lower is better
    searched  the names of the settings that were searched
    trials    all candidates
    """

    family: str
    plan: Plan
    lr: float
    score: float
    candidate: Candidate
    searched: tuple[str, ...]
    trials: tuple[Trial, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningResult:
    """The best candidate of every family.

    minimise  the objective: "train-loss" or "test-loss"
    settings  the arguments of the search, as JSON values
    warning   says that the influence was measured on private data, where it was; else None
    """

    families: Mapping[str, FamilyResult]
    minimise: str
    settings: Mapping[str, Any]
    warning: str | None = None

    @property
    def best(self) -> FamilyResult:
        """The family with the lowest score."""
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

    def to_dict(self) -> dict[str, Any]:
        """All of it but the σ_t, as JSON values.

        These are public facts about public data, unless `warning` says otherwise.
        """
        return {
            "best": self.best.family,
            "warning": self.warning,
            "minimise": self.minimise,
            "settings": dict(self.settings),
            "families": {
                name: {
                    "score": family.score,
                    "lr": family.lr,
                    **{k: v for k, v in asdict(family.candidate).items() if k != "lr"},
                    "plan": family.plan.digest,
                    "assumptions": list(family.plan.assumptions),
                    "trials": [
                        {**asdict(trial.candidate), "score": trial.score} for trial in family.trials
                    ],
                }
                for name, family in self.families.items()
            },
        }

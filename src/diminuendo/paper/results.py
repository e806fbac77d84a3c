"""The values that a reproduction finds, and their JSON (`results.json`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from diminuendo import _files
from diminuendo.errors import InputError
from diminuendo.replicas.statistics import Interval

Metric = Literal["train_loss", "test_loss", "test_accuracy"]
METRICS: tuple[Metric, ...] = ("train_loss", "test_loss", "test_accuracy")
Part = Literal["figure", "tables", "joint"]
PARTS: tuple[Part, ...] = ("figure", "tables", "joint")
FILE = "results.json"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant of one task at one number of examples: its settings and what the runs reached.

    epsilon              ε of one run, an upper bound, at the figure's δ
    failed               how many runs were not finite; they are left out of the means
    train_loss, test_loss, test_accuracy
                         means over runs with 95% intervals
    against_uniform      paired differences, by metric, to uniform noise with the paper's conversion
    against_same_budget  the same, to uniform noise with the variant's own conversion
    """

    task: str
    examples: int
    variant: str
    title: str
    conversion: str
    family: str
    steps: int
    lr: float
    clip: float
    momentum: float
    fall: float | None
    epsilon: float
    failed: int
    train_loss: Interval
    test_loss: Interval
    test_accuracy: Interval
    against_uniform: Mapping[Metric, Interval]
    against_same_budget: Mapping[Metric, Interval]

    def metric(self, name: Metric) -> Interval:
        """The mean of this metric, with its interval."""
        value: Interval = getattr(self, name)
        return value

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        """The cell that these JSON values describe."""
        values = _known(cls, data)
        values |= {name: _interval(data[name]) for name in METRICS}
        for name in ("against_uniform", "against_same_budget"):
            values[name] = {metric: _interval(data[name][metric]) for metric in METRICS}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class InfluenceCurve:
    """The influence of some steps' σ² on the final loss, measured on auxiliary data.

    steps               the measured steps, from 1
    mean, half          mean influence of each, and the half-width of its 95% interval
    total               T, the number of steps of the run
    gamma, gamma_low, gamma_high, r_squared
                        the exponential fit γ^(T−t), or None where too few points are positive
    """

    task: str
    momentum: float
    steps: Sequence[int]
    mean: Sequence[float]
    half: Sequence[float]
    total: int
    gamma: float | None
    gamma_low: float | None
    gamma_high: float | None
    r_squared: float | None


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How many examples uniform noise needs for the test accuracy that a variant reaches with N.

    uniform_needs, ratio  that number, and over N; None where it lies beyond the grid
    """

    task: str
    variant: str
    title: str
    examples: int
    uniform_needs: float | None
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class FigureResults:
    """Everything that the figure shows.

    data    where the digits come from
    grids   numbers of examples, by task
    focus   the number of examples at which all variants are run, by task
    """

    data: str
    epsilon: float
    delta: float
    repeats: int
    grids: Mapping[str, Sequence[int]]
    focus: Mapping[str, int]
    influence: Sequence[InfluenceCurve]
    cells: Sequence[Cell]
    efficiency: Sequence[Efficiency]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FigureResults:
        """The results that these JSON values describe."""
        return cls(
            **{
                **_known(cls, data),
                "influence": [_read(InfluenceCurve, one) for one in data["influence"]],
                "cells": [Cell.from_dict(one) for one in data["cells"]],
                "efficiency": [_read(Efficiency, one) for one in data["efficiency"]],
            }
        )


@dataclass(frozen=True, kw_only=True)
class BoundRow:
    """One algorithm of a table: its bound for each number of examples."""

    algorithm: str
    formula: str
    ours: bool
    bounds: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ExcessRisk:
    """A bound and the measured excess risk (mean and 95% half-width), over the initial gap."""

    problem: str
    examples: int
    schedule: str
    steps: int
    bound: float
    measured: float
    half: float


@dataclass(frozen=True, kw_only=True)
class TableResults:
    """Both tables of bounds, and bounds compared with measured excess risk.

    examples    the numbers of examples at which the tables are evaluated
    parameters  D
    empirical   Table 1, excess empirical risk
    true        Table 2, excess true risk
    """

    examples: Sequence[int]
    parameters: int
    empirical: Sequence[BoundRow]
    true: Sequence[BoundRow]
    excess: Sequence[ExcessRisk]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TableResults:
        """The results that these JSON values describe."""
        return cls(
            **{
                **_known(cls, data),
                "empirical": [_read(BoundRow, row) for row in data["empirical"]],
                "true": [_read(BoundRow, row) for row in data["true"]],
                "excess": [_read(ExcessRisk, row) for row in data["excess"]],
            }
        )


@dataclass(frozen=True, kw_only=True)
class JointCell:
    """One model trained in one way at one budget: its settings and what the runs reached.

    method           "uniform", "fading" (noise), "falling" (learning rate) or "joint"
    chosen           whether this is what the tool chooses: the model that does best on auxiliary
                     data, everything tuned together
    fall, lr_fall    σ_T/σ_1 and η_T/η_1; 1 where they do not fall
    auxiliary_error  the error rate of the model's "joint" settings on the auxiliary sets on which
                     models are compared
    spent            certified ε of one run
    failed           how many runs were not finite; they are left out of the means
    against_uniform  paired difference in test accuracy to the same model under "uniform"; zero for
                     a model that was run in one way only
    """

    task: str
    examples: int
    epsilon: float
    delta: float
    model: str
    parameters: int
    method: str
    chosen: bool
    steps: int
    lr: float
    lr_shape: str
    lr_fall: float
    fall: float
    clip: float
    clipping: str
    momentum: float
    auxiliary_error: float
    spent: float
    failed: int
    train_loss: Interval
    test_accuracy: Interval
    against_uniform: Interval

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JointCell:
        """The cell that these JSON values describe."""
        names = ("train_loss", "test_accuracy", "against_uniform")
        return cls(**{**_known(cls, data), **{name: _interval(data[name]) for name in names}})


@dataclass(frozen=True, kw_only=True)
class JointResults:
    """Noise, learning rate and model together.

    data, public   by task: where the data come from, and what tuning saw instead
    """

    data: Mapping[str, str]
    public: Mapping[str, str]
    repeats: int
    cells: Sequence[JointCell]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JointResults:
        """The results that these JSON values describe."""
        cells = [JointCell.from_dict(one) for one in data["cells"]]
        return cls(**{**_known(cls, data), "cells": cells})


@dataclass(frozen=True, kw_only=True)
class Results:
    """A reproduction's results; a part that was not run is None."""

    figure: FigureResults | None = None
    tables: TableResults | None = None
    joint: JointResults | None = None

    def merged(self, newer: Results) -> Results:
        """These results with the parts of newer ones in place of their own."""
        return Results(
            figure=newer.figure or self.figure,
            tables=newer.tables or self.tables,
            joint=newer.joint or self.joint,
        )

    def to_dict(self) -> dict[str, Any]:
        """The parts that were run, as JSON values; numbers that are not finite become None."""
        return {name: plain(part) for name in PARTS if (part := getattr(self, name)) is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Results:
        """The results that these JSON values describe."""
        figure, tables, joint = (data.get(name) for name in PARTS)
        return cls(
            figure=None if figure is None else FigureResults.from_dict(figure),
            tables=None if tables is None else TableResults.from_dict(tables),
            joint=None if joint is None else JointResults.from_dict(joint),
        )

    @classmethod
    def read(cls, folder: Path) -> Results:
        """What a folder's results.json holds; nothing where there is no such file."""
        path = folder / FILE
        if not path.exists():
            return cls()
        text = _files.read_text(path, name="the results")
        stored = _files.parse_json(text, name="the results", source=str(path))
        try:
            return cls.from_dict(stored)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                "results that `diminuendo reproduce` wrote",
                name="the results",
                value=str(path),
                remedy=f"({type(error).__name__}: {error})",
            ) from None


def plain(value: Any) -> Any:
    """A value as JSON has it: results become objects, numbers that are not finite None."""
    if isinstance(value, Interval):
        return plain(value._asdict())
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {entry.name: data[entry.name] for entry in fields(kind)}


def _read(kind: type[Any], data: Mapping[str, Any]) -> Any:
    return kind(**_known(kind, data))


def _interval(data: Mapping[str, Any]) -> Interval:
    return Interval(*(math.nan if data[n] is None else float(data[n]) for n in ("mean", "half")))

"""The page's sections about noise, learning rate and model together, with their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from diminuendo.paper.joint import METHODS
from diminuendo.paper.output import write_csv, write_panels
from diminuendo.paper.results import JointCell, JointResults
from diminuendo.replicas.statistics import Interval
from diminuendo.report import html
from diminuendo.report.figures import Panel, Series

WAYS = {
    "uniform": "uniform noise, constant learning rate",
    "fading": "fading noise, constant learning rate",
    "falling": "uniform noise, falling learning rate",
    "joint": "what is best of one, both or neither",
}
HOW = (
    "Each model is tuned in four ways on auxiliary data alone: clip norm, clipping rule, momentum, "
    "number of steps and size of the learning rate in all of them. 'fading' and 'falling' must "
    "fall at least a little; 'joint' takes what is best on the auxiliary data, also neither, and "
    "is then the same run as 'uniform', with a difference of exactly zero. The model with the "
    "lowest error on further auxiliary sets, the same for all models, is the one chosen."
)
_INTERVALS = ("train_loss", "test_accuracy", "against_uniform")


def sections(folder: Path, results: JointResults) -> list[html.Section]:
    """The sections about the part `joint`; also writes its CSV file and pictures."""
    _write_csv(folder, results)
    parts = [_summary(results)]
    for task in dict.fromkeys(cell.task for cell in results.cells):
        own = [cell for cell in results.cells if cell.task == task]
        picture = write_panels(_panels(own), folder, f"joint-{task.lower().replace(' ', '-')}")
        parts.append(_task_section(task, own, picture, results))
    return parts


def _write_csv(folder: Path, results: JointResults) -> None:
    names = [entry.name for entry in fields(JointCell) if entry.name not in _INTERVALS]
    write_csv(
        folder / "joint.csv",
        [*names, *(f"{name}{part}" for name in _INTERVALS for part in ("", "_half"))],
        [
            [
                *(getattr(cell, name) for name in names),
                *(number for name in _INTERVALS for number in getattr(cell, name)),
            ]
            for cell in results.cells
        ],
    )


def _budget(cell: JointCell) -> str:
    return f"({cell.epsilon:g}, {cell.delta:g})"


def _summary(results: JointResults) -> html.Section:
    lines = [
        _count(results.cells, method, WAYS[method]) for method in METHODS if method != "uniform"
    ]
    return html.Section(
        "Noise, learning rate and model together",
        html.paragraph(f"{results.repeats} paired repeats in every cell."),
        html.bullets(lines),
        HOW,
        html.facts(
            (task, f"{results.data[task]}; tuned on {results.public[task]}")
            for task in results.data
        ),
    )


def _count(cells: Sequence[JointCell], method: str, words: str) -> str:
    """In how many cells a way of training is better or worse than uniform noise, and how much."""
    own = [c for c in cells if c.method == method and _compared(c, cells)]
    better = sum(c.against_uniform.low > 0 for c in own)
    worse = sum(c.against_uniform.high < 0 for c in own)
    same = sum(c.against_uniform == Interval(0.0, 0.0) for c in own)
    mean = sum(c.against_uniform.mean for c in own) / max(len(own), 1)
    return (
        f"{words[0].upper()}{words[1:]}: more accurate than uniform noise at a constant learning "
        f"rate in {better} of {len(own)} comparisons with the whole interval, less in {worse}, the "
        f"same run in {same}; {mean:+.4f} on average."
    )


def _compared(cell: JointCell, cells: Sequence[JointCell]) -> bool:
    """Whether the same model was run with uniform noise, too."""
    return any(_place(c) == _place(cell) and c.method == "uniform" for c in cells)


def _place(cell: JointCell) -> tuple[str, int, float, str]:
    return cell.task, cell.examples, cell.epsilon, cell.model


def _panels(cells: Sequence[JointCell]) -> list[Panel]:
    """One panel for each budget: the compared models in four ways, and what the tool chooses."""
    panels = []
    for epsilon, delta in sorted({(c.epsilon, c.delta) for c in cells}):
        here = [c for c in cells if c.epsilon == epsilon]
        series = []
        for model in dict.fromkeys(c.model for c in here if _compared(c, here)):
            for method in ("uniform", "joint"):
                own = [c for c in here if c.model == model and c.method == method]
                series.append(_series(f"{model}, {method}", own))
        series.append(_series("chosen", [c for c in here if c.chosen]))
        panels.append(
            Panel(f"({epsilon:g}, {delta:g})", "examples N", "test accuracy", series, True)
        )
    return panels


def _series(name: str, cells: Sequence[JointCell]) -> Series:
    own = sorted(cells, key=lambda c: c.examples)
    return Series(
        name,
        [c.examples for c in own],
        [c.test_accuracy.mean for c in own],
        [c.test_accuracy.half for c in own],
    )


def _task_section(
    task: str, cells: Sequence[JointCell], picture: Path, results: JointResults
) -> html.Section:
    ordered = sorted(cells, key=lambda c: (c.epsilon, c.examples))
    return html.Section(
        f"{task}: what a budget affords",
        html.figure(
            picture,
            f"Test accuracy against the number of examples, mean over {results.repeats} repeats "
            "with 95% intervals, a panel for each (ε, δ).",
        ),
        html.table(
            [
                "(ε, δ), N",
                "model",
                "way",
                "T",
                "σ falls to",
                "lr falls to",
                "clip",
                "momentum",
                "test accuracy",
                "− uniform",
            ],
            [
                [
                    f"{_budget(c)}, {c.examples}",
                    f"{c.model}{' (chosen)' if c.chosen else ''}",
                    c.method,
                    c.steps,
                    "" if c.fall == 1 else f"{c.fall:.2f}",
                    "" if c.lr_shape == "constant" else f"{c.lr_fall:.2f}, {c.lr_shape}",
                    f"{c.clip:.3g}{'' if c.clipping == 'flat' else ', ' + c.clipping}",
                    f"{c.momentum:.1f}" if c.momentum else "",
                    str(c.test_accuracy),
                    c.against_uniform.signed() if _compared(c, cells) else "",
                ]
                for c in ordered
            ],
            caption="Differences are paired: same sample, start and noise directions.",
        ),
    )

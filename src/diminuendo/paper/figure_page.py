"""The page's sections about the figure, with its CSV files and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diminuendo.paper.output import PICTURES, write_csv, write_panels
from diminuendo.paper.results import METRICS, Cell, FigureResults, Metric
from diminuendo.paper.variants import EXPONENTIAL, UNIFORM
from diminuendo.report import figures, html
from diminuendo.report.figures import Panel, Series

PAIRED = (
    "Differences are paired: run k of both schedules has the same sample, the same start and the "
    "same noise directions, so that what they share drops out. Intervals are 95% (Student's t)."
)


def sections(folder: Path, results: FigureResults) -> list[html.Section]:
    """The sections about the figure; also writes its CSV files and pictures into the folder."""
    _write_csv(folder, results)
    parts = [_summary(results), _influence(results)]
    for task in results.grids:
        own = [cell for cell in results.cells if cell.task == task]
        picture = write_panels(_panels(task, own, results), folder, f"figure-{task.lower()}")
        parts.append(_task_section(task, own, picture, results))
        parts.append(_focus_section(folder, task, own, results))
    parts.append(_efficiency(results))
    return parts


def _write_csv(folder: Path, results: FigureResults) -> None:
    names = (
        "task",
        "examples",
        "variant",
        "conversion",
        "family",
        "steps",
        "fall",
        "lr",
        "clip",
        "momentum",
        "epsilon",
        "failed",
    )
    write_csv(
        folder / "cells.csv",
        [
            *names,
            *(f"{m}{part}" for m in METRICS for part in ("", "_half")),
            *(f"{m}_minus_uniform{part}" for m in METRICS for part in ("", "_half")),
        ],
        [
            [
                *(getattr(cell, name) for name in names),
                *(number for m in METRICS for number in cell.metric(m)),
                *(number for m in METRICS for number in cell.against_uniform[m]),
            ]
            for cell in results.cells
        ],
    )
    write_csv(
        folder / "influence.csv",
        ["task", "momentum", "step", "influence", "half"],
        [
            [one.task, one.momentum, t, mean, half]
            for one in results.influence
            for t, mean, half in zip(one.steps, one.mean, one.half, strict=True)
        ],
    )
    write_csv(
        folder / "efficiency.csv",
        ["task", "variant", "examples", "uniform_needs", "ratio"],
        [
            [row.task, row.variant, row.examples, row.uniform_needs, row.ratio]
            for row in results.efficiency
        ],
    )


def _by_examples(cells: Sequence[Cell], key: str) -> list[Cell]:
    """One variant's cells, by the number of examples."""
    return sorted((c for c in cells if c.variant == key), key=lambda c: c.examples)


def _panels(task: str, cells: Sequence[Cell], results: FigureResults) -> list[Panel]:
    def series(metric: Metric) -> list[Series]:
        return [
            Series(
                name,
                [c.examples for c in _by_examples(cells, key)],
                [c.metric(metric).mean for c in _by_examples(cells, key)],
                [c.metric(metric).half for c in _by_examples(cells, key)],
            )
            for name, key in (("uniform", UNIFORM.key), ("exponential", EXPONENTIAL.key))
        ]

    influences = [one for one in results.influence if one.task == task]
    return [
        Panel(
            "influence by retraining",
            "step",
            "influence of σ² on the final loss",
            [
                Series(
                    f"momentum {one.momentum:g}" if one.momentum else "gradient descent",
                    one.steps,
                    one.mean,
                    one.half,
                )
                for one in influences
            ],
            log_y=all(value > 0 for one in influences for value in one.mean),
        ),
        Panel(f"{task}: training loss", "examples N", "training loss", series("train_loss"), True),
        Panel(
            f"{task}: test accuracy", "examples N", "test accuracy", series("test_accuracy"), True
        ),
    ]


def _summary(results: FigureResults) -> html.Section:
    """Whether the exponential schedule beats uniform noise, by unrounded numbers."""
    pairs = [c for c in results.cells if c.variant == EXPONENTIAL.key]
    won = [c for c in pairs if c.against_uniform["train_loss"].high < 0]
    lines: list[html.Html] = [
        html.note(
            f"In {len(won)} of {len(pairs)} cells the exponential schedule has the lower mean "
            "training loss, with the whole paired 95% interval below zero"
            + (
                "."
                if len(won) == len(pairs)
                else "; not in "
                + ", ".join(f"{c.task} at N = {c.examples}" for c in pairs if c not in won)
                + "."
            ),
            tone="good" if len(won) == len(pairs) else "warning",
        )
    ]
    for task, focus in results.focus.items():
        own = [c for c in results.cells if c.task == task and c.examples == focus]
        best = max(own, key=lambda c: c.test_accuracy.mean)
        base = next(c for c in own if c.variant == UNIFORM.key)
        gain = best.against_uniform["test_accuracy"]
        lines.append(
            html.note(
                f"{task}, N = {focus}: the best is '{best.title}' with test accuracy "
                f"{best.test_accuracy}, where uniform noise with the paper's "
                f"conversion reaches {base.test_accuracy} at the same (ε, δ): "
                f"a paired difference of {gain.signed()}."
            )
        )
    return html.Section(
        "In short",
        html.paragraph(
            f"{results.repeats} repeats; data: {results.data}; "
            f"(ε, δ) = ({results.epsilon:g}, {results.delta:g})."
        ),
        *lines,
        PAIRED,
    )


def _influence(results: FigureResults) -> html.Section:
    return html.Section(
        "How much each step's noise matters",
        "Runs are repeated with more noise in one step and everything else unchanged. The "
        "influence is the change of the final loss per unit of that step's σ², on synthetic "
        "data of the private set's shape. Where it is positive it rises about like γ^(T−t), and "
        "the best σ_t then falls like γ^(t/4). With momentum it bends at the end, since the "
        "average smooths the last steps. Where it is negative, noise in that step lowers the "
        "final loss. Such points are left out of the fit.",
        html.table(
            ["task", "momentum", "γ of the exponential fit", "95% interval", "R² of the fit"],
            [
                [
                    one.task,
                    f"{one.momentum:g}",
                    *(
                        ("–", "–", "–")
                        if one.gamma is None
                        else (
                            f"{one.gamma:.4f}",
                            f"{one.gamma_low:.4f} to {one.gamma_high:.4f}",
                            f"{one.r_squared:.3f}",
                        )
                    ),
                ]
                for one in results.influence
            ],
        ),
    )


def _task_section(
    task: str, cells: Sequence[Cell], picture: Path, results: FigureResults
) -> html.Section:
    rows = []
    columns = (_by_examples(cells, key) for key in (UNIFORM.key, EXPONENTIAL.key))
    for base, other in zip(*columns, strict=True):
        rows.append(
            [
                f"N = {base.examples}",
                f"{base.steps} / {other.steps}, {other.fall:.2f}",
                str(base.train_loss),
                str(other.train_loss),
                other.against_uniform["train_loss"].signed(),
                str(base.test_accuracy),
                str(other.test_accuracy),
                other.against_uniform["test_accuracy"].signed(),
            ]
        )
    return html.Section(
        f"{task}: the setting as printed",
        "60 principal components, standardised, largest norm 10; 1000 hidden units; clip norm 4; "
        "learning rate 0.1; T between 50 and 150; the paper's conversion of (4, 1e-8).",
        html.figure(
            picture,
            f"Left: influence by iteration, by retraining on synthetic data. Middle and right: "
            f"{task}, mean over {results.repeats} repeats with 95% intervals.",
        ),
        html.table(
            [
                "",
                "T uniform / exponential, its fall",
                "loss, uniform",
                "loss, exponential",
                "difference",
                "accuracy, uniform",
                "accuracy, exponential",
                "difference",
            ],
            rows,
            caption="Training loss and test accuracy; differences are paired.",
        ),
    )


def _focus_section(
    folder: Path, task: str, cells: Sequence[Cell], results: FigureResults
) -> html.Section:
    focus = results.focus[task]
    own = [cell for cell in cells if cell.examples == focus]
    name = f"variants-{task.lower()}"
    arguments = (
        [c.title for c in own],
        [c.test_accuracy.mean for c in own],
        [c.test_accuracy.half for c in own],
    )
    for ending in PICTURES:
        figures.ranking(
            *arguments,
            folder / f"{name}.{ending}",
            title=f"{task}, N = {focus}, (4, 1e-8)",
            xlabel="test accuracy",
        )
    return html.Section(
        f"{task}: other ways to spend the same (ε, δ)",
        html.figure(folder / f"{name}.svg", "Test accuracy, means with 95% intervals."),
        html.table(
            [
                "variant",
                "T",
                "fall",
                "lr",
                "clip",
                "momentum",
                "training loss",
                "test accuracy",
                "accuracy − uniform, as printed",
                "accuracy − uniform, same conversion",
            ],
            [
                [
                    c.title,
                    c.steps,
                    "" if c.fall is None else f"{c.fall:.2f}",
                    f"{c.lr:.3g}",
                    f"{c.clip:.3g}",
                    f"{c.momentum:.2f}" if c.momentum else "",
                    str(c.train_loss),
                    str(c.test_accuracy),
                    c.against_uniform["test_accuracy"].signed(),
                    c.against_same_budget["test_accuracy"].signed(),
                ]
                for c in own
            ],
        ),
    )


def _efficiency(results: FigureResults) -> html.Section:
    return html.Section(
        "Data efficiency",
        "How many examples uniform noise (as printed) needs for the test accuracy that a variant "
        "reaches with N, interpolated between its measured accuracies on a logarithmic scale of N. "
        "A dash means that the number lies outside the grid of N.",
        html.table(
            ["task and variant", "N", "uniform needs", "ratio"],
            [
                [
                    f"{row.task}: {row.title}",
                    row.examples,
                    "–" if row.uniform_needs is None else f"{row.uniform_needs:.0f}",
                    "–" if row.ratio is None else f"{row.ratio:.3f}",
                ]
                for row in results.efficiency
            ],
        ),
    )

"""What a reproduction found, told: JSON, CSV, pictures, and one page of HTML."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diminuendo import __version__, _files
from diminuendo.paper.data import NOT_COVERED
from diminuendo.paper.variants import EXPONENTIAL, UNIFORM
from diminuendo.report import figures, html
from diminuendo.report.figures import Panel, Series

Facts = Mapping[str, Any]

CLAIM = (
    "Each training run is T Gaussian steps on clipped, summed gradients of the whole sample, for "
    "add-remove neighbours and an adversary who sees every noisy gradient. Seeds are fixed so that "
    "everybody gets these numbers: as releases, these very runs would not be private."
)
LEFT_OUT = (
    *NOT_COVERED,
    "Losses and accuracies on this page are computed on the training and test data without noise: "
    "they are the experiment's measurements, not private releases.",
    "Numbers of steps, falls, learning rates, clip norms and momenta were tuned on synthetic data "
    "only. Which kind of synthetic labels to use (those of a random linear teacher) and what to "
    "minimise (the training loss) was chosen by people who had seen MNIST results, and so was the "
    "tuner's effort: with fewer runs per candidate and without trying the ends of the range of T "
    "first, the exponential schedule did not beat uniform noise on MNIST35 at N = 250.",
)
PAIRED = (
    "Differences are paired: run k of both schedules has the same sample, the same start and the "
    "same noise directions, so that what they share drops out. Intervals are 95% (Student's t)."
)


def write(folder: Path, results: Mapping[str, Facts]) -> Path:
    """All files; returns the page's path."""
    _files.write_text(
        folder / "results.json", json.dumps(plain(results), indent=1, ensure_ascii=False)
    )
    sections: list[html.Section] = []
    if "figure" in results:
        sections += _figure(folder, results["figure"])
    if "tables" in results:
        sections += _tables(folder, results["tables"])
    sections.append(
        html.Section(
            "What the privacy claim covers, and what it does not", CLAIM, html.bullets(LEFT_OUT)
        )
    )
    document = html.page(
        "Noise that fades: the paper's evidence, reproduced",
        sections,
        lead="Private gradient descent at (4, 1e-8): what a schedule gains over even noise, "
        "measured.",
        footer=f"diminuendo {__version__}. Every number here is also in results.json and the CSV "
        "files beside this page.",
    )
    return html.write_page(folder / "index.html", document)


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(path: Path, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(rows)
    _files.write_text(path, text.getvalue())


def _both(panels: Sequence[Panel], folder: Path, name: str) -> Path:
    figures.with_intervals(panels, folder / f"{name}.png")
    return figures.with_intervals(panels, folder / f"{name}.svg")


def number(facts: Facts, digits: int = 4) -> str:
    return f"{facts['mean']:.{digits}f} ± {facts['half']:.{digits}f}"


def signed(facts: Facts, digits: int = 4) -> str:
    return f"{facts['mean']:+.{digits}f} ± {facts['half']:.{digits}f}"


def _figure(folder: Path, results: Facts) -> list[html.Section]:
    cells: Sequence[Facts] = results["cells"]
    _write_csv(folder, results)
    sections = [_verdict(results), _influence(results)]
    for task in results["grids"]:
        own = [cell for cell in cells if cell["task"] == task]
        picture = _both(_panels(task, own, results), folder, f"figure-{task.lower()}")
        sections.append(_task_section(task, own, picture, results))
        sections.append(_focus_section(folder, task, own, results))
    sections.append(_efficiency(results))
    return sections


def _write_csv(folder: Path, results: Facts) -> None:
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
    metrics = ("train_loss", "test_loss", "test_accuracy")
    _csv(
        folder / "cells.csv",
        [
            *names,
            *(f"{m}{part}" for m in metrics for part in ("", "_half")),
            *(f"{m}_minus_uniform{part}" for m in metrics for part in ("", "_half")),
        ],
        [
            [
                *(cell[name] for name in names),
                *(cell[m][part] for m in metrics for part in ("mean", "half")),
                *(cell["against_uniform"][m][part] for m in metrics for part in ("mean", "half")),
            ]
            for cell in results["cells"]
        ],
    )
    _csv(
        folder / "influence.csv",
        ["task", "momentum", "step", "influence", "half"],
        [
            [one["task"], one["momentum"], t, mean, half]
            for one in results["influence"]
            for t, mean, half in zip(one["steps"], one["mean"], one["half"], strict=True)
        ],
    )
    _csv(
        folder / "efficiency.csv",
        ["task", "variant", "examples", "uniform_needs", "ratio"],
        [
            [row[n] for n in ("task", "variant", "examples", "uniform_needs", "ratio")]
            for row in results["efficiency"]
        ],
    )


def _main(cells: Sequence[Facts], key: str) -> list[Facts]:
    return sorted((c for c in cells if c["variant"] == key), key=lambda c: c["examples"])


def _panels(task: str, cells: Sequence[Facts], results: Facts) -> list[Panel]:
    def series(metric: str) -> list[Series]:
        return [
            Series(
                name,
                [c["examples"] for c in _main(cells, key)],
                [c[metric]["mean"] for c in _main(cells, key)],
                [c[metric]["half"] for c in _main(cells, key)],
            )
            for name, key in (("uniform", UNIFORM.key), ("exponential", EXPONENTIAL.key))
        ]

    influences = [one for one in results["influence"] if one["task"] == task]
    return [
        Panel(
            "influence by retraining",
            "step",
            "influence of σ² on the final loss",
            [
                Series(
                    f"momentum {one['momentum']:g}" if one["momentum"] else "gradient descent",
                    one["steps"],
                    one["mean"],
                    one["half"],
                )
                for one in influences
            ],
            log_y=all(value > 0 for one in influences for value in one["mean"]),
        ),
        Panel(f"{task}: training loss", "examples N", "training loss", series("train_loss"), True),
        Panel(
            f"{task}: test accuracy", "examples N", "test accuracy", series("test_accuracy"), True
        ),
    ]


def _verdict(results: Facts) -> html.Section:
    """The aims, and whether they were met, without rounding in anybody's favour."""
    pairs = [c for c in results["cells"] if c["variant"] == EXPONENTIAL.key]
    won = [
        c
        for c in pairs
        if c["against_uniform"]["train_loss"]["mean"] + c["against_uniform"]["train_loss"]["half"]
        < 0
    ]
    lines: list[html.Html] = [
        html.note(
            f"In {len(won)} of {len(pairs)} cells the exponential schedule has the lower mean "
            "training loss with the whole paired 95% interval on its side"
            + (
                "."
                if len(won) == len(pairs)
                else "; not in "
                + ", ".join(f"{c['task']} at N = {c['examples']}" for c in pairs if c not in won)
                + "."
            ),
            tone="good" if len(won) == len(pairs) else "warning",
        )
    ]
    for task, focus in results["focus"].items():
        own = [c for c in results["cells"] if c["task"] == task and c["examples"] == focus]
        best = max(own, key=lambda c: c["test_accuracy"]["mean"])
        base = next(c for c in own if c["variant"] == UNIFORM.key)
        gain = best["against_uniform"]["test_accuracy"]
        lines.append(
            html.note(
                f"{task}, N = {focus}: the best is '{best['title']}' with test accuracy "
                f"{number(best['test_accuracy'])}, where uniform noise with the paper's "
                f"conversion reaches {number(base['test_accuracy'])} at the same (ε, δ): "
                f"a paired difference of {signed(gain)}."
            )
        )
    return html.Section(
        "In short",
        html.paragraph(
            f"{results['repeats']} repeats; data: {results['data']}; "
            f"(ε, δ) = ({results['epsilon']:g}, {results['delta']:g})."
        ),
        *lines,
        PAIRED,
    )


def _influence(results: Facts) -> html.Section:
    return html.Section(
        "How much each step's noise matters",
        "The noise of one step is changed, everything else is kept, and the run is done again: "
        "by how much does the final loss change for each unit of that step's σ²? On synthetic "
        "data of the private set's shape. Where the influence is positive it rises about like "
        "γ^(T−t), and the best σ_t then falls like γ^(t/4). With momentum it bends at the end, "
        "since the average smooths the last steps. Below zero, noise in that step lowers "
        "the final loss. Such points are left out of the fit.",
        html.table(
            ["task", "momentum", "γ of the exponential fit", "95% interval", "R² of the fit"],
            [
                [
                    one["task"],
                    f"{one['momentum']:g}",
                    *(
                        ("–", "–", "–")
                        if one["gamma"] is None
                        else (
                            f"{one['gamma']:.4f}",
                            f"{one['gamma_low']:.4f} to {one['gamma_high']:.4f}",
                            f"{one['r_squared']:.3f}",
                        )
                    ),
                ]
                for one in results["influence"]
            ],
        ),
    )


def _task_section(task: str, cells: Sequence[Facts], picture: Path, results: Facts) -> html.Section:
    rows = []
    for base, other in zip(_main(cells, UNIFORM.key), _main(cells, EXPONENTIAL.key), strict=True):
        rows.append(
            [
                f"N = {base['examples']}",
                f"{base['steps']} / {other['steps']}, {other['fall']:.2f}",
                number(base["train_loss"]),
                number(other["train_loss"]),
                signed(other["against_uniform"]["train_loss"]),
                number(base["test_accuracy"]),
                number(other["test_accuracy"]),
                signed(other["against_uniform"]["test_accuracy"]),
            ]
        )
    return html.Section(
        f"{task}: the setting as printed",
        "60 principal components, standardised, largest norm 10; 1000 hidden units; clip norm 4; "
        "learning rate 0.1; T between 50 and 150; the paper's conversion of (4, 1e-8).",
        html.figure(
            picture,
            f"Left: influence by iteration, by retraining on synthetic data. Middle and right: "
            f"{task}, mean over {results['repeats']} repeats with 95% intervals.",
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


def _focus_section(folder: Path, task: str, cells: Sequence[Facts], results: Facts) -> html.Section:
    focus = results["focus"][task]
    own = [cell for cell in cells if cell["examples"] == focus]
    name = f"variants-{task.lower()}"
    arguments = (
        [c["title"] for c in own],
        [c["test_accuracy"]["mean"] for c in own],
        [c["test_accuracy"]["half"] for c in own],
    )
    for ending in ("png", "svg"):
        figures.ranking(
            *arguments,
            folder / f"{name}.{ending}",
            title=f"{task}, N = {focus}, (4, 1e-8)",
            xlabel="test accuracy",
        )
    return html.Section(
        f"{task}: what else the same (ε, δ) buys",
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
                    c["title"],
                    c["steps"],
                    "" if c["fall"] is None else f"{c['fall']:.2f}",
                    f"{c['lr']:.3g}",
                    f"{c['clip']:.3g}",
                    f"{c['momentum']:.2f}" if c["momentum"] else "",
                    number(c["train_loss"]),
                    number(c["test_accuracy"]),
                    signed(c["against_uniform"]["test_accuracy"]),
                    signed(c["against_same_budget"]["test_accuracy"]),
                ]
                for c in own
            ],
        ),
    )


def _efficiency(results: Facts) -> html.Section:
    return html.Section(
        "Data efficiency",
        "How many examples uniform noise (as printed) needs for the test accuracy that a variant "
        "reaches with N, read off the line between its measured accuracies on a logarithmic "
        "scale of N. A dash: beyond the grid of N.",
        html.table(
            ["task and variant", "N", "uniform needs", "ratio"],
            [
                [
                    f"{row['task']}: {row['title']}",
                    row["examples"],
                    "–" if row["uniform_needs"] is None else f"{row['uniform_needs']:.0f}",
                    "–" if row["ratio"] is None else f"{row['ratio']:.3f}",
                ]
                for row in results["efficiency"]
            ],
        ),
    )


def _tables(folder: Path, results: Facts) -> list[html.Section]:
    sections = []
    titles = {"empirical": "Table 1: excess empirical risk", "true": "Table 2: excess true risk"}
    for name, title in titles.items():
        rows = results[name]
        for ending in ("png", "svg"):
            figures.against_examples(
                results["examples"],
                {row["algorithm"]: row["bounds"] for row in rows},
                folder / f"table-{name}.{ending}",
                title=title,
                ylabel="bound (constants one)",
                dashed=[row["algorithm"] for row in rows if not row["ours"]],
            )
        _csv(
            folder / f"table-{name}.csv",
            ["algorithm", "formula", *(f"N={n}" for n in results["examples"])],
            [[row["algorithm"], row["formula"], *row["bounds"]] for row in rows],
        )
        sections.append(
            html.Section(
                title,
                f"Constants one, logarithms kept, D = {results['parameters']}, (4, 1e-8). Dashed: "
                "earlier work.",
                html.figure(folder / f"table-{name}.svg", title),
                html.table(
                    ["algorithm", "bound", *(f"N = {n:,}" for n in results["examples"])],
                    [
                        [row["algorithm"], row["formula"], *(f"{b:.3g}" for b in row["bounds"])]
                        for row in rows
                    ],
                ),
            )
        )
    sections.append(_excess(folder, results["excess"]))
    return sections


def _excess(folder: Path, rows: Sequence[Facts]) -> html.Section:
    _csv(
        folder / "excess.csv",
        ["problem", "examples", "schedule", "steps", "bound", "measured", "half"],
        [
            [
                row[n]
                for n in ("problem", "examples", "schedule", "steps", "bound", "measured", "half")
            ]
            for row in rows
        ],
    )
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    panels = [
        Panel(
            problem,
            "examples N",
            "excess risk over the initial gap",
            [
                Series(
                    f"{schedule}, {what}",
                    [r["examples"] for r in own],
                    [r["bound" if what == "bound" else "measured"] for r in own],
                    [0.0 if what == "bound" else r["half"] for r in own],
                )
                for schedule in ("uniform", "dynamic")
                for what in ("bound", "measured")
                for own in [
                    [r for r in rows if (r["problem"], r["schedule"]) == (problem, schedule)]
                ]
            ],
            log_x=True,
            log_y=True,
        )
        for problem in problems
    ]
    picture = _both(panels, folder, "excess")
    held = sum(row["measured"] - row["half"] <= row["bound"] for row in rows)
    return html.Section(
        "The bounds against the truth",
        "Quadratic losses, where every constant that the theorems name is known. Each schedule "
        "runs for its own best number of steps; the excess risk is the mean of 2,000 runs, over "
        "the initial gap. The bounds hold for the worst loss with the same condition number, so "
        "that an easy spectrum lies far below them.",
        html.figure(picture, "Bounds and measured excess risk against the number of examples."),
        html.note(
            f"In {held} of {len(rows)} cases the measured excess risk is within the bound.",
            tone="good" if held == len(rows) else "warning",
        ),
    )

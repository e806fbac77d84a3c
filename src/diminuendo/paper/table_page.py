"""The page's sections about the tables of bounds, with their CSV files and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diminuendo.paper.output import PICTURES, write_csv, write_panels
from diminuendo.paper.results import ExcessRisk, TableResults
from diminuendo.report import figures, html
from diminuendo.report.figures import Panel, Series


def sections(folder: Path, results: TableResults) -> list[html.Section]:
    """The sections about the tables; also writes their CSV files and pictures into the folder."""
    parts = []
    tables = (
        ("empirical", "Table 1: excess empirical risk", results.empirical),
        ("true", "Table 2: excess true risk", results.true),
    )
    for name, title, rows in tables:
        for ending in PICTURES:
            figures.against_examples(
                results.examples,
                {row.algorithm: row.bounds for row in rows},
                folder / f"table-{name}.{ending}",
                title=title,
                ylabel="bound (constants one)",
                dashed=[row.algorithm for row in rows if not row.ours],
            )
        write_csv(
            folder / f"table-{name}.csv",
            ["algorithm", "formula", *(f"N={n}" for n in results.examples)],
            [[row.algorithm, row.formula, *row.bounds] for row in rows],
        )
        parts.append(
            html.Section(
                title,
                f"Constants one, logarithms kept, D = {results.parameters}, (4, 1e-8). Dashed: "
                "earlier work.",
                html.figure(folder / f"table-{name}.svg", title),
                html.table(
                    ["algorithm", "bound", *(f"N = {n:,}" for n in results.examples)],
                    [
                        [row.algorithm, row.formula, *(f"{b:.3g}" for b in row.bounds)]
                        for row in rows
                    ],
                ),
            )
        )
    parts.append(_excess(folder, results.excess))
    return parts


def _excess(folder: Path, rows: Sequence[ExcessRisk]) -> html.Section:
    names = ("problem", "examples", "schedule", "steps", "bound", "measured", "half")
    write_csv(
        folder / "excess.csv", names, [[getattr(row, name) for name in names] for row in rows]
    )
    problems = list(dict.fromkeys(row.problem for row in rows))
    panels = [
        Panel(
            problem,
            "examples N",
            "excess risk over the initial gap",
            [
                Series(
                    f"{schedule}, {what}",
                    [r.examples for r in own],
                    [r.bound if what == "bound" else r.measured for r in own],
                    [0.0 if what == "bound" else r.half for r in own],
                )
                for schedule in ("uniform", "dynamic")
                for what in ("bound", "measured")
                for own in [[r for r in rows if (r.problem, r.schedule) == (problem, schedule)]]
            ],
            log_x=True,
            log_y=True,
        )
        for problem in problems
    ]
    picture = write_panels(panels, folder, "excess")
    held = sum(row.measured - row.half <= row.bound for row in rows)
    return html.Section(
        "Bounds and measured excess risk",
        "Quadratic losses, for which every constant of the theorems is known. Each schedule runs "
        "for its own best number of steps; the excess risk is the mean of 2,000 runs, over the "
        "initial gap. The bounds hold for the worst loss with the same condition number, so that "
        "the excess risk on an easy spectrum is far below them.",
        html.figure(picture, "Bounds and measured excess risk against the number of examples."),
        html.note(
            f"In {held} of {len(rows)} cases the measured excess risk is within the bound.",
            tone="good" if held == len(rows) else "warning",
        ),
    )

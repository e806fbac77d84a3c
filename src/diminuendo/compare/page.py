"""The table as CSV, pictures, a page of HTML and Markdown for the docs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diminuendo import __version__, _files
from diminuendo.compare.data import TASKS
from diminuendo.compare.methods import METHODS
from diminuendo.compare.summary import Column, Row, by_method, columns, verdict
from diminuendo.compare.table import Effort, Entry
from diminuendo.paper.data import NOT_COVERED
from diminuendo.paper.output import write_csv
from diminuendo.report import figures, html

CLAIM = (
    "Every method was run at the same certified (ε, δ), for add-remove neighbours, on the same "
    "samples, starts and noise streams (paired seeds), with the same number of candidates tuned on "
    "auxiliary data, or with the same given settings. Seeds are fixed so that the numbers can be "
    "reproduced: as releases, these very runs would not be private. Claims are for real "
    "arithmetic: these runs draw ordinary floating-point noise. Accuracies and losses are the "
    "experiment's measurements."
)
READING = (
    "“Better” and “worse” are by paired 95% intervals of the difference in test accuracy to "
    "uniform noise, one comparison at a time: of a hundred methods that are alike, five would be "
    "told apart by chance. The intervals are about seeds. They do not cover which candidate was "
    "chosen on auxiliary data, and that can move a method by a point or more."
)
PAPERS = (
    "What papers report is for their own data, models, sizes and accounts, none of which is this "
    "table's. So no figure of theirs can be read off it; “checked” says what of a paper was "
    "reproduced or tested nevertheless."
)
_SUMMARY = (
    "method",
    "columns",
    "better",
    "not told apart",
    "worse",
    "points",
    "mean rank",
)


def column_title(column: Column) -> str:
    """A column in words."""
    task, model, examples, epsilon = column
    title = f"{TASKS[task].title}, {model}, N = {examples:,}, ε = {epsilon:g}"
    return f"{title} ({caveat})" if (caveat := TASKS[task].caveat) else title


def write(folder: Path, entries: Sequence[Entry], effort: Effort) -> Path:
    """Write table.csv, pictures, table.md and index.html into the folder; returns the page."""
    table = columns(entries)
    _write_csv(folder / "table.csv", table)
    pictures = {column: _picture(folder, column, rows) for column, rows in table.items()}
    _files.write_text(folder / "table.md", markdown(entries, effort))
    sections = [
        html.Section(
            "All columns together",
            READING,
            html.table(
                _SUMMARY,
                by_method(table),
                caption="Against plain uniform noise; points are of test accuracy, in percent.",
            ),
        )
    ]
    for column, rows in table.items():
        best = rows[0]
        sections.append(
            html.Section(
                column_title(column),
                " ".join([f"Best: {best.title}, {best.accuracy.mean:.1%}.", *_not_covered(column)]),
                html.figure(
                    pictures[column],
                    "Mean test accuracy with 95% intervals over runs.",
                    described=f"Accuracies of all methods: {column_title(column)}",
                ),
                html.table(
                    ("method", "accuracy", "− uniform", "− with momentum", "", "claimed ε"),
                    [_cells(row) for row in rows],
                ),
            )
        )
    sections += [
        _methods(),
        html.Section("What is claimed, and what was tuned", CLAIM, _effort(effort)),
    ]
    document = html.page(
        "Equal budgets: methods of private training on one table",
        sections,
        lead="The same certified (ε, δ), data, seeds and tuning effort for every method.",
        footer=f"diminuendo {__version__}. Every number is also in table.csv and runs/.",
    )
    return html.write_page(folder / "index.html", document)


def _not_covered(column: Column) -> tuple[str, ...]:
    """What a column's claims do not cover, in full."""
    return NOT_COVERED if TASKS[column[0]].caveat else ()


def _given(effort: Effort) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in effort.given.items())


def _effort(effort: Effort) -> html.Html:
    tuned: list[tuple[str, object]] = [
        ("candidates per method", effort.trials),
        ("runs per candidate, on auxiliary data", effort.tuning_repeats),
    ]
    return html.facts(
        [
            *([("given, not tuned here", _given(effort))] if effort.given else tuned),
            ("runs per cell", effort.repeats),
            ("δ", f"{effort.delta:g}"),
        ]
    )


def _signed(value: object) -> str:
    signed = getattr(value, "signed", None)
    return signed() if callable(signed) else ""


def _cells(row: Row) -> list[str]:
    return [
        row.title,
        str(row.accuracy),
        _signed(row.over_uniform),
        _signed(row.over_strong),
        verdict(row),
        f"{row.entry.epsilon_claimed:.4f}",
    ]


def _methods() -> html.Section:
    rows = []
    for method in METHODS.values():
        words = [html.text(method.claim)]
        if method.run is not None and method.reported:
            words.append(html.text(f" Reported: {method.reported}"))
        if method.differs:
            words.append(html.text(f" Differs: {method.differs}"))
        checked = method.checked or ("" if method.run is None else "nothing")
        rows.append(
            html.paragraph(
                html.strong(method.title),
                f" ({method.key}; {method.family}). {method.paper}. ",
                *words,
                f" Checked against its paper: {checked}." if checked else "",
            )
        )
    return html.Section("Methods, their papers and their claims", PAPERS, *rows)


def _picture(folder: Path, column: Column, rows: Sequence[Row]) -> Path:
    task, model, examples, epsilon = column
    path = folder / f"accuracy-{task}-{model}-{examples}-{epsilon:g}.svg"
    finite = [row for row in rows if row.accuracy.mean == row.accuracy.mean]
    return figures.ranking(
        [row.title for row in finite],
        [row.accuracy.mean for row in finite],
        [min(row.accuracy.half, 1.0) for row in finite],
        path,
        title=column_title(column),
        xlabel="test accuracy",
    )


def _write_csv(path: Path, table: dict[Column, list[Row]]) -> None:
    write_csv(
        path,
        [
            *("task", "model", "examples", "epsilon", "method", "family", "accuracy", "half"),
            *("minus_uniform", "minus_uniform_half", "minus_strong", "minus_strong_half"),
            *("epsilon_claimed", "settings", "not_covered"),
        ],
        [
            [
                *column,
                row.entry.cell.method,
                METHODS[row.entry.cell.method].family,
                *row.accuracy,
                *(row.over_uniform or ("", "")),
                *(row.over_strong or ("", "")),
                row.entry.epsilon_claimed,
                ";".join(f"{name}={value:.6g}" for name, value in row.entry.settings.items()),
                TASKS[column[0]].caveat,
            ]
            for column, rows in table.items()
            for row in rows
        ],
    )


def markdown(entries: Sequence[Entry], effort: Effort) -> str:
    """The summary, and one small table for each column, as Markdown."""
    table = columns(entries)
    tuning = (
        f"Settings that were given: {_given(effort)}"
        if effort.given
        else f"{effort.trials} candidates × {effort.tuning_repeats} runs of tuning for each method"
    )
    lines = [
        f"{tuning}, {effort.repeats} runs a cell, δ = {effort.delta:g}.",
        "",
        *_markdown_table(_SUMMARY, by_method(table)),
    ]
    for column, rows in table.items():
        lines += ["", f"### {column_title(column)}", ""]
        lines += _markdown_table(
            ("method", "accuracy", "− uniform", "− with momentum", "verdict"),
            [_cells(row)[:5] for row in rows],
        )
    return "\n".join(lines) + "\n"


def _markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(headers)} |",
        f"|{'|'.join('---' if i == 0 else '---:' for i in range(len(headers)))}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]

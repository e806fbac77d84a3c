"""diminuendo compare"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diminuendo._progress import bar
from diminuendo.cli.options import AsJson, need_torch, print_json, print_table
from diminuendo.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("compare")(compare)


def compare(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder for all results.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Some minutes on two cores: embedded digits, fewer runs."),
    ] = False,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method; may be repeated.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="mnist (default), fashion, adult, spam; repeatable.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="linear (default) or network; repeatable.")
    ] = None,
    examples: Annotated[list[int] | None, typer.Option(help="N; may be repeated.")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="ε; may be repeated.")] = None,
    delta: Annotated[float, typer.Option(help="δ of every budget.")] = 1e-5,
    trials: Annotated[
        int | None, typer.Option(help="Candidates per method; 24, or 12 with --quick.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Runs per cell; 20, or 8 with --quick.")
    ] = None,
    data_dir: Annotated[
        list[str] | None,
        typer.Option(help="TASK=FOLDER, or FOLDER for the only task; may be repeated."),
    ] = None,
    list_methods: Annotated[
        bool, typer.Option("--list", help="List all methods with their claims, and stop.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    as_json: AsJson = False,
) -> None:
    """Train many methods at the same certified (ε, δ) and write one table, pictures and a page.

    Cells that are in the folder already are not run again, so a table can be extended by a method
    or a data set, an interrupted run resumes when the command is given again, and several machines
    can share a folder.

    Example: diminuendo compare --quick --out out/compare
    """
    need_torch(None)
    import torch

    from diminuendo.compare import page, summary, table
    from diminuendo.compare.methods import METHODS

    if list_methods:
        _list(as_json)
        return
    if out is None:
        raise InputError("given", name="--out", value=None, remedy="For example --out out/compare.")
    tasks = task or ["mnist"]
    effort = table.Effort(
        trials=trials or (12 if quick else 24),
        tuning_repeats=2 if quick else 3,
        repeats=repeats or (8 if quick else 20),
        delta=delta,
    )
    _refuse_listed(method or [])
    wanted = table.cells(
        tasks,
        model or ["linear"],
        examples or ([500] if quick else [250, 500, 1000, 2000]),
        epsilon or ([1.0, 8.0] if quick else [0.5, 1.0, 3.0, 8.0]),
        method or [key for key, one in METHODS.items() if one.run is not None],
    )
    bench = table.Bench(effort, _folders(data_dir or [], tasks))
    for name in tasks:
        bench.pools(name)  # what is missing is said before anything is run
    folder = table.TableFolder(out, effort)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are small: threads would only wait for each other
    try:
        with bar("comparing", total=len(wanted), shown=progress) as shown:
            left = folder.run(wanted, bench, lambda _: shown.advance())
    finally:
        torch.set_num_threads(before)
    entries = folder.entries()
    written = page.write(folder.path, entries, effort)
    columns = summary.columns(entries)
    if as_json:
        print_json(_json(written, left, columns))
        return
    for column, rows in columns.items():
        print_table(
            page.column_title(column),
            ["", "test accuracy", "− uniform", ""],
            [
                [
                    row.title,
                    str(row.accuracy),
                    "" if row.over_uniform is None else row.over_uniform.signed(),
                    summary.verdict(row),
                ]
                for row in rows
            ],
        )
    if left:
        typer.echo(f"{len(left)} cells are under way elsewhere; give the command again later.")
    typer.echo(f"The page: {written}")


def _json(written: Path, left: list[Any], columns: dict[Any, list[Any]]) -> dict[str, Any]:
    return {
        "page": str(written),
        "elsewhere": [cell.name for cell in left],
        "cells": [
            {
                "task": row.entry.cell.task,
                "model": row.entry.cell.model,
                "examples": row.entry.cell.examples,
                "epsilon": row.entry.cell.epsilon,
                "delta": row.entry.delta,
                "method": row.entry.cell.method,
                "epsilon_claimed": row.entry.epsilon_claimed,
                "accuracy": row.accuracy.mean,
                "half": row.accuracy.half,
                "minus_uniform": None if row.over_uniform is None else row.over_uniform.mean,
            }
            for rows in columns.values()
            for row in rows
        ],
    }


def _refuse_listed(methods: list[str]) -> None:
    from diminuendo.compare.methods import METHODS

    for key in methods:
        if key in METHODS and METHODS[key].run is None:
            raise InputError(
                "one with a valid claim", name="--method", value=key, remedy=METHODS[key].claim
            )


def _folders(given: list[str], tasks: list[str]) -> dict[str, Path]:
    """Data folders by task, from TASK=FOLDER or FOLDER."""
    folders: dict[str, Path] = {}
    for text in given:
        name, separator, folder = text.partition("=")
        if separator and name in tasks:
            folders[name] = Path(folder)
        elif len(tasks) == 1:
            folders[tasks[0]] = Path(text)
        else:
            raise InputError("TASK=FOLDER", name="--data-dir", value=text)
    return folders


def _list(as_json: bool) -> None:
    from diminuendo.compare.methods import METHODS

    if as_json:
        names = ("key", "title", "family", "paper", "claim", "differs", "convex", "checked")
        print_json(
            {
                "methods": [
                    {**{n: getattr(m, n) for n in names}, "valid": m.run is not None}
                    for m in METHODS.values()
                ]
            }
        )
        return
    for one in METHODS.values():
        typer.echo(f"{one.key}: {one.title} ({one.family})\n  {one.paper}\n  {one.claim}")
        if one.differs:
            typer.echo(f"  Differs: {one.differs}")

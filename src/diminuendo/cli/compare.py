"""diminuendo compare"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diminuendo._progress import bar
from diminuendo.cli.options import AsJson, need_torch, print_json, print_table
from diminuendo.errors import InputError

if TYPE_CHECKING:
    from diminuendo.compare.table import Effort


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("compare")(compare)


def compare(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder for all results.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="About a minute of CPU time: embedded digits, fewer runs."),
    ] = False,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method; may be repeated.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="mnist (default), fashion, adult, …; repeatable.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="linear (default), network or cnn; repeatable.")
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
    settings: Annotated[
        str | None,
        typer.Option(help="Tuned numbers, NAME=VALUE,…, for all methods: nothing is tuned."),
    ] = None,
    data_dir: Annotated[
        list[str] | None,
        typer.Option(help="TASK=FOLDER, or FOLDER for the only task; may be repeated."),
    ] = None,
    list_methods: Annotated[
        bool, typer.Option("--list", help="List all methods with their claims, and stop.")
    ] = False,
    audit: Annotated[
        bool,
        typer.Option("--audit", help="Audit the methods on canaries at the first ε, and stop."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu (default), cuda, …; the draws are the same.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    as_json: AsJson = False,
) -> None:
    """Train many methods at the same certified (ε, δ) and write one table, pictures and a page.

    Cells that are in the folder already are not run again, so a table can be extended by a method
    or a data set, an interrupted run resumes when the command is given again, and several machines
    can share a folder.

    Example: diminuendo compare --quick --out out/compare
    """
    need_torch(device)
    import torch

    from diminuendo.compare import TableFolder, page, summary, table
    from diminuendo.compare.methods import METHODS

    if list_methods:
        _list(as_json)
        return
    if audit:
        _audit(method, (epsilon or [1.0])[0], delta, shown=progress, as_json=as_json)
        return
    if out is None:
        raise InputError("given", name="--out", value=None, remedy="For example --out out/compare.")
    tasks = task or ["mnist"]
    effort = table.Effort(
        trials=(12 if quick else 24) if trials is None else trials,
        tuning_repeats=2 if quick else 3,
        repeats=(8 if quick else 20) if repeats is None else repeats,
        delta=delta,
        given=_settings(settings),
    )
    models = model or ["linear"]
    _refuse_listed(method or [])
    _refuse_untrained(method or [], models)
    wanted = table.cells(
        tasks,
        models,
        examples or ([500] if quick else [250, 500, 1000, 2000]),
        epsilon or ([1.0, 8.0] if quick else [0.5, 1.0, 3.0, 8.0]),
        method or [key for key, one in METHODS.items() if one.run is not None],
    )
    if effort.given:
        _check_settings(effort, {cell.method for cell in wanted})
    bench = table.Bench(effort, _folders(data_dir or [], tasks), device or "cpu")
    for name in tasks:
        bench.pool(name)  # what is missing is said before anything is run
        if not effort.given:
            bench.auxiliary(name)
    folder = TableFolder(out, effort)
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
    from diminuendo.compare.data import TASKS

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
                "not_covered": TASKS[row.entry.cell.task].caveat,
                "accuracy": row.accuracy.mean,
                "half": row.accuracy.half,
                "minus_uniform": None if row.over_uniform is None else row.over_uniform.mean,
            }
            for rows in columns.values()
            for row in rows
        ],
    }


def _audit(
    methods: list[str] | None, epsilon: float, delta: float, *, shown: bool, as_json: bool
) -> None:
    """Lower bounds on ε beside the claim, for every method that has one."""
    from diminuendo.budget import Budget
    from diminuendo.compare.auditing import audit_method
    from diminuendo.compare.method import find
    from diminuendo.compare.methods import METHODS

    keys = methods or [key for key, one in METHODS.items() if one.run is not None]
    for key in keys:
        find(METHODS, key)  # a wrong name is said before anything is run
    _refuse_listed(keys)
    budget = Budget(epsilon=epsilon, delta=delta)
    found = []
    with bar("auditing", total=len(keys), shown=shown) as progress:
        for key in keys:
            canaries, runs = (3000, 1) if METHODS[key].alone else (500, 20)
            found.append(audit_method(key, budget, canaries=canaries, runs=runs, confidence=0.999))
            progress.advance()
    exceeded = [one.method for one in found if one.exceeded]
    if as_json:
        print_json({"methods": [asdict(one) for one in found], "exceeded": exceeded})
    else:
        print_table(
            f"Audit at ε = {epsilon:g}, δ = {delta:g}, confidence 0.999 for each",
            ["", "attacked", "claimed ε", "at least", "noise, of what was paid for"],
            [
                [
                    METHODS[one.method].title,
                    one.attacked,
                    f"{one.claim:.3f}",
                    f"{one.epsilon_lower:.3f}",
                    "" if one.noise_scale is None else f"{one.noise_scale:.3f}",
                ]
                for one in found
            ],
        )
    if exceeded:
        raise typer.Exit(1)


def _refuse_listed(methods: list[str]) -> None:
    from diminuendo.compare.methods import METHODS

    for key in methods:
        if key in METHODS and METHODS[key].run is None:
            raise InputError(
                "one with a valid claim", name="--method", value=key, remedy=METHODS[key].claim
            )


def _refuse_untrained(methods: list[str], models: list[str]) -> None:
    """Methods that were asked for and can train none of the models."""
    from diminuendo.compare.methods import METHODS

    for key in methods:
        if key in METHODS and not any(METHODS[key].trains(model) for model in models):
            raise InputError(
                f"one that trains {' or '.join(models)}",
                name="--method",
                value=key,
                remedy="It needs a convex loss, or gradients layer by layer: give --model linear.",
            )


def _settings(text: str | None) -> dict[str, float]:
    """Numbers by name, from NAME=VALUE,…"""
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text is not None else []:
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = None
        if number is None or not name or name in found:
            raise InputError("NAME=VALUE,…, each name once", name="--settings", value=text)
        found[name] = number
    return found


def _check_settings(effort: Effort, methods: set[str]) -> None:
    """Every method has all of its numbers, and every number a method that takes it."""
    from diminuendo.compare.methods import METHODS

    for key in sorted(methods):
        effort.settings_of(METHODS[key])
    taken = {name for key in methods for name in (*METHODS[key].space, *METHODS[key].learned)}
    unused = set(effort.given) - taken
    if unused:
        raise InputError(
            "numbers that a method takes", name="--settings", value=", ".join(sorted(unused))
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
        words = ("key", "title", "family", "paper", "claim", "differs", "reported", "checked")
        names = (*words, "convex", "releases")
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
        for word, text in (("Reported", one.reported), ("Differs", one.differs)):
            if text:
                typer.echo(f"  {word}: {text}")
        if one.run is not None:
            typer.echo(f"  Checked against its paper: {one.checked or 'nothing.'}")

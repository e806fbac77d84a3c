"""diminuendo reproduce"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diminuendo import _files, _validate
from diminuendo.cli.options import AsJson, need_torch, print_json, print_table, working
from diminuendo.errors import InputError

PARTS = ("figure", "tables", "all")


def register(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    part: Annotated[str, typer.Argument(help="figure, tables or all.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for everything made.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Three minutes on two cores: few repeats, small N.")
    ] = False,
    repeats: Annotated[
        int | None, typer.Option(help="Repeats of every run; 100, or 8 with --quick.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="A folder with MNIST's four files, gzipped or not.")
    ] = None,
    fetch: Annotated[
        bool,
        typer.Option(
            "--fetch", help="Fetch the full MNIST once, into --data-dir or the cache folder."
        ),
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    as_json: AsJson = False,
) -> None:
    """The paper's figure and tables: JSON, CSV, pictures, and a page that tells the story.

    Without --data-dir or --fetch it uses 5,000 embedded digits. An interrupted run goes on when
    the same command is given again.

    Example: diminuendo reproduce all --quick --out out/paper
    """
    need_torch(device)
    from diminuendo.paper import data
    from diminuendo.paper import figure as reproduction
    from diminuendo.paper import page as story

    _validate.choice("the part", part, PARTS)
    console = Console(stderr=True)
    made = reproduction.quick if quick else reproduction.full
    setting = made() if repeats is None else made(repeats)
    with working("reading the digits"):
        digits = data.load(data_dir, fetch=fetch)
    folder = reproduction.Folder(out, {"data": digits.source, **asdict(setting)})
    run = reproduction.Run(
        folder=folder,
        setting=setting,
        device=device,
        progress=progress and console.is_terminal,
        say=(lambda line: console.print(line, highlight=False, soft_wrap=True))
        if progress
        else lambda _: None,
    )
    results: dict[str, Any] = {}
    if part in ("figure", "all"):
        results["figure"] = reproduction.figure(digits, run)
    if part in ("tables", "all"):
        results["tables"] = reproduction.tables(run)
    page = story.write(folder.path, {**_before(folder.path), **results})
    if as_json:
        print_json({"page": str(page), "out": str(out), **story.plain(results)})
        return
    if "figure" in results:
        print_table(
            "Test accuracy at (4, 1e-8), means with 95% intervals",
            ["", "N", "training loss", "test accuracy"],
            [
                [
                    f"{cell['task']}: {cell['title']}",
                    str(cell["examples"]),
                    story.number(cell["train_loss"]),
                    story.number(cell["test_accuracy"]),
                ]
                for cell in results["figure"]["cells"]
            ],
        )
    typer.echo(f"The story: {page}")


def _before(folder: Path) -> dict[str, Any]:
    """What an earlier command of the same setting made here, so that no part of it is lost."""
    path = folder / "results.json"
    if not path.exists():
        return {}
    text = _files.read_text(path, name="the results")
    stored = _files.parse_json(text, name="the results", source=str(path))
    if not isinstance(stored, dict):
        raise InputError("a JSON object", name=str(path), value=type(stored).__name__)
    return {part: stored[part] for part in ("figure", "tables") if part in stored}

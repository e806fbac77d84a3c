"""diminuendo reproduce"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diminuendo import _validate
from diminuendo.cli.options import AsJson, need_torch, print_json, print_table, working


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("reproduce")(reproduce)


def reproduce(
    part: Annotated[str, typer.Argument(help="figure, tables, joint or all.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for all results.")],
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
    public_dir: Annotated[
        Path | None,
        typer.Option(
            help="For joint: a folder with public images in MNIST's form (Fashion-MNIST, say), on "
            "which its settings are tuned; without it, digits that are drawn from fonts."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    as_json: AsJson = False,
) -> None:
    """Reproduce the paper's figure and tables, and compare noise, learning rate and model.

    Writes JSON, CSV, pictures, and a page about them.

    Without --data-dir or --fetch it uses 5,000 embedded digits. An interrupted run resumes when
    the same command is given again.

    Example: diminuendo reproduce all --quick --out out/paper
    """
    need_torch(device)
    from diminuendo.paper import data, setting
    from diminuendo.paper.digits import public_images
    from diminuendo.paper.drawn import description
    from diminuendo.paper.reproduction import reproduce as reproduce_parts
    from diminuendo.paper.results import PARTS

    _validate.choice("the part", part, (*PARTS, "all"))
    console = Console(stderr=True)
    make = setting.quick if quick else setting.full
    amount = make() if repeats is None else make(repeats)
    with working("reading the digits"):
        digits = data.load(data_dir, fetch=fetch)
        public = None if public_dir is None else public_images(public_dir)

    def say(line: str) -> None:
        if progress:
            console.print(line, highlight=False, soft_wrap=True)

    run = setting.Run.in_folder(
        out,
        amount,
        data=digits.source,
        public=description() if public is None else public.source,
        device=device,
        progress=progress and console.is_terminal,
        say=say,
    )
    parts = [name for name in PARTS if part in (name, "all")]
    results, page = reproduce_parts(digits, run, parts, public=public)
    if as_json:
        print_json({"page": str(page), "out": str(out), **results.to_dict()})
        return
    if results.figure is not None:
        print_table(
            "Test accuracy at (4, 1e-8), means with 95% intervals",
            ["", "N", "training loss", "test accuracy"],
            [_row(cell) for cell in results.figure.cells],
        )
    if results.joint is not None:
        print_table(
            "Test accuracy, means with 95% intervals; * is what the tool chooses",
            ["", "N", "(ε, δ)", "model", "method", "test accuracy"],
            [
                [
                    cell.task,
                    str(cell.examples),
                    f"({cell.epsilon:g}, {cell.delta:g})",
                    cell.model,
                    f"{cell.method}{' *' if cell.chosen else ''}",
                    str(cell.test_accuracy),
                ]
                for cell in results.joint.cells
            ],
        )
    typer.echo(f"The page: {page}")


def _row(cell: Any) -> list[str]:
    return [
        f"{cell.task}: {cell.title}",
        str(cell.examples),
        str(cell.train_loss),
        str(cell.test_accuracy),
    ]

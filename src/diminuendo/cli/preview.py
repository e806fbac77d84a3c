"""diminuendo preview"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diminuendo.cli.options import AsJson, need_torch, print_json, print_table
from diminuendo.cli.tune import read_public
from diminuendo.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("preview")(preview)


def preview(
    examples: Annotated[int, typer.Option(help="N, the number of training examples (public).")],
    features: Annotated[int, typer.Option(help="Features of an example.")],
    classes: Annotated[int, typer.Option(help="Classes to tell apart.")],
    delta: Annotated[float, typer.Option(help="δ of the privacy budget.")] = 1e-5,
    epsilons: Annotated[
        str, typer.Option(help="Which ε to show, separated by commas.")
    ] = "0.5,1,2,4,8",
    auxiliary: Annotated[
        Path | None,
        typer.Option(help="A public set of the same kind: a .npz file with x and y."),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden units; 0 for a linear model.")] = 0,
    largest_norm: Annotated[
        float | None,
        typer.Option(help="Largest norm of an example; that of standardised ones unless given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of data and runs.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw it here (.svg, .png or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What accuracy to expect for which ε, before anything is spent: costs no privacy.

    Example: diminuendo preview --examples 1437 --features 64 --classes 10 -o preview.svg
    """
    need_torch(None)
    from diminuendo.report import figures
    from diminuendo.tuning import Shape
    from diminuendo.tuning import preview as look_ahead

    if output is not None:
        figures.check_name(output)
    shape = Shape(
        examples=examples,
        features=features,
        classes=classes,
        largest_norm=max(features, 1) ** 0.5 if largest_norm is None else largest_norm,
    )
    found = look_ahead(
        shape,
        delta=delta,
        epsilons=_numbers(epsilons),
        public=None if auxiliary is None else read_public(auxiliary),
        hidden=hidden,
        seed=seed,
        progress=not as_json,
    )
    if output is not None:
        found.picture(output)
    if as_json:
        print_json(found.to_dict())
        return
    headers, rows = found.table()
    print_table(f"Expected test accuracy (δ = {delta:g})", headers[:-1], [row[:-1] for row in rows])
    for sentence in found.assumptions:
        typer.echo(f"- {sentence}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            "numbers separated by commas", name="--epsilons", value=text, remedy="0.5,1,2, say."
        ) from None

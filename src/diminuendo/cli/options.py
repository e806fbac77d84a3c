"""Options that several commands share, and how commands print."""

from __future__ import annotations

import json
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diminuendo import _extras, _validate
from diminuendo._progress import working
from diminuendo.budget import CONVERSIONS, SENSITIVITY, Budget, Conversion, Relation
from diminuendo.errors import InputError

Epsilon = Annotated[float, typer.Option("--epsilon", help="ε of the privacy budget.")]
Delta = Annotated[
    float, typer.Option("--delta", help="δ of the privacy budget, well below 1/examples.")
]
RelationName = Annotated[
    str, typer.Option("--relation", help="Which data are neighbours: add-remove or replace-one.")
]
ConversionName = Annotated[
    str,
    typer.Option(
        "--conversion", help="From (ε, δ) to noise: exact, zcdp (the paper's) or zcdp-tight."
    ),
]
__all__ = [
    "AsJson",
    "ConversionName",
    "Delta",
    "Epsilon",
    "RelationName",
    "make_budget",
    "need_torch",
    "print_json",
    "print_table",
    "working",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def make_budget(epsilon: float, delta: float, relation: str, conversion: str) -> Budget:
    """The budget that these options describe."""
    return Budget(
        epsilon=epsilon,
        delta=delta,
        relation=cast(Relation, _validate.choice("--relation", relation, SENSITIVITY)),
        conversion=cast(Conversion, _validate.choice("--conversion", conversion, CONVERSIONS)),
    )


def need_torch(device: str | None) -> None:
    """Check, before anything is read, that PyTorch and the device are there."""
    with _extras.needed("torch", extra="all", purpose="This command"):
        import torch
    if device is None:
        return
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            "a device that PyTorch can use here",
            name="--device",
            value=device,
            remedy=f"({str(error).splitlines()[0]})",
        ) from None


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    print(json.dumps(data, ensure_ascii=False))


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table that is never cut short: a narrow terminal wraps it. Text is shown as it is."""
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)

"""diminuendo bounds"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diminuendo import _files
from diminuendo import bounds as theory
from diminuendo.budget import Budget
from diminuendo.cli.options import (
    AsJson,
    ConversionName,
    Delta,
    Epsilon,
    RelationName,
    make_budget,
    print_json,
    print_table,
)
from diminuendo.report import figures, tables


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("bounds")(bounds)


def bounds(
    epsilon: Epsilon = 4.0,
    delta: Delta = 1e-8,
    parameters: Annotated[int, typer.Option(help="D, the dimension.")] = 100,
    examples: Annotated[
        str, typer.Option(help="Values of N to print, separated by commas.")
    ] = "100,1000,10000,100000,1000000",
    kappa: Annotated[float, typer.Option(help="Condition number.")] = 20.0,
    momentum: Annotated[float, typer.Option(help="β, for the momentum rows.")] = 0.9,
    failure: Annotated[float, typer.Option(help="p, for bounds in probability.")] = 0.05,
    strong_convexity: Annotated[float, typer.Option(help="μ, for true risk.")] = 1.0,
    relation: RelationName = "add-remove",
    conversion: ConversionName = "exact",
    plot: Annotated[
        Path | None, typer.Option(help="A folder for the pictures of both tables.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The paper's two tables of bounds, evaluated (constants one, logarithms kept), against N.

    Example: diminuendo bounds --epsilon 4 --delta 1e-8 --parameters 100 --plot out
    """
    budget: Budget = make_budget(epsilon, delta, relation, conversion)
    counts = tables.parse_counts(examples)
    both = {
        "empirical": [
            theory.empirical_risk_table(
                budget,
                examples=n,
                parameters=parameters,
                failure=failure,
                kappa=kappa,
                beta=momentum,
            )
            for n in counts
        ],
        "true": [
            theory.true_risk_table(
                budget,
                examples=n,
                parameters=parameters,
                failure=failure,
                kappa=kappa,
                beta=momentum,
                strong_convexity=strong_convexity,
            )
            for n in counts
        ],
    }
    titles = {"empirical": "Excess empirical risk", "true": "Excess true risk"}
    if plot is not None:
        _files.make_folder(plot)
        for name, columns in both.items():
            figures.against_examples(
                counts,
                tables.curves(columns),
                plot / f"{name}_risk.svg",
                title=titles[name],
                ylabel="bound (constants one)",
                dashed=tables.earlier_work(columns),
            )
    if as_json:
        print_json(
            {
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "R": budget.R,
                "parameters": parameters,
                "examples": counts,
                **{name: tables.as_data(columns) for name, columns in both.items()},
            }
        )
        return
    for name, columns in both.items():
        print_table(
            titles[name], ["algorithm", *(f"N = {n:,}" for n in counts)], tables.as_text(columns)
        )

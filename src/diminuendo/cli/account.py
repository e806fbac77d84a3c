"""diminuendo account"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from diminuendo import _files, _validate, accounting
from diminuendo.budget import SENSITIVITY, Relation
from diminuendo.cli.options import AsJson, Delta, RelationName, print_json, print_table

_HINT = "One positive noise multiplier for each step."


def register(app: typer.Typer) -> None:
    app.command("account")(account)


def account(
    delta: Delta,
    sigmas: Annotated[Path, typer.Option(help="Noise multipliers: JSON, CSV, or a plan.")],
    sampling_rate: Annotated[
        float | None, typer.Option(help="Poisson rate; a plan brings its own.")
    ] = None,
    relation: RelationName = "add-remove",
    as_json: AsJson = False,
) -> None:
    """The certified ε of a schedule.

    Example: diminuendo account --delta 1e-5 --sigmas sigmas.json --sampling-rate 0.01
    """
    _validate.choice("--relation", relation, SENSITIVITY)
    values = _files.read_numbers(sigmas, name="sigmas", hint=_HINT)
    rate = 1.0 if sampling_rate is None else sampling_rate
    epsilon = accounting.epsilon(values, delta, rate, relation=cast(Relation, relation))
    if as_json:
        print_json({"epsilon": epsilon, "delta": delta, "steps": len(values)})
        return
    print_table("Accounted", ["", "value"], [["epsilon", repr(epsilon)]])

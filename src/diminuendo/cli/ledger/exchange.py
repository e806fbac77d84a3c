"""diminuendo ledger export, import, identify: what goes out of a ledger and comes into one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from diminuendo import _validate
from diminuendo import ledger as ledgers
from diminuendo.cli.ledger.common import Url, app, watching
from diminuendo.cli.options import AsJson, print_json
from diminuendo.errors import InputError
from diminuendo.ledger import Ledger
from diminuendo.report.text import counted


@app.command("export")
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")],
    name: Annotated[
        str | None, typer.Option("--budget", help="For dp-accounting: which budget's events.")
    ] = None,
    kind: Annotated[
        str, typer.Option("--format", help="jsonl (the whole chain) or dp-accounting.")
    ] = "jsonl",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write the ledger as JSON Lines, or a budget's events for dp-accounting.

    Example: diminuendo ledger export -o ledger.jsonl
    """
    ledger = Ledger(url, readonly=True)
    _validate.choice("--format", kind, ("jsonl", "dp-accounting"))
    with watching("exporting") as progress:
        if kind == "jsonl":
            count = ledgers.export(ledger, output, progress=progress)
        else:
            if name is None:
                raise InputError("the name of a budget", name="--budget", value=None)
            events = ledgers.to_dp_accounting(ledger, name)
            ledgers.write_private(output, [json.dumps(_dp_accounting_file(ledger, name, events))])
            count = len(events.events)
    facts = {"output": str(output), "format": kind, "records": count}
    print_json(facts) if as_json else print(f"{counted(count, 'record')} written to {output}")


def _dp_accounting_file(ledger: Ledger, name: str, events: Any) -> dict[str, Any]:
    """The events, and the δ and the relation without which they say nothing about ε."""
    budget = ledger.status(name).terms.budget
    return {
        "budget": name,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "relation": budget.relation,
        "noise_multipliers": "standard deviation / sensitivity under this relation",
        **_nested(events),
    }


def _nested(event: Any) -> Any:
    """A dp-accounting event as JSON: its class and its fields."""
    if isinstance(event, (list, tuple)):
        return [_nested(one) for one in event]
    if not hasattr(event, "__attrs_attrs__"):
        return event
    fields = {a.name: _nested(getattr(event, a.name)) for a in event.__attrs_attrs__}
    return {"class": type(event).__name__, **fields}


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="What `ledger export` wrote.")],
    allow_second: Annotated[
        bool,
        typer.Option("--allow-second", "--beside", help="Allow a second budget for the same data."),
    ] = False,
    overspend: Annotated[
        bool, typer.Option("--overspend", help="Also record spending that goes over the budget.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Charge here what another ledger has spent, from its export.

    Example: diminuendo ledger import ledger.jsonl
    """
    ledger = Ledger(url)
    with watching("importing") as progress:
        imported = ledgers.import_file(
            ledger, path, allow_second=allow_second, overspend=overspend, progress=progress
        )
    if as_json:
        print_json({"imported": [asdict(one) for one in imported]})
        return
    for one in imported:
        origin = "created with its terms" if one.created else "existed"
        print(
            f"{one.budget}: {origin}; {counted(one.steps, 'step')} charged, {one.spent:.2%} of it"
        )


@app.command("identify")
def identify(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders.")],
    as_json: AsJson = False,
) -> None:
    """Print the identity of data, which a budget can be tied to.

    Example: diminuendo ledger identify train.npz
    """
    with watching("reading the data") as progress:
        identity = ledgers.identify(paths if len(paths) > 1 else paths[0], progress=progress)
    print_json({"data": identity}) if as_json else print(identity)

"""diminuendo ledger create, list, show: budgets and what is left of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from diminuendo import ledger as ledgers
from diminuendo.cli.ledger.common import (
    COLUMNS,
    Name,
    Url,
    app,
    print_budget,
    row_of,
    run_facts,
    watching,
)
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
from diminuendo.events import GaussianStep
from diminuendo.ledger import Ledger, Status, view


@app.command("create")
def create(
    name: Name,
    epsilon: Epsilon,
    delta: Delta,
    data: Annotated[
        list[Path] | None, typer.Option(help="Files or folders that hold the data; repeatable.")
    ] = None,
    digest: Annotated[str | None, typer.Option(help="The data's identity, if known.")] = None,
    unit: Annotated[
        str, typer.Option(help="What one row of the data is: example, patient, …")
    ] = "example",
    composition: Annotated[
        str | None,
        typer.Option(
            help="gaussian: full batches only, exact; the default. renyi: mini-batches and full "
            "batches; the default if an order, a typical σ or a typical rate is given."
        ),
    ] = None,
    order: Annotated[int | None, typer.Option(help="Rényi order, for renyi.")] = None,
    typical_sigma: Annotated[
        float | None, typer.Option(help="σ of steps to choose the order by; 1 unless given.")
    ] = None,
    typical_rate: Annotated[
        float | None,
        typer.Option(help="Sampling rate of steps to choose the order by; 0.01 unless given."),
    ] = None,
    allow_second: Annotated[
        bool,
        typer.Option("--allow-second", "--beside", help="Allow a second budget for the same data."),
    ] = False,
    under: Annotated[
        str | None, typer.Option(help="The budget that this one is a part of; it caps all parts.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="(ε, δ) for what is charged in each calendar day, week, month, quarter or year, "
            "not once and for all."
        ),
    ] = None,
    member: Annotated[
        list[str] | None,
        typer.Option(help="Who may open runs on it, a user or a team's role; repeatable."),
    ] = None,
    two_persons: Annotated[
        bool,
        typer.Option(
            "--two-persons",
            help="Reclaiming, importing, a part of this budget, and a second budget for the same "
            "data need two people.",
        ),
    ] = False,
    relation: RelationName = "add-remove",
    conversion: ConversionName = "exact",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a budget. Repeating the command changes nothing.

    Example: diminuendo ledger create patients --epsilon 4 --delta 1e-8 --data train.npz
    """
    if data and digest is None:
        with watching("reading the data") as progress:
            files = data if len(data) > 1 else data[0]
            digest = ledgers.identify(files, progress=progress)
    ledger = Ledger(url)
    typical = None
    if typical_sigma is not None or typical_rate is not None:
        typical = GaussianStep(
            noise_multiplier=1.0 if typical_sigma is None else typical_sigma,
            sampling_rate=0.01 if typical_rate is None else typical_rate,
        )
    status = ledger.create(
        name,
        make_budget(epsilon, delta, relation, conversion),
        data=digest,
        unit=unit,
        composition=composition,
        order=order,
        typical=typical,
        allow_second=allow_second,
        parent=under,
        window=window,
        members=member or (),
        two_persons=two_persons,
    )
    print_budget(ledger, status, as_json, "Budget")
    if not as_json:
        _say_what_it_pays_for(status)


def _say_what_it_pays_for(status: Status) -> None:
    """Terms never change, so that a wrong choice is best seen now."""
    print(f"It pays for {view.pays_for(status.terms)}.")
    if status.terms.order is None:
        print(
            "For mini-batches, create it under another name with --composition renyi (and "
            "--typical-sigma, --typical-rate): what a budget pays for never changes."
        )


@app.command("list")
def list_budgets(url: Url = None, as_json: AsJson = False) -> None:
    """List all budgets and what is left of each.

    Example: diminuendo ledger list
    """
    ledger = Ledger(url, readonly=True)
    budgets = ledger.budgets()
    if as_json:
        print_json(
            {"ledger": ledger.address, "budgets": [view.summary(status) for status in budgets]}
        )
    else:
        print_table(f"Budgets in {ledger.address}", COLUMNS, [row_of(status) for status in budgets])


@app.command("show")
def show(name: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Show a budget, its runs, and the head of the chain to cite.

    Example: diminuendo ledger show patients
    """
    ledger = Ledger(url, readonly=True)
    status, runs, head = ledger.status(name), ledger.runs(name), ledger.head
    facts = [run_facts(run, status) for run in runs]
    if as_json:
        print_json({**view.summary(status), "runs": facts, "head": asdict(head)})
        return
    print_budget(ledger, status, False, "Budget")
    if facts:
        print_table(
            "Runs",
            ["run", "label", "by", "status", "granted", "started", "confirmed", "spent"],
            [
                [
                    fact["run"],
                    fact["label"] or "-",
                    fact["by"],
                    fact["status"],
                    *(str(fact[key]) for key in ("granted", "started", "confirmed")),
                    f"{fact['spent']:.2%}",
                ]
                for fact in facts
            ],
        )
    print(f"data: {status.terms.data or 'not identified'}")
    print(f"head: {head.digest} (record {head.seq})")

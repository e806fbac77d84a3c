"""diminuendo ledger verify, anchor, roles: what protects a ledger, and whether it is whole."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from diminuendo import ledger as ledgers
from diminuendo.cli.ledger.common import Url, app, watching
from diminuendo.cli.options import AsJson, print_json
from diminuendo.ledger import Ledger
from diminuendo.report.text import counted


@app.command("verify")
def verify(
    cited: Annotated[
        list[str] | None, typer.Option(help="A head that a report cites; repeatable.")
    ] = None,
    anchor: Annotated[
        list[str] | None,
        typer.Option(help="Where heads were published: file:, git:, ledger:, https:; repeatable."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="The key that signs records: file:/path, env:NAME or command:…"),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="A file that keeps what was verified, to go on from there.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check every record, the chain, and the sums. Exit code 1 if something is wrong.

    Example: diminuendo ledger verify --cited sha256:…
    """
    ledger = Ledger(url, readonly=True)
    with watching("verifying") as progress:
        result = ledgers.verify(
            ledger,
            cited=cited or (),
            anchors=anchor or (),
            key=key,
            state=state,
            progress=progress,
        )
    if as_json:
        print_json({"ledger": ledger.address, **asdict(result)})
    else:
        print(
            f"{ledger.address} is consistent: {counted(result.records, 'record')}, "
            f"{counted(result.budgets, 'budget')}, {counted(result.runs, 'run')}, "
            f"{counted(result.steps, 'step')}.\nhead: {result.head.digest}"
        )
        if anchor or key:
            heads = counted(result.anchored, "published head")
            print(f"{heads} found, {counted(result.signed, 'signature')} checked")


@app.command("roles")
def roles(
    officer: Annotated[list[str] | None, typer.Option(help="A database user; repeatable.")] = None,
    spender: Annotated[list[str] | None, typer.Option(help="A database user; repeatable.")] = None,
    reader: Annotated[list[str] | None, typer.Option(help="A database user; repeatable.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Run the SQL, all or none.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print, or apply, the SQL for three PostgreSQL roles: officer, spender, reader.

    Example: diminuendo ledger roles --spender alice --apply
    """
    grants = {"officer": officer or [], "spender": spender or [], "reader": reader or []}
    statements = ledgers.roles.statements(grants)
    if apply:
        with Ledger(url, create=False) as ledger:
            ledgers.roles.install(ledger, grants)
    if as_json:
        print_json({"applied": apply, "statements": statements})
    else:
        print("Applied." if apply else ";\n\n".join(statements) + ";")


@app.command("anchor")
def anchor_head(
    places: Annotated[list[str], typer.Argument(help="file:, git:, ledger: or https:")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Publish the head of the chain to a second place, now.

    Example: diminuendo ledger anchor file:/mnt/other/heads.jsonl
    """
    with Ledger(url, readonly=True, anchors=places) as ledger:
        head = ledger.head
        for place in ledger.anchors:
            place.publish(head)
    print_json(asdict(head)) if as_json else print(f"record {head.seq}: {head.digest}")

"""diminuendo ledger page, serve: a ledger at a glance, in a file or over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from diminuendo import ledger as ledgers
from diminuendo.cli.ledger.common import Url, app
from diminuendo.cli.options import AsJson, print_json
from diminuendo.errors import InputError
from diminuendo.ledger import Ledger
from diminuendo.report.text import counted


@app.command("page")
def page(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the HTML file.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file: every budget, its history and runs, what is left, and if all verifies.

    Example: diminuendo ledger page -o budget.html
    """
    with Ledger(url, readonly=True) as ledger:
        facts = ledgers.view.facts(ledger)
    ledgers.write_private(output, [ledgers.page.html(facts)])
    if as_json:
        print_json({"output": str(output), **facts})
    else:
        print(f"{counted(len(facts['budgets']), 'budget')} written to {output}")


@app.command("serve")
def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8321,
    token_from: Annotated[
        str | None,
        typer.Option(help="The environment variable with the token that writes need."),
    ] = None,
    url: Url = None,
) -> None:
    """Serve the page and its facts (JSON, CSV) at http://127.0.0.1:8321; needs the extra serve.

    Example: diminuendo ledger serve --port 8321
    """
    token = None if token_from is None else os.environ.get(token_from)
    if token_from is not None and not token:
        raise InputError("a variable that holds a token", name="--token-from", value=token_from)
    Ledger(url, readonly=True).close()
    typer.echo(f"http://{host}:{port}", err=True)
    ledgers.serve.run(url, host=host, port=port, token=token)

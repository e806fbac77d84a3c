"""diminuendo report"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from diminuendo.cli.ledger import Url
from diminuendo.cli.options import AsJson, print_json, print_table, working
from diminuendo.errors import MissingExtra
from diminuendo.ledger import Ledger
from diminuendo.planning import Plan
from diminuendo.report import figures, html
from diminuendo.report import run as run_report
from diminuendo.report.folder import Folder


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("report")(report)


def report(
    folder: Annotated[Path, typer.Argument(help="What `diminuendo train` wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; report.html there.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check a finished run's claim anew, in its ledger too, and write a page about it.

    Exit code 1 where something that it claims does not hold.

    Example: diminuendo report run --ledger ledger.sqlite
    """
    with working("checking"):
        read = Folder.read(folder)
        cited = read.run.get("ledger")
        ledger = Ledger(url or cited["address"], create=False) if cited else None
        checks = read.checks(ledger)
    target = output or folder / "report.html"
    html.write_page(target, run_report.document(read.plan, read.run, checks, drawn(read.plan)))
    holds = all(check.holds for check in checks)
    claim = run_report.claim(read.run, checks)
    if as_json:
        print_json(
            {
                "claim": claim,
                "holds": holds,
                "epsilon": read.run["epsilon"],
                "delta": read.run["delta"],
                "private": read.run["private"],
                "checks": [asdict(check) for check in checks],
                "report": str(target),
            }
        )
    else:
        rows = [[c.claim, "holds" if c.holds else "DOES NOT HOLD", c.seen] for c in checks]
        print_table(claim, ["checked", "", "seen"], rows)
        print(f"report: {target}")
    if not holds:
        raise typer.Exit(1)


def drawn(plan: Plan) -> str:
    """The schedule's picture as SVG; nothing where there is nothing to draw with."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "schedule.svg"
        try:
            figures.schedules({plan.schedule: plan.sigmas}, path)
        except MissingExtra:
            return ""
        return path.read_text()

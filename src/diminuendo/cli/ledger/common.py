"""The group `diminuendo ledger`, its options, and how its commands print budgets and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from diminuendo.cli.options import print_json, print_table
from diminuendo.ledger import Ledger, Run, Status, view
from diminuendo.report.text import rounded_down, rounded_up, whole

app = typer.Typer(
    help="Privacy budgets of datasets: who spent how much, and what is left.\n\n"
    "Example: diminuendo ledger create patients --epsilon 4 --delta 1e-8 --data train.npz",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        envvar="DIMINUENDO_LEDGER",
        show_envvar=True,
        help="A path, sqlite:///path or postgresql://…; by default a file in your data folder.",
    ),
]
Name = Annotated[str, typer.Argument(help="The budget's name.")]
RunId = Annotated[str, typer.Argument(help="The run's id.")]
_BAR = 20


@contextmanager
def watching(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def run_facts(run: Run, status: Status) -> dict[str, Any]:
    """What `--json` says of a run; `spent` is its share of the budget, from 0 to 1."""
    return {
        "run": run.id,
        "budget": run.budget,
        "status": run.status,
        "label": run.opened["label"],
        "by": run.opened["by"],
        "host": run.opened["host"],
        "granted": run.granted,
        "started": run.started,
        "confirmed": run.confirmed,
        "spent": run.spent_units / status.terms.limit,
    }


def _bar(spent: float) -> str:
    full = min(round(spent * _BAR), _BAR)
    return "█" * full + "░" * (_BAR - full) + f" {max(1 - spent, 0):.1%} left"


def _period_column(status: Status) -> str:
    """How long the budget is for: for ever, or the window that it is now."""
    window = status.terms.window
    return "once" if window is None else f"each {window} ({status.window})"


def row_of(status: Status) -> list[str]:
    """A budget as a row of the table with `COLUMNS`."""
    terms = status.terms
    left = status.left
    return [
        terms.name,
        f"({whole(terms.budget.epsilon)}, {whole(terms.budget.delta)})",
        terms.composition if terms.order is None else f"renyi, order {terms.order}",
        terms.unit,
        _period_column(status),
        rounded_up(status.epsilon),
        "0" if left is None else rounded_down(left.epsilon),
        _bar(status.spent),
    ]


COLUMNS = ["budget", "(ε, δ)", "composition", "unit", "for", "charged ≙ ε", "ε left", ""]


def print_budget(ledger: Ledger, status: Status, as_json: bool, words: str) -> None:
    """Show a budget, as one JSON object or as a table under these words."""
    if as_json:
        print_json(view.summary(status))
        return
    print_table(f"{words} ({ledger.address})", COLUMNS, [row_of(status)])
    moment = (
        ""
        if status.odometer is None or not status.spent_units
        else f" At this very moment, however it was chosen: ε = {rounded_up(status.odometer)}."
    )
    print(
        f"Certified, whatever was released and whenever a run stops: {view.claim(status)}{moment} "
        f"What was charged{period(status)} is ε = {rounded_up(status.epsilon)} only if that amount "
        "had been fixed in advance."
    )


def period(status: Status) -> str:
    """The window that it is now, in words; nothing where a budget has no windows."""
    return "" if status.terms.window is None else f" in {status.window}"

"""The command line: it wires parts and holds no mathematics.

Exit codes: 0 done, 2 wrong use or bad input, 3 refused for lack of budget, 1 where the ledger
cannot answer or its records contradict each other.
"""

from __future__ import annotations

import sys
import warnings

import typer

from diminuendo import __version__
from diminuendo.cli import (
    account,
    audit,
    bounds,
    budget,
    compare,
    ledger,
    page,
    plan,
    preview,
    report,
    reproduce,
    train,
    tune,
)
from diminuendo.errors import DiminuendoError
from diminuendo.planning import PlanWarning

app = typer.Typer(
    name="diminuendo",
    help="Differentially private training: plan the noise within a budget, train, keep the ledger.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_COMMANDS = (
    budget,
    account,
    plan,
    page,
    bounds,
    preview,
    train,
    tune,
    audit,
    compare,
    reproduce,
    ledger,
    report,
)
for _command in _COMMANDS:
    _command.register(app)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"diminuendo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    del version


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PlanWarning)
        warnings.showwarning = _show_warning
        return _run(sys.argv[1:] if arguments is None else arguments)


def _wrong_use() -> type[Exception]:
    """What typer raises: an error of its own in newer versions, click's in those before.

    Flower holds typer back.
    """
    own: type[Exception] | None = getattr(typer, "TyperException", None)
    if own is not None:
        return own
    from click import ClickException

    return ClickException


def _run(given: list[str]) -> int:
    try:
        code = app(args=given or ["--help"], prog_name="diminuendo", standalone_mode=False)
    except _wrong_use() as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "diminuendo"
        line = " ".join(str(getattr(error, "format_message")()).split())  # noqa: B009
        print(f"error: {line} See '{command} --help'.", file=sys.stderr)
        return 2
    except typer.Abort:
        print("error: stopped.", file=sys.stderr)
        return 130
    except DiminuendoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return int(code or 0) if given else 2

"""diminuendo ledger"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from diminuendo import _files, _validate
from diminuendo import ledger as ledgers
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
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import Ledger, Run, Status, mechanisms
from diminuendo.ledger.process import reclaim_assumption
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


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="ledger")


@contextmanager
def _watching(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _budget_facts(status: Status) -> dict[str, Any]:
    left = status.left
    return {
        **status.terms.to_dict(),
        "spent": status.spent,
        "epsilon_charged": status.epsilon,
        "epsilon_certified": status.terms.budget.epsilon if status.spent_units else 0.0,
        "epsilon_odometer": status.odometer,
        "epsilon_left": 0.0 if left is None else left.epsilon,
    }


def _run_facts(run: Run, status: Status) -> dict[str, Any]:
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


def _row(status: Status) -> list[str]:
    terms = status.terms
    left = status.left
    return [
        terms.name,
        f"({whole(terms.budget.epsilon)}, {whole(terms.budget.delta)})",
        terms.composition if terms.order is None else f"renyi, order {terms.order}",
        terms.unit,
        rounded_up(status.epsilon),
        "0" if left is None else rounded_down(left.epsilon),
        _bar(status.spent),
    ]


_COLUMNS = ["budget", "(ε, δ)", "composition", "unit", "charged ≙ ε", "ε left", ""]


def _print_budget(ledger: Ledger, status: Status, as_json: bool, words: str) -> None:
    if as_json:
        print_json(_budget_facts(status))
        return
    print_table(f"{words} ({ledger.address})", _COLUMNS, [_row(status)])
    budget = status.terms.budget
    moment = (
        f" At this very moment, however it was chosen: ε = {rounded_up(status.odometer)}."
        if status.odometer < budget.epsilon
        else ""
    )
    print(
        f"Certified whatever was released and whenever a run stops: ε = {whole(budget.epsilon)} at "
        f"δ = {whole(budget.delta)} ({budget.relation}), the limit.{moment} What was charged is "
        f"ε = {rounded_up(status.epsilon)} only if that amount had been fixed in advance."
    )


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
        str, typer.Option(help="gaussian (full batch, exact) or renyi (also subsampled).")
    ] = "gaussian",
    order: Annotated[int | None, typer.Option(help="Rényi order, for renyi.")] = None,
    typical_sigma: Annotated[float, typer.Option(help="σ of steps to choose the order by.")] = 1.0,
    typical_rate: Annotated[
        float, typer.Option(help="Sampling rate of steps to choose the order by.")
    ] = 0.01,
    allow_second: Annotated[
        bool,
        typer.Option("--allow-second", "--beside", help="Allow a second budget for the same data."),
    ] = False,
    under: Annotated[
        str | None, typer.Option(help="The budget that this one is a part of; it caps all parts.")
    ] = None,
    two_persons: Annotated[
        bool,
        typer.Option(
            "--two-persons",
            help="Reclaiming, and a second budget for the same data, need two people.",
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
        with _watching("reading the data") as progress:
            files = data if len(data) > 1 else data[0]
            digest = ledgers.identify(files, progress=progress)
    ledger = Ledger(url)
    status = ledger.create(
        name,
        make_budget(epsilon, delta, relation, conversion),
        data=digest,
        unit=unit,
        composition=composition,
        order=order,
        typical=GaussianStep(noise_multiplier=typical_sigma, sampling_rate=typical_rate),
        allow_second=allow_second,
        parent=under,
        two_persons=two_persons,
    )
    _print_budget(ledger, status, as_json, "Budget")


@app.command("list")
def list_budgets(url: Url = None, as_json: AsJson = False) -> None:
    """List all budgets and what is left of each.

    Example: diminuendo ledger list
    """
    ledger = Ledger(url, readonly=True)
    budgets = ledger.budgets()
    if as_json:
        print_json(
            {"ledger": ledger.address, "budgets": [_budget_facts(status) for status in budgets]}
        )
    else:
        print_table(f"Budgets in {ledger.address}", _COLUMNS, [_row(status) for status in budgets])


@app.command("show")
def show(name: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Show a budget, its runs, and the head of the chain to cite.

    Example: diminuendo ledger show patients
    """
    ledger = Ledger(url, readonly=True)
    status, runs, head = ledger.status(name), ledger.runs(name), ledger.head
    facts = [_run_facts(run, status) for run in runs]
    if as_json:
        print_json({**_budget_facts(status), "runs": facts, "head": asdict(head)})
        return
    _print_budget(ledger, status, False, "Budget")
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


@app.command("charge")
def charge(
    name: Name,
    sigma: Annotated[
        float | None, typer.Option(help="Gaussian noise: noise multiplier of the steps.")
    ] = None,
    laplace: Annotated[
        float | None, typer.Option(help="Laplace noise: scale in units of the sensitivity.")
    ] = None,
    discrete_sigma: Annotated[
        float | None, typer.Option(help="Discrete Gaussian noise: noise multiplier.")
    ] = None,
    pure_epsilon: Annotated[float | None, typer.Option(help="Any release with a pure ε.")] = None,
    rho: Annotated[float | None, typer.Option(help="Any release with ρ-zCDP.")] = None,
    renyi: Annotated[
        Path | None, typer.Option(help='Any Rényi curve: JSON like {"2": 0.1, "8": 0.4}.')
    ] = None,
    steps: Annotated[int, typer.Option(help="How many.")] = 1,
    sampling_rate: Annotated[
        float, typer.Option(help="With --sigma: Poisson rate; 1 is full batch.")
    ] = 1.0,
    label: Annotated[str, typer.Option(help="What the release was for.")] = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Charge a release made by another program. Exit code 3 if it does not fit.

    Example: diminuendo ledger charge patients --sigma 20 --steps 10 --label "summary statistics"
    """
    ledger = Ledger(url, create=False)
    event = _release(
        steps,
        {
            "--sigma": sigma,
            "--laplace": laplace,
            "--discrete-sigma": discrete_sigma,
            "--pure-epsilon": pure_epsilon,
            "--rho": rho,
            "--renyi": renyi,
        },
        sampling_rate,
    )
    run = ledger.charge(name, [event], label=label)
    status = ledger.status(name)
    if as_json:
        print_json({**_run_facts(run, status), "budget": _budget_facts(status)})
    else:
        _print_budget(ledger, status, False, f"Charged, as run {run.id}")


def _release(steps: int, options: dict[str, Any], sampling_rate: float) -> Any:
    """The release that exactly one of the options describes."""
    chosen = {option: value for option, value in options.items() if value is not None}
    if len(chosen) != 1:
        raise InputError("given once", name=f"one of {', '.join(options)}", value=list(chosen))
    option, value = chosen.popitem()
    if option == "--sigma":
        return GaussianStep(noise_multiplier=value, sampling_rate=sampling_rate, count=steps)
    if sampling_rate != 1:
        raise InputError("1 without --sigma", name="--sampling-rate", value=sampling_rate)
    if option == "--renyi":
        text = _files.read_text(value, name="--renyi")
        content = _files.parse_json(text, name="--renyi", source=str(value))
        return mechanisms.RenyiCurve(curve=content, count=steps)
    if option == "--laplace":
        return mechanisms.Laplace(scale=value, count=steps)
    if option == "--discrete-sigma":
        return mechanisms.DiscreteGaussian(noise_multiplier=value, count=steps)
    if option == "--pure-epsilon":
        return mechanisms.PureEpsilon(epsilon=value, count=steps)
    return mechanisms.ZeroConcentrated(rho=value, count=steps)


@app.command("release", hidden=True)
@app.command("reclaim")
def reclaim(
    run: RunId,
    unreleased: Annotated[
        bool,
        typer.Option(
            "--unreleased",
            help="Also assert that nobody has seen any result of the steps not confirmed.",
        ),
    ] = False,
    by: Annotated[str, typer.Option(help="Who asserts it; by default your user name.")] = "",
    dead: Annotated[
        bool,
        typer.Option(
            "--yes-it-is-dead",
            help="Assert that the run's process is dead, where this machine cannot tell.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give back the part of a crashed run's budget that the run never used.

    Example: diminuendo ledger reclaim 1f0c2a7d9b3e4f56
    """
    ledger = Ledger(url, create=False)
    before = ledger.run(run)
    if not yes:
        typer.echo(f"This assumes that {reclaim_assumption(before, unreleased)}.", err=True)
        typer.confirm("Is that true?", abort=True, err=True)
    after = ledger.reclaim(run, by=by, unreleased=unreleased, dead=dead)
    status = ledger.status(after.budget)
    facts = _run_facts(after, status)
    facts["returned"] = (before.spent_units - after.spent_units) / status.terms.limit
    if as_json:
        print_json(facts)
    else:
        _print_budget(ledger, status, False, f"Gave back {facts['returned']:.2%}")


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
    with _watching("verifying") as progress:
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
            f"{ledger.address} is consistent: {result.records} records, {result.budgets} budgets, "
            f"{result.runs} runs, {result.steps} steps.\nhead: {result.head.digest}"
        )
        if anchor or key:
            print(f"{result.anchored} published heads found, {result.signed} signatures checked")


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
        print(f"{len(facts['budgets'])} budgets written to {output}")


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
    with _watching("exporting") as progress:
        if kind == "jsonl":
            count = ledgers.export(ledger, output, progress=progress)
        else:
            if name is None:
                raise InputError("the name of a budget", name="--budget", value=None)
            events = ledgers.to_dp_accounting(ledger, name)
            ledgers.write_private(output, [json.dumps(_dp_accounting_file(ledger, name, events))])
            count = len(events.events)
    facts = {"output": str(output), "format": kind, "records": count}
    print_json(facts) if as_json else print(f"{count} records written to {output}")


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
    with _watching("importing") as progress:
        imported = ledgers.import_file(
            ledger, path, allow_second=allow_second, overspend=overspend, progress=progress
        )
    if as_json:
        print_json({"imported": [asdict(one) for one in imported]})
        return
    for one in imported:
        origin = "created with its terms" if one.created else "existed"
        print(f"{one.budget}: {origin}; {one.steps} steps charged, {one.spent:.2%} of the budget")


@app.command("identify")
def identify(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders.")],
    as_json: AsJson = False,
) -> None:
    """Print the identity of data, which a budget can be tied to.

    Example: diminuendo ledger identify train.npz
    """
    with _watching("reading the data") as progress:
        identity = ledgers.identify(paths if len(paths) > 1 else paths[0], progress=progress)
    print_json({"data": identity}) if as_json else print(identity)

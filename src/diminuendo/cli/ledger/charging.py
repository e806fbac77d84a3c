"""diminuendo ledger charge, reclaim: what other programs released, and what dead runs held."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diminuendo import _files
from diminuendo.cli.ledger.common import (
    Name,
    RunId,
    Url,
    app,
    print_budget,
    run_facts,
)
from diminuendo.cli.options import AsJson, print_json
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import Ledger, mechanisms, view
from diminuendo.ledger.process import reclaim_assumption


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
        print_json({**run_facts(run, status), "budget": view.summary(status)})
    else:
        print_budget(ledger, status, False, f"Charged, as run {run.id}")


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
    ledger.refuse_alive(run, dead=dead)
    if not yes:
        typer.echo(f"This assumes that {reclaim_assumption(before, unreleased)}.", err=True)
        typer.confirm("Is that true?", abort=True, err=True)
    after = ledger.reclaim(run, by=by, unreleased=unreleased, dead=dead)
    status = ledger.status(after.budget)
    facts = run_facts(after, status)
    facts["returned"] = (before.spent_units - after.spent_units) / status.terms.limit
    if as_json:
        print_json(facts)
    else:
        print_budget(ledger, status, False, f"Gave back {facts['returned']:.2%}")

"""diminuendo account"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from diminuendo import _files, _validate, accounting
from diminuendo._validate import Vector
from diminuendo.budget import SENSITIVITY, Relation
from diminuendo.cli.options import AsJson, Delta, print_json, print_table, working
from diminuendo.errors import InputError
from diminuendo.planning import SCHEMA, Plan
from diminuendo.report.text import drawing, rounded_down, rounded_up, whole

_HINT = (
    "One positive noise multiplier for each step: a JSON list, a JSON object or CSV with "
    "'sigmas' (and 'sampling_rate'; JSON also 'relation'), or a plan."
)


class _Schedule(NamedTuple):
    sigmas: Any
    rates: Any
    relation: Relation


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("account")(account)


def account(
    delta: Delta,
    sigmas: Annotated[Path, typer.Option(help="Noise multipliers: JSON, CSV, or a plan.")],
    sampling_rate: Annotated[
        float | None,
        typer.Option(help="Poisson rate of every step, where the file has none; 1 unless given."),
    ] = None,
    relation: Annotated[
        str | None, typer.Option(help="add-remove or replace-one; a plan has its own.")
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", help="Also ε after every step (in --json, as a list).")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ε by step here (.svg, .png or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The certified ε of a schedule, between its lower and its upper bound.

    Example: diminuendo account --delta 1e-5 --sigmas sigmas.json --sampling-rate 0.01
    """
    schedule = _read(sigmas, sampling_rate, relation)
    with working("accounting"):
        facts, curve = _account(schedule, delta, curve_wanted=running or plot is not None)
    if plot is not None and curve is not None:
        from diminuendo.report import figures

        figures.running(curve, plot, title=f"ε spent, δ = {delta:g}")
    if as_json:
        if running:
            facts["running"] = [] if curve is None else curve.tolist()
        print_json(facts)
        return
    rows = [["epsilon", rounded_up(facts["epsilon"]), "certified upper bound"]]
    if "lower" in facts:
        rows.append(["not below", rounded_down(facts["lower"]), "certified lower bound"])
    rows.append(["delta", whole(delta), schedule.relation])
    rows.append(["steps", f"{facts['steps']:,}", "" if curve is None else drawing(curve)])
    print_table("Accounted", ["", "value", ""], rows)


def _account(
    schedule: _Schedule, delta: float, *, curve_wanted: bool
) -> tuple[dict[str, Any], Vector | None]:
    sigmas, rates, relation = schedule
    facts: dict[str, Any] = {
        "epsilon": accounting.epsilon(sigmas, delta, rates, relation=relation),
        "delta": delta,
        "steps": len(sigmas),
        "relation": relation,
    }
    if relation == "add-remove":
        bracket = accounting.bracket(sigmas, delta, rates)
        facts["epsilon"] = min(facts["epsilon"], bracket.upper)
        facts["lower"] = bracket.lower
    if not (curve_wanted and len(sigmas)):
        return facts, None
    _only_add_remove(relation)
    return facts, accounting.running_epsilon(sigmas, delta, rates)


def _read(path: Path, sampling_rate: float | None, relation: str | None) -> _Schedule:
    """σ, rates and relation from the file; what it lacks, from the command line.

    What the file states about the mechanism is what will run: another value on the command line
    would give an ε that belongs to neither, so it is refused.
    """
    if relation is not None:
        _validate.choice("--relation", relation, SENSITIVITY)
    data: Any = None
    if path.suffix.lower() != ".csv":
        text = _files.read_text(path, name="the sigmas file")
        data = _files.parse_json(text, name="the sigmas file", source=str(path))
    if isinstance(data, dict) and data.get("schema") == SCHEMA:
        plan = Plan.from_json(text, source=str(path))
        _same("--sampling-rate", sampling_rate, plan.sampling_rate, path)
        return _Schedule(
            plan.sigmas, plan.sampling_rate, _as_relation(relation or plan.budget.relation)
        )
    values = _files.read_numbers(path, name="sigmas", hint=_HINT)
    rates = _files.read_optional(path, name="sampling_rate", hint=_HINT)
    if rates is None:
        rates = 1.0 if sampling_rate is None else sampling_rate
    else:
        _same("--sampling-rate", sampling_rate, rates, path)
    stated = relation or _files.read_optional(path, name="relation", hint=_HINT) or "add-remove"
    _validate.choice("relation", stated, SENSITIVITY)
    return _Schedule(values, rates, _as_relation(stated))


def _same(option: str, asked: float | None, stated: Any, path: Path) -> None:
    if asked is not None and not bool(np.all(np.asarray(stated) == asked)):
        own = repr(stated) if np.ndim(stated) == 0 else "a rate for each step"
        raise InputError(
            f"left out, since {path} has its own ({own})",
            name=option,
            value=asked,
            remedy="For another rate, give a file that holds the noise multipliers alone.",
        )


def _as_relation(name: str) -> Relation:
    return "replace-one" if name == "replace-one" else "add-remove"


def _only_add_remove(relation: Relation) -> None:
    if relation != "add-remove":
        raise InputError(
            "add-remove for ε by step",
            name="relation",
            value=relation,
            remedy="Leave out --running and --plot.",
        )

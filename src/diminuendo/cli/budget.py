"""diminuendo budget"""

from __future__ import annotations

import typer

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
from diminuendo.report.text import whole


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("budget")(budget)


def budget(
    epsilon: Epsilon,
    delta: Delta,
    relation: RelationName = "add-remove",
    conversion: ConversionName = "exact",
    as_json: AsJson = False,
) -> None:
    """What (ε, δ) allows Gaussian noise to spend: R = Σ 1/σ², ρ and μ.

    Example: diminuendo budget --epsilon 4 --delta 1e-8
    """
    allowed = make_budget(epsilon, delta, relation, conversion)
    facts = {
        "epsilon": allowed.epsilon,
        "delta": allowed.delta,
        "relation": allowed.relation,
        "conversion": allowed.conversion,
        "R": allowed.R,
        "rho": allowed.rho,
        "mu": allowed.mu,
        "sensitivity": allowed.sensitivity,
    }
    if as_json:
        print_json(facts)
        return
    rows = [
        ["R", f"{allowed.R:.6g}", "what Σ 1/σ² may come to over all steps"],
        ["rho", f"{allowed.rho:.6g}", "the same as zero-concentrated DP"],
        ["mu", f"{allowed.mu:.6g}", "the same as Gaussian DP"],
        ["sensitivity", f"{allowed.sensitivity:g} × clip", f"one example, {allowed.relation}"],
    ]
    print_table(
        f"({whole(allowed.epsilon)}, {whole(allowed.delta)}), {conversion} conversion",
        ["", "value", "meaning"],
        rows,
    )

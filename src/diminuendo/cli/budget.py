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


def register(app: typer.Typer) -> None:
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
    made = make_budget(epsilon, delta, relation, conversion)
    facts = {
        "epsilon": made.epsilon,
        "delta": made.delta,
        "relation": made.relation,
        "conversion": made.conversion,
        "R": made.R,
        "rho": made.rho,
        "mu": made.mu,
        "sensitivity": made.sensitivity,
    }
    if as_json:
        print_json(facts)
        return
    rows = [
        ["R", f"{made.R:.6g}", "what Σ 1/σ² may come to over all steps"],
        ["rho", f"{made.rho:.6g}", "the same as zero-concentrated DP"],
        ["mu", f"{made.mu:.6g}", "the same as Gaussian DP"],
        ["sensitivity", f"{made.sensitivity:g} × clip", f"one example, {made.relation}"],
    ]
    print_table(
        f"({made.epsilon:g}, {made.delta:g}), {conversion} conversion",
        ["", "value", "meaning"],
        rows,
    )

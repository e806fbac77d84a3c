"""Both tables of bounds over N, and bounds compared with measured excess risk."""

from __future__ import annotations

from collections.abc import Callable

from diminuendo import bounds
from diminuendo.budget import Budget
from diminuendo.paper import quadratics
from diminuendo.paper.results import BoundRow, ExcessRisk, TableResults, plain
from diminuendo.paper.setting import Run
from diminuendo.paper.variants import DELTA, EPSILON

EXAMPLES = (100, 1000, 10_000, 100_000, 1_000_000)
PARAMETERS = 100
QUADRATIC_EXAMPLES = (50, 100, 200, 500, 1000)


def tables(run: Run) -> TableResults:
    """The tables at the paper's (ε, δ); the excess risks are measured once and kept."""
    budget = Budget(epsilon=EPSILON, delta=DELTA)
    run.say("both tables, and bounds compared with measured excess risk")
    stored = run.folder.stored_or(
        "excess", lambda: plain(quadratics.compare(budget, counts=QUADRATIC_EXAMPLES))
    )
    return TableResults(
        examples=list(EXAMPLES),
        parameters=PARAMETERS,
        empirical=_rows(bounds.empirical_risk_table, budget),
        true=_rows(bounds.true_risk_table, budget),
        excess=[ExcessRisk(**row) for row in stored],
    )


def _rows(table: Callable[..., list[bounds.Row]], budget: Budget) -> list[BoundRow]:
    columns = [table(budget, examples=n, parameters=PARAMETERS) for n in EXAMPLES]
    return [
        BoundRow(
            algorithm=row[0].algorithm,
            formula=row[0].formula,
            ours=row[0].ours,
            bounds=[cell.bound for cell in row],
        )
        for row in zip(*columns, strict=True)
    ]

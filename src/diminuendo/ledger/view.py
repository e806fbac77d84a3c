"""A ledger as facts for a page, a table or a program: budgets, runs, history, forecast."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from diminuendo.errors import LedgerError
from diminuendo.ledger import rows, schema, windows
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.state import Run, Status
from diminuendo.ledger.store import record_of
from diminuendo.ledger.terms import Terms
from diminuendo.ledger.verify import verify
from diminuendo.planning.text import counted, rounded_up, whole

_POINTS = 500
_LAST_RUNS = 5
_COUNTS = (2, 5, 10)
"""Numbers of windows whose claim together is stated."""
_RUN_COLUMNS = ("run", "budget", "label", "by", "db_user", "host", "opened", "status", "granted",
                "started", "confirmed", "spent", "spent_of")  # fmt: skip
"""`spent` is the share of the budget `spent_of`: the run's own, or one that it is a part of."""


def facts(ledger: Ledger, *, check: bool = True) -> dict[str, Any]:
    """Everything about a ledger, as JSON values.

    check   also verify every record, which takes about a second for each 20,000
    damage  in the result: why the budgets cannot be read, if they cannot; else None
    """
    head = ledger.head
    budgets, damage = [], None
    try:
        budgets = [budget_facts(ledger, status) for status in ledger.budgets()]
    except LedgerError as error:
        damage = str(error)
    return {
        "ledger": ledger.address,
        "id": head.ledger,
        "records": head.seq,
        "head": head.digest,
        "verification": verification(ledger) if check else None,
        "damage": damage,
        "budgets": budgets,
    }


def verification(ledger: Ledger, *, state: Path | None = None) -> dict[str, Any]:
    """Whether the ledger is consistent, and what is wrong if it is not.

    state  a file that keeps what was verified, so that it is not read again
    """
    try:
        result = verify(ledger, state=state)
    except LedgerError as error:
        return {"consistent": False, "message": str(error)}
    words = (
        f"{counted(result.records, 'record')}, {counted(result.runs, 'run')} and "
        f"{counted(result.steps, 'step')} are consistent."
    )
    return {"consistent": True, "message": words}


def summary(status: Status) -> dict[str, Any]:
    """A budget's terms, what is spent and left of it, and what may be claimed.

    epsilon_certified  the limit: of everything, or of what is charged in each window
    epsilon_odometer   what holds at this very moment, however it was chosen; None where the limit
                       is the better claim
    epsilon_charged    of what was charged, if that amount had been fixed in advance
    """
    terms, left = status.terms, status.left
    facts = {
        **terms.to_dict(),
        "spent": status.spent,
        "epsilon_certified": terms.budget.epsilon if status.spent_units else 0.0,
        "epsilon_odometer": status.odometer,
        "epsilon_charged": status.epsilon,
        "epsilon_left": 0.0 if left is None else left.epsilon,
        "claim": claim(status),
        "pays_for": pays_for(terms),
    }
    if terms.window is not None:
        facts["epsilon_certified"] = terms.budget.epsilon
        facts["window_now"] = status.window
        facts["window_ends"] = windows.end_of(terms.window, status.window).isoformat()
        facts["windows_so_far"] = status.windows
        facts["epsilon_over_windows"] = {
            str(count): terms.claim_over(count) for count in sorted({1, *_COUNTS, status.windows})
        }
    return facts


def claim(status: Status) -> str:
    """What is certified of a budget, whatever was released and whenever a run stopped."""
    terms, budget = status.terms, status.terms.budget
    words = f"ε = {whole(budget.epsilon)} at δ = {whole(budget.delta)} ({budget.relation})"
    if terms.window is None:
        return f"{words}, the limit of everything that is ever charged."
    over = ", ".join(
        f"any {n} {terms.window}s ε = {rounded_up(terms.claim_over(n))}" for n in _COUNTS
    )
    return (
        f"{words} for what is charged in each calendar {terms.window} (UTC), not for all of them. "
        f"Together, at the same δ: {over}; since {status.since} "
        f"({counted(status.windows, terms.window)}) "
        f"ε = {rounded_up(terms.claim_over(status.windows))}."
    )


def pays_for(terms: Terms) -> str:
    """Which steps a budget can be charged for, and which it refuses."""
    if terms.order is None:
        return "full-batch steps, Laplace and pure ε; mini-batches are refused"
    return f"mini-batches, full batches and any release with a Rényi curve (order {terms.order})"


def budget_facts(ledger: Ledger, status: Status) -> dict[str, Any]:
    """A budget with its runs, its parts, its history and how many more such runs fit.

    runs  of its own, and those of its parts with what they cost here; the last opened is the last
    """
    name = status.terms.name
    chain, shares = ledger.read_transaction(lambda connection: _levels(connection, name))
    opened = ledger.read_transaction(lambda connection: _opened(connection, (name, *shares[0])))
    own = {run.id: run for run in ledger.runs(name)}
    others = {run.id: run for child in shares[0] for run in ledger.runs(child)}
    costs = [{run.id: run.spent_units for run in own.values()} | _flat(shares[0])]
    costs += [_flat(level) for level in shares[1:]]
    ids = [run for run in opened if run in costs[0] and run in {**own, **others}]
    runs = [run_facts({**own, **others}[run], status, opened[run], costs[0][run]) for run in ids]
    charged = [run for run in ids if costs[0][run] > 0][-_LAST_RUNS:]
    return {
        **summary(status),
        "forecast": _forecast([status, *chain[1:]], costs, charged),
        "history": ledger.read_transaction(lambda connection: _history(connection, status)),
        "parts": {
            child: sum(costs_of.values()) / status.terms.limit
            for child, costs_of in shares[0].items()
        },
        "runs": runs,
    }


def _levels(
    connection: Connection, name: str
) -> tuple[list[Status], list[dict[str, dict[str, int]]]]:
    """A budget and those above it; and of each what every run of each of its parts cost it."""
    chain = rows.current(connection, rows.chain_of(connection, name))
    return chain, [_shares(connection, status.terms.name) for status in chain]


def _shares(connection: Connection, name: str) -> dict[str, dict[str, int]]:
    """What every run of each of a budget's parts cost it."""
    columns = schema.records.c
    query = select(columns.body).where(columns.budget == name, columns.kind == "share")
    found: dict[str, dict[str, int]] = {}
    for text in connection.execute(query.order_by(columns.seq)).scalars():
        body = json.loads(text)
        part = found.setdefault(str(body["child"]), {})
        part[str(body["run"])] = part.get(str(body["run"]), 0) + int(body["cost"])
    return found


def _flat(parts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {run: cost for part in parts.values() for run, cost in part.items()}


def run_facts(run: Run, status: Status, opened: dict[str, str], cost: int) -> dict[str, Any]:
    """A run: who, when, how many steps, and the share of the budget that it cost."""
    values = (
        run.id, run.budget, run.opened["label"], run.opened["by"], opened.get("db_user", ""),
        run.opened["host"], opened.get("at", ""), run.status, run.granted, run.started,
        run.confirmed, cost / status.terms.limit, status.terms.name,
    )  # fmt: skip
    return dict(zip(_RUN_COLUMNS, values, strict=True))


def runs_csv(budgets: list[dict[str, Any]]) -> str:
    """Every run of these budgets as CSV, with a line of titles."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _RUN_COLUMNS)
    writer.writeheader()
    for budget in budgets:
        writer.writerows({name: _plain(run[name]) for name in run} for run in budget["runs"])
    return text.getvalue()


def history_csv(budget: dict[str, Any]) -> str:
    """The share of a budget that was spent after each change, as CSV with a line of titles."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["budget", "at", "spent"])
    writer.writerows([_plain(budget["name"]), at, share] for at, share in budget["history"])
    return text.getvalue()


def _plain(value: Any) -> Any:
    """A text that a spreadsheet does not take for a formula."""
    risky = isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t")
    return f"'{value}" if risky else value


def _forecast(
    chain: Sequence[Status], costs: Sequence[Mapping[str, int]], runs: Sequence[str]
) -> dict[str, Any]:
    """How many more runs like these fit into a budget and all above it, by their average cost."""
    if not runs:
        return {"runs": None, "like": 0}
    fit = []
    for status, known in zip(chain, costs, strict=True):
        total = sum(known.get(run, 0) for run in runs)
        left = max(status.terms.limit - status.spent_units, 0)
        if total > 0:
            fit.append(left // math.ceil(total / len(runs)))
    return {"runs": min(fit), "like": len(runs)}


def _opened(connection: Connection, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """When each run of these budgets was opened, and by which user of the database, in order."""
    columns = schema.records.c
    query = select(schema.records).where(columns.budget.in_(names), columns.kind == "open")
    records = [record_of(row) for row in connection.execute(query.order_by(columns.seq))]
    return {r.run: {"at": r.at, "db_user": str(r.body.get("db_user", ""))} for r in records}


def _history(connection: Connection, status: Status) -> list[list[Any]]:
    """[time, share spent] after each of the last records that changed it, the oldest first."""
    columns = schema.records.c
    query = (
        select(schema.records)
        .where(columns.budget == status.terms.name)
        .order_by(columns.seq.desc())
        .limit(_POINTS)
    )
    points: list[list[Any]] = []
    for record in [record_of(row) for row in connection.execute(query)][::-1]:
        stated = record.body.get("after", {}).get("spent")
        if stated is not None:
            share = int(stated) / status.terms.limit
            if not points or points[-1][1] != share:
                points.append([record.at, share])
    return points

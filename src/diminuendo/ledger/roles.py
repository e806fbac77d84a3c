"""Roles in PostgreSQL: what an officer, a spender and a reader can do, by the database's own rules.

| | reads | opens runs, spends | creates budgets, gives back, imports | changes a record |
|---|---|---|---|---|
| reader | yes | no | no | no |
| spender | yes | yes | no | no |
| officer | yes | yes | yes | no |

By triggers (`roles_sql`) nobody changes or deletes a record; a record follows from the one before
it, names the database's user and its time, costs no less than its events do, stays within the
limit, and is shared with every parent; a spender moves sums only upwards; what needs two people had
a proposal by another user; and rows say what the records say. A superuser, or the owner of the
tables, can switch triggers off: keys and anchors are against them.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from diminuendo.errors import InputError
from diminuendo.ledger import roles_sql
from diminuendo.ledger.book import Ledger

ROLES = ("officer", "spender", "reader")


def statements(grants: dict[str, list[str]] | None = None, *, schema: str = "public") -> list[str]:
    """The SQL statements that install the roles, in order.

    grants  database users for each role, e.g. {"spender": ["alice"]}
    schema  the schema that the ledger's tables are in
    """
    where = _quoted(schema)
    parts = "\n--\n".join((roles_sql.RIGHTS, roles_sql.HELPERS, roles_sql.RULES))
    found = [part.strip().rstrip(";").replace("{schema}", where) for part in parts.split("\n--\n")]
    found += roles_sql.triggers(where)
    for role, users in (grants or {}).items():
        if role not in ROLES:
            raise InputError(f"one of {', '.join(ROLES)}", name="the role", value=role)
        found += [f"GRANT diminuendo_{role} TO {_quoted(user)}" for user in users]
    return found


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def install(ledger: Ledger, grants: dict[str, list[str]] | None = None) -> None:
    """Run the statements on a ledger's database, all or none; needs the owner of its tables."""
    if ledger.url.get_backend_name() == "sqlite":
        raise InputError(
            "on PostgreSQL",
            name="the ledger",
            value=ledger.address,
            remedy="A SQLite file has no users; its protection is the file's permissions.",
        )

    def work(connection: Connection) -> None:
        where = text(
            "SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.oid = to_regclass('diminuendo_head')"
        )
        schema = str(connection.execute(where).scalar_one())
        for statement in statements(grants, schema=schema):
            connection.execute(text(statement.replace(":", "\\:")))

    ledger.administer(work)

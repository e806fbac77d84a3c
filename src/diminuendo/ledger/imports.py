"""Import: charge here what another ledger has spent, or a copy of this one since they parted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from diminuendo import _files
from diminuendo.errors import BudgetRefused, InputError, LedgerError, SchemaError
from diminuendo.ledger import approval, rows, schema
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.exchange import SCHEMA, VERSION
from diminuendo.ledger.identity import Progress, silent
from diminuendo.ledger.records import Record, canonical
from diminuendo.ledger.replay import Account, Replay
from diminuendo.ledger.state import Status
from diminuendo.ledger.store import Change, record_of
from diminuendo.ledger.terms import Terms, text


@dataclass(frozen=True)
class ImportedBudget:
    """What an import did to one budget: steps and share of the limit that were charged."""

    budget: str
    created: bool
    steps: int
    spent: float


def import_file(
    ledger: Ledger,
    path: str | Path,
    *,
    allow_second: bool = False,
    overspend: bool = False,
    progress: Progress = silent,
) -> list[ImportedBudget]:
    """Charge here what another ledger has spent, from its export, which is verified first.

    A budget that does not exist here is created with the terms it has there; one that exists must
    have the same terms. Importing a longer export of the same ledger charges only what is new.
    Open runs count as spent. An import never gives anything back. All budgets are imported or none.
    What is imported into a budget with windows counts in the window in which it is imported. Where
    a budget needs two persons, the first call raises Proposed and the same call by another person
    acts.

    overspend  also record spending that goes over the budget, because it has happened
    """
    replay, heads = _read(Path(path), progress)
    origin, spent, steps = replay.ledger, replay.total, replay.steps
    if origin == ledger.head.ledger:
        fork = _fork(ledger, heads)
        if fork == replay.seq:
            raise InputError(
                "another ledger's, or a copy's that went on",
                name="the import",
                value=str(path),
                remedy="It is this ledger's own export: everything in it is on record here.",
            )
        before, _ = _read(Path(path), progress, upto=fork)
        origin = f"{origin} copy {heads[fork + 1]}"
        spent, steps = _spent_since(before, replay)
    budgets = []
    for name, terms in replay.terms.items():
        body = {
            "origin": origin,
            "seq": replay.seq,
            "digest": replay.digest,
            "terms": json.loads(canonical(terms.to_dict())),
            "total": str(spent[name]),
            "steps_total": steps[name],
            "overspend": overspend,
        }
        budgets.append((terms, body))
    return _import(ledger, budgets, heads, allow_second) if budgets else []


def _fork(ledger: Ledger, heads: Mapping[int, str]) -> int:
    """The number of the last record that this ledger and its copy have in common."""

    def common(number: int) -> bool:
        query = select(schema.records.c.digest).where(schema.records.c.seq == number)
        digest = ledger.read_transaction(lambda c: c.execute(query).scalar())
        return number == 0 or digest == heads[number]

    low, high = 0, max(heads, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if common(middle) else (low, middle - 1)
    return low


def _spent_since(before: Replay, now: Replay) -> tuple[dict[str, int], dict[str, int]]:
    """What a copy has spent, and its steps, since it parted from its original.

    A run that was open when they parted and went on in the copy counts in full: what the original
    says of it does not cover what the copy released.
    """
    spent, steps = dict.fromkeys(now.terms, 0), dict.fromkeys(now.terms, 0)
    for replay, sign in ((now, 1), (before, -1)):
        for name in replay.terms:
            by_runs = sum(_cost_to(name, run) for run in replay.runs.values())
            spent[name] += sign * (replay.total[name] - by_runs)
    for run, account in now.runs.items():
        if before.runs.get(run) != account:
            ended = account.status != "open"
            for name in spent:
                spent[name] += _cost_to(name, account)
            steps[account.budget] += account.started if ended else account.granted
    return spent, steps


def _cost_to(name: str, account: Account) -> int:
    """What a run cost a budget: its own, or one that its own is a part of."""
    return account.spent if account.budget == name else account.shares.get(name, 0)


def _import(
    ledger: Ledger,
    budgets: list[tuple[Terms, dict[str, Any]]],
    heads: Mapping[int, str],
    allow_second: bool,
) -> list[ImportedBudget]:
    """Charge all of them in one transaction, or propose what needs a second person."""
    imported: list[ImportedBudget] = []

    def work(change: Change) -> Record:
        imported.clear()
        charges = [_charge_of(change, terms, body, heads, allow_second) for terms, body in budgets]
        names = ("origin", "seq", "digest", "overspend")
        request = {"action": "import", **{name: budgets[0][1][name] for name in names}}
        guardians = {
            charge.guardian.terms.name: charge.guardian for charge in charges if charge.guardian
        }
        asked = [approval.proposal(change, request, guardian) for guardian in guardians.values()]
        if any(asked):
            return next(record for record in asked if record)
        records = []
        for charge in charges:
            status = charge.status or rows.add_budget(change, charge.terms)
            now = replace(status, spent_units=status.spent_units + int(charge.body["cost"]))
            body = {**charge.body, "user": change.user}
            origin = str(body["origin"])
            records.append(rows.write(change, "import", now, None, body, origin=origin))
            share = int(charge.body["cost"]) / charge.terms.limit
            imported.append(
                ImportedBudget(charge.terms.name, charge.status is None, body["steps"], share)
            )
        return records[0]

    approval.raise_proposed(ledger.write_transaction(work))
    return imported


@dataclass(frozen=True)
class _Charge:
    """What an import will do to one budget.

    status    the budget as it is here; None if it is created
    guardian  the budget that wants two people for it
    """

    terms: Terms
    body: dict[str, Any]
    status: Status | None
    guardian: Status | None


def _charge_of(
    change: Change,
    terms: Terms,
    body: Mapping[str, Any],
    heads: Mapping[int, str],
    allow_second: bool,
) -> _Charge:
    """Check everything about the import of one budget, and change nothing."""
    name, origin = terms.name, str(body["origin"])
    last = _last_import(change.connection, name, origin)
    if last is not None and heads.get(last.body["seq"]) != last.body["digest"]:
        raise InputError(
            "a continuation of what was imported before",
            name="the import",
            value=f"a chain in which record {last.body['seq']} is another",
            remedy="One of the two files was not written by that ledger.",
        )
    status = rows.existing_budget(change.connection, name)
    if status is None:
        rows.refuse_second(change.connection, terms, allow_second)
        guardian = approval.guardian(change.connection, terms)
    else:
        rows.require_same_terms(status.terms, terms)
        status = status.at(change.now)
        guardian = status if terms.two_persons else None
    before = 0 if last is None else int(last.body["total"])
    steps_before = 0 if last is None else int(last.body["steps_total"])
    cost = max(int(body["total"]) - before, 0)
    steps = max(body["steps_total"] - steps_before, 0)
    spent = 0 if status is None else status.spent_units
    if spent + cost > terms.limit and not body["overspend"]:
        raise BudgetRefused(
            f"What was spent there does not fit beside what was spent here of {name!r}. If it "
            "has happened, it should be on record: import with overspend=True (--overspend)."
        )
    charged = {"total": str(before + cost), "steps_total": steps_before + steps}
    limit = {"limit": str(terms.limit), "cost": str(cost), "steps": steps}
    return _Charge(terms, {**body, **charged, **limit}, status, guardian)


def _last_import(connection: Connection, name: str, origin: str) -> Record | None:
    row = connection.execute(
        select(schema.records)
        .where(
            schema.records.c.run == origin,
            schema.records.c.kind == "import",
            schema.records.c.budget == name,
        )
        .order_by(schema.records.c.seq.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else record_of(row)


def _read(
    path: Path, progress: Progress, *, upto: int | None = None
) -> tuple[Replay, dict[int, str]]:
    """The verified sums of an export, and the digest of every record.

    upto  the number of the last record to read; all of them by default
    """
    heads: dict[int, str] = {}
    try:
        with path.open(encoding="utf-8-sig") as handle:
            header = _header(handle.readline(), path)
            replay = Replay(header["ledger"])
            for number, line in enumerate(handle, start=2):
                if replay.seq == upto:
                    return replay, heads
                data = _files.parse_json(line, name=f"line {number}", source=str(path))
                replay.feed(data)
                heads[replay.seq] = replay.digest
                progress(replay.seq, header["seq"])
            replay.end()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(
            "a readable export", name="the import", value=str(path), remedy=f"({reason})"
        ) from None
    except (LedgerError, KeyError, TypeError) as error:
        raise InputError(
            "an unchanged export of a ledger", name="the import", value=str(path),
            remedy=str(error),
        ) from None  # fmt: skip
    if (replay.seq, replay.digest) != (header["seq"], header["digest"]):
        raise InputError(
            f"{header['seq']} records long", name="the import", value=replay.seq,
            remedy="The file was cut off: export it again.",
        )  # fmt: skip
    return replay, heads


def _header(line: str, path: Path) -> dict[str, Any]:
    header = _files.parse_json(line, name="the import", source=str(path))
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise InputError(
            f'a file whose first line has "schema": "{SCHEMA}"',
            name="the import",
            value=str(path),
            remedy="`diminuendo ledger export` writes one.",
        )
    if header.get("version") != VERSION:
        raise SchemaError(
            f"of version {VERSION}",
            name="the import",
            value=header.get("version"),
            remedy="pip install --upgrade diminuendo.",
        )
    types = {"ledger": str, "seq": int, "digest": str}
    if any(type(header.get(name)) is not kind for name, kind in types.items()):
        raise InputError(
            "complete", name="the import's first line", value=", ".join(header), remedy=str(path)
        )
    text("the other ledger's name", header["ledger"])
    return header

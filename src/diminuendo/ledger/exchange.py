"""Export and import: the whole chain as JSON Lines, or a budget's events for dp-accounting."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from diminuendo import _extras, _files
from diminuendo.errors import BudgetRefused, InputError, LedgerError, SchemaError
from diminuendo.events import GaussianStep
from diminuendo.ledger import schema
from diminuendo.ledger.address import file_of
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.identity import Progress, silent
from diminuendo.ledger.mechanisms import Laplace, Mechanism, ZeroConcentrated
from diminuendo.ledger.records import Event, Record, canonical, unpack
from diminuendo.ledger.replay import Account, Replay
from diminuendo.ledger.rows import (
    add_budget,
    existing_budget,
    first_budget_for,
    require_same_terms,
    second_budget,
    write,
)
from diminuendo.ledger.store import Change, record_of
from diminuendo.ledger.terms import Terms, text

SCHEMA, VERSION = "diminuendo.ledger", 1


def export(ledger: Ledger, path: str | Path, *, progress: Progress = silent) -> int:
    """Write every record as a line of JSON, after a header line. Returns the number of records."""
    own = file_of(ledger.url)
    if own is not None and own.exists() and Path(path).exists() and own.samefile(path):
        raise InputError("another file than the ledger's", name="the output", value=str(path))
    head = ledger.head
    first = {"schema": SCHEMA, "version": VERSION, "ledger": head.ledger, "seq": head.seq,
             "digest": head.digest}  # fmt: skip

    def lines() -> Iterator[str]:
        yield canonical(first) + "\n"
        for record in ledger.records(upto=head.seq):
            yield canonical(record.to_dict()) + "\n"
            progress(record.seq, head.seq)

    write_private(path, lines())
    return head.seq


def write_private(path: str | Path, lines: Iterable[str]) -> None:
    """Write a file that only its owner can read, whole or not at all, and follow no link.

    A link that somebody planted at the path is replaced by the file; what it points to is not
    touched.
    """
    target = Path(path)
    with _files.os_errors("a file that can be written", name="the output", path=path):
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as temporary:
                temporary.writelines(lines)
                temporary.flush()
                os.fsync(handle)
            Path(name).replace(target)
            _files.sync_folder(target.parent)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


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
    Open runs count as spent. An import never gives anything back.

    overspend  also record spending that goes over the budget, because it has happened
    """
    replay, heads = _read(Path(path), progress)
    origin, spent, steps = replay.ledger, replay.spent, replay.steps
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
    imported = []
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
        imported.append(_import(ledger, terms, body, heads, allow_second))
    return imported


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
            spent[name] += sign * (replay.spent[name] - by_runs)
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
    terms: Terms,
    body: Mapping[str, Any],
    heads: Mapping[int, str],
    allow_second: bool,
) -> ImportedBudget:
    name, origin = terms.name, str(body["origin"])
    created = False

    def work(change: Change) -> Record:
        nonlocal created
        last = _last_import(change.connection, name, origin)
        if last is not None and heads.get(last.body["seq"]) != last.body["digest"]:
            raise InputError(
                "a continuation of what was imported before",
                name="the import",
                value=f"a chain in which record {last.body['seq']} is another",
                remedy="One of the two files was not written by that ledger.",
            )
        status = existing_budget(change.connection, name)
        created = status is None
        if status is None:
            first = first_budget_for(change.connection, terms)
            if first is not None and (not allow_second or first.terms.two_persons):
                raise second_budget(terms, first)
            status = add_budget(change.connection, terms)
        require_same_terms(status.terms, terms)
        before = 0 if last is None else int(last.body["total"])
        steps_before = 0 if last is None else int(last.body["steps_total"])
        cost, steps = int(body["total"]) - before, body["steps_total"] - steps_before
        cost, steps = max(cost, 0), max(steps, 0)
        charged = {"total": str(before + cost), "steps_total": steps_before + steps}
        if status.spent_units + cost > terms.limit and not body["overspend"]:
            raise BudgetRefused(
                f"What was spent there does not fit beside what was spent here of {name!r}. If it "
                "has happened, it should be on record: import with overspend=True (--overspend)."
            )
        now = replace(status, spent_units=status.spent_units + cost)
        limit = {"limit": str(terms.limit)}
        content = {**body, **charged, **limit, "cost": str(cost), "steps": steps}
        return write(change, "import", now, None, content, origin=origin)

    record = ledger.write_transaction(work)
    return ImportedBudget(
        name, created, record.body["steps"], int(record.body["cost"]) / terms.limit
    )


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


def granted_events(ledger: Ledger, name: str) -> list[Event]:
    """Every event that was granted on a budget and not given back, in order."""
    runs = {run.id: run for run in ledger.runs(name)}
    events = []
    for record in ledger.records():
        if record.kind == "import" and record.budget == name and record.body["steps"]:
            raise InputError(
                "all granted in this ledger",
                name=f"the spending of {name!r}",
                value=f"{record.body['steps']} steps that were imported",
                remedy="Their events are in the ledger that they came from.",
            )
        if record.kind == "grant" and record.run in runs:
            run, at = runs[record.run], int(record.body["first"])
            ended = run.status != "open"
            for event in unpack(record.body["events"]):
                kept = min(event.count, run.started - at) if ended else event.count
                if kept > 0:
                    events.append(replace(event, count=kept))
                at += event.count
    return events


def to_dp_accounting(ledger: Ledger, name: str) -> Any:
    """The budget's events as a dp_accounting.DpEvent, for other accountants to judge.

    Its noise multipliers are relative to the sensitivity under the budget's relation (2 × the clip
    norm for replace-one), so that an accountant's default relation gives the right ε.
    """
    with _extras.needed("dp_accounting", extra=None, purpose="This export"):
        import dp_accounting as dp
    budget = ledger.status(name).terms.budget
    composed = []
    for event in granted_events(ledger, name):
        if not isinstance(event, GaussianStep):
            composed.append(dp.SelfComposedDpEvent(_dp_event(dp, event), event.count))
            continue
        if event.sampling_rate < 1 and budget.relation != "add-remove":
            raise InputError(
                "add-remove for subsampled steps",
                name="the budget's relation",
                value=budget.relation,
                remedy="dp-accounting has no event for Poisson sampling under replace-one.",
            )
        one = dp.GaussianDpEvent(event.noise_multiplier / budget.sensitivity)
        if event.sampling_rate < 1:
            one = dp.PoissonSampledDpEvent(event.sampling_rate, one)
        composed.append(dp.SelfComposedDpEvent(one, event.count))
    return dp.ComposedDpEvent(composed)


def _dp_event(dp: Any, mechanism: Mechanism) -> Any:
    if isinstance(mechanism, Laplace):
        return dp.LaplaceDpEvent(mechanism.scale)
    if isinstance(mechanism, ZeroConcentrated):
        return dp.ZCDpEvent(mechanism.rho)
    raise InputError(
        "one that dp-accounting has an event for",
        name="the release",
        value=type(mechanism).__name__,
    )

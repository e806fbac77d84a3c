"""Export and import: the whole chain as JSON Lines, or a budget's events for dp-accounting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from diminuendo import _files
from diminuendo.errors import BudgetRefused, InputError, LedgerError, SchemaError
from diminuendo.events import GaussianStep
from diminuendo.ledger import schema
from diminuendo.ledger.address import file_of
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.identity import Progress, silent
from diminuendo.ledger.records import Record, canonical, unpack
from diminuendo.ledger.replay import Replay
from diminuendo.ledger.rows import (
    add_budget,
    all_terms,
    budget_in,
    refuse_second_budget,
    require_same_terms,
    set_budget,
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

    _files.write_lines(path, lines())
    return head.seq


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
    origin, replay, heads = _read(Path(path), progress)
    if origin == ledger.head.ledger:
        raise InputError(
            "another ledger's", name="the import", value=str(path), remedy="This is its own export."
        )
    imported = []
    for name, terms in replay.terms.items():
        body = {
            "origin": origin,
            "seq": replay.seq,
            "digest": replay.digest,
            "terms": json.loads(canonical(terms.to_dict())),
            "total": str(replay.spent[name]),
            "steps_total": replay.steps[name],
            "overspend": overspend,
        }
        imported.append(_import(ledger, terms, body, heads, allow_second))
    return imported


def _import(
    ledger: Ledger,
    terms: Terms,
    body: Mapping[str, Any],
    heads: Mapping[int, str],
    allow_second: bool,
) -> ImportedBudget:
    name, origin = terms.name, str(body["origin"])
    created = name not in {status.terms.name for status in ledger.budgets()}

    def work(change: Change) -> Record:
        last = _last_import(change.connection, name, origin)
        if last is not None and heads.get(last.body["seq"]) != last.body["digest"]:
            raise InputError(
                "a continuation of what was imported before",
                name="the import",
                value=f"a chain in which record {last.body['seq']} is another",
                remedy="One of the two files was not written by that ledger.",
            )
        if created:
            refuse_second_budget(all_terms(change.connection).values(), terms, allow_second)
            add_budget(change.connection, terms)
        status = budget_in(change.connection, name)
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
        set_budget(change.connection, status, status.spent_units + cost)
        return change.append(
            "import",
            budget=name,
            run=origin,
            body={**body, **charged, "cost": str(cost), "steps": steps},
        )

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


def _read(path: Path, progress: Progress) -> tuple[str, Replay, dict[int, str]]:
    """The other ledger's id, the verified sums, and the digest of every record."""
    replay, heads = Replay(), {}
    try:
        with path.open(encoding="utf-8-sig") as handle:
            header = _header(handle.readline(), path)
            for number, line in enumerate(handle, start=2):
                data = _files.parse_json(line, name=f"line {number}", source=str(path))
                replay.feed(data)
                heads[replay.seq] = replay.digest
                progress(replay.seq, header["seq"])
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
    return str(header["ledger"]), replay, heads


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


def granted_events(ledger: Ledger, name: str) -> list[GaussianStep]:
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
                    events.append(GaussianStep(
                        noise_multiplier=event.noise_multiplier,
                        sampling_rate=event.sampling_rate, count=kept))  # fmt: skip
                at += event.count
    return events


def to_dp_accounting(ledger: Ledger, name: str) -> Any:
    """The budget's events as a dp_accounting.DpEvent, for other accountants to judge."""
    try:
        import dp_accounting as dp
    except ImportError:
        raise InputError(
            "installed", name="dp-accounting", value=None, remedy="pip install dp-accounting."
        ) from None
    composed = []
    for event in granted_events(ledger, name):
        one = dp.GaussianDpEvent(event.noise_multiplier)
        if event.sampling_rate < 1:
            one = dp.PoissonSampledDpEvent(event.sampling_rate, one)
        composed.append(dp.SelfComposedDpEvent(one, event.count))
    return dp.ComposedDpEvent(composed)

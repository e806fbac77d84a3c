"""Export: the whole chain as JSON Lines, or a budget's events for dp-accounting."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from diminuendo import _extras, _files
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger.address import file_of
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.identity import Progress, silent
from diminuendo.ledger.mechanisms import Laplace, Mechanism, ZeroConcentrated
from diminuendo.ledger.records import Event, canonical, unpack

SCHEMA, VERSION = "diminuendo.ledger", 1
"""The first line of an export; `imports` reads it."""


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

"""Which steps may have been released: on disk before they are, so that a crash forgets none.

With a plan, steps are reserved some at a time: few at the start, where a run is most likely to
fail, and more as it proves long (`steps_ahead`). Where a policy picks σ while training, nobody can
know after a crash what it would have picked: the journal then holds every event since the last
saved state, each on disk before its step is released.

A private run without a ledger has nothing but its journal, so that copies of it must not count
apart: see `copies`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from diminuendo import _files, _validate, events
from diminuendo.errors import InputError, UsageError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import Spending
from diminuendo.training import copies
from diminuendo.training.guard import check_kind

VERSION = 1


def steps_ahead(taken: int, every: int) -> int:
    """How many steps are reserved, or go by until the next checkpoint, after so many were taken.

    As many as this process has taken, at least 1 and at most `every`: a crash costs no more than
    that, and one before the first step is over costs 1.
    """
    return max(1, min(taken, every))


class Entry(NamedTuple):
    """Steps before `upto` may have been released.

    `events` are those from step `since` on, where no plan says what they were; `receipt` is what
    the spending gave when this was written, and tells it later whether this is the last word.
    """

    upto: int = 0
    since: int = 0
    events: tuple[GaussianStep, ...] = ()
    receipt: Mapping[str, Any] | None = None

    def after(self, step: int) -> tuple[GaussianStep, ...]:
        """The written events from a step on."""
        return self.events[max(step - self.since, 0) :]


class Journal:
    """The journal of a plan's run in a file.

    every   most steps that are reserved at a time, and may be lost by a crash
    writes  False for a rank that only reads
    moved   True states that the file was moved here or restored, and that no other copy of it has
            gone on or will
    """

    def __init__(
        self,
        path: str | Path,
        plan: Plan,
        *,
        every: int = 50,
        writes: bool = True,
        moved: bool = False,
    ) -> None:
        check_kind(plan)
        self.path = _validate.path("journal", path)
        self._digest, self._steps = plan.digest, plan.steps
        self._every = _validate.count("every", every)
        self._writes, self._moved = writes, _validate.flag("moved", moved)
        self._reserved = 0
        self._began: int | None = None
        self._events: list[GaussianStep] = []
        self._receipt: Mapping[str, Any] = {}
        self._run: str | None = None
        self._turn = self._serial = 0

    def read(self, *, saved: int = 0, planned: bool = True, alone: bool = False) -> Entry:
        """What the file says; without one nothing was released, if no step is in a saved state.

        saved    how many steps the saved state has that is gone on from
        planned  whether a plan says what the steps after it are
        alone    whether nobody but the journal keeps count: then copies of it are told apart, and
                 this run takes its turn
        """
        self._refuse_no_folder()
        if not self.path.exists():
            if saved == 0:
                self._run = secrets.token_hex(16) if alone else None
                return Entry()
            raise InputError(
                "beside the saved state",
                name="the journal",
                value=str(self.path),
                remedy="Without it nobody knows which steps were released since; start anew in "
                "another folder, with a budget of its own.",
            )
        text = _files.read_text(self.path, name="the journal")
        data = _files.parse_json(text, name="the journal", source=str(self.path))
        entry = self._entry(data)
        return self._in_turn(data, entry, saved, planned) if alone else entry

    def _refuse_no_folder(self) -> None:
        """A journal that cannot be written would be missed when a step has been paid for."""
        folder = self.path.absolute().parent
        if self._writes and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise InputError(
                "in a folder that is there and can be written",
                name="the journal",
                value=str(self.path),
                remedy=f"Make {folder} first.",
            )

    def _entry(self, data: Any) -> Entry:
        try:
            if data["plan"] != self._digest:
                raise InputError(
                    "of this plan",
                    name=f"the journal {self.path}",
                    value=data["plan"],
                    remedy="Start in another folder.",
                )
            granted = tuple(events.from_dict(event) for event in data["events"])
            receipt = dict(data.get("receipt", {}))
            return Entry(int(data["reserved"]), int(data["since"]), granted, receipt)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("a journal", name="the journal", value=str(self.path)) from None

    def _in_turn(self, data: dict[str, Any], entry: Entry, saved: int, planned: bool) -> Entry:
        """The newest word of all copies; from here on this run alone has the next."""
        self._run = str(data.get("run") or secrets.token_hex(16))
        with copies.newest(self._run) as newest:
            if newest.content is None:
                if not self._moved:
                    copies.refuse_copy(self.path, data.get("place"))
            elif newest.content["serial"] > data["serial"]:
                data, entry = newest.content, self._entry(newest.content)
            if not planned and entry.since > saved:
                raise InputError(
                    f"of step {entry.since} or later",
                    name="the saved state",
                    value=saved,
                    remedy="A copy of it has gone on, and nobody knows which steps its policy "
                    "took before. Go on from the newest copy, or start anew.",
                )
            self._turn = int(data.get("turn", 0)) + 1
            self._serial = int(data.get("serial", 0))
            self._events = list(entry.events)
            self._keep(newest, entry.upto, entry.since, entry.events)
        return entry

    def before_release(
        self, step: int, event: GaussianStep, spending: Spending, *, planned: bool
    ) -> None:
        """Durably: this step (0, 1, …) may be released from now on."""
        if not planned:
            self._events.append(event)
            self._receipt = spending.receipt()
            self._write(step + 1, step + 1 - len(self._events), self._events)
        elif step >= self._reserved:
            self._began = step if self._began is None else self._began
            upto = min(step + steps_ahead(step - self._began, self._every), self._steps)
            self._receipt = spending.receipt(spending.steps + upto - step - 1)
            self._write(upto)

    def saved(self, step: int) -> None:
        """A state after so many steps is on disk: none beyond them has been released."""
        self._events = []
        self._write(step, since=step)

    def settle(self, charged: int) -> None:
        """After an error, unlike after a crash, it is known which steps were never asked for."""
        if self._reserved > charged and not self._events:
            with suppress(_TakenUp):
                self._write(charged)

    def _write(self, upto: int, since: int = 0, written: Sequence[GaussianStep] = ()) -> None:
        if self._run is None or not self._writes:
            self._put(self._content(upto, since, written))
        else:
            with copies.newest(self._run) as newest:
                now = newest.content
                if now is not None and now["turn"] != self._turn:
                    raise _TakenUp(
                        f"The run of {self.path} has been taken up again, in "
                        f"{now['place']['folder']} on {now['place']['host']}: it goes on there."
                    )
                self._keep(newest, upto, since, written)
        self._reserved = upto

    def _keep(
        self,
        newest: copies.NewestWord,
        upto: int,
        since: int,
        written: Sequence[GaussianStep],
    ) -> None:
        """The last word of the run: first where all copies look, then in the file."""
        self._serial += 1
        content = {
            **self._content(upto, since, written),
            "run": self._run,
            "turn": self._turn,
            "serial": self._serial,
            "place": copies.place_of(self.path),
        }
        newest.replace(content)
        self._put(content)

    def _content(self, upto: int, since: int, written: Sequence[GaussianStep]) -> dict[str, Any]:
        return {
            "version": VERSION,
            "plan": self._digest,
            "reserved": upto,
            "since": since,
            "events": [events.to_dict(event) for event in written],
            "receipt": self._receipt,
        }

    def _put(self, content: Mapping[str, Any]) -> None:
        if self._writes:
            _files.write_text(self.path, json.dumps(content))


class _TakenUp(UsageError):
    """Another run has the next word."""

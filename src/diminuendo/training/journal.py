"""Which steps may have been released: on disk before they are, so that a crash forgets none.

With a plan, steps are reserved some at a time. Where a policy picks σ while training, nobody can
know after a crash what it would have picked: the journal then holds every event since the last
saved state, each on disk before its step is released.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diminuendo import _files, _validate, events
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import Spending

VERSION = 1


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

    every   steps that are reserved at a time, and may be lost by a crash
    writes  False for a rank that only reads
    """

    def __init__(
        self, path: str | Path, plan: Plan, *, every: int = 50, writes: bool = True
    ) -> None:
        self.path = Path(path)
        self._digest, self._steps = plan.digest, plan.steps
        self._every = _validate.count("every", every)
        self._writes = writes
        self._reserved = 0
        self._events: list[GaussianStep] = []
        self._receipt: Mapping[str, Any] = {}

    def read(self, *, saved: int = 0) -> Entry:
        """What the file says; without one nothing was released, if no step is in a saved state."""
        if not self.path.exists():
            if saved == 0:
                return Entry()
            raise InputError(
                "beside the saved state",
                name="the journal",
                value=str(self.path),
                remedy="Without it nobody knows which steps were released since; start anew in "
                "another folder, with a budget of its own.",
            )
        data = _files.parse_json(
            _files.read_text(self.path, name="the journal"),
            name="the journal",
            source=str(self.path),
        )
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

    def before_release(
        self, step: int, event: GaussianStep, spending: Spending, *, planned: bool
    ) -> None:
        """Durably: this step (0, 1, …) may be released from now on."""
        if not planned:
            self._events.append(event)
            self._receipt = spending.receipt()
            self._write(step + 1, step + 1 - len(self._events), self._events)
        elif step >= self._reserved:
            upto = min(step + self._every, self._steps)
            self._receipt = spending.receipt(spending.steps + upto - step - 1)
            self._write(upto)

    def saved(self, step: int) -> None:
        """A state after so many steps is on disk: none beyond them has been released."""
        self._events = []
        self._write(step, since=step)

    def settle(self, charged: int) -> None:
        """After an error, unlike after a crash, it is known which steps were never asked for."""
        if self._reserved > charged and not self._events:
            self._write(charged)

    def _write(self, upto: int, since: int = 0, written: Sequence[GaussianStep] = ()) -> None:
        content = {
            "version": VERSION,
            "plan": self._digest,
            "reserved": upto,
            "since": since,
            "events": [events.to_dict(event) for event in written],
            "receipt": self._receipt,
        }
        if self._writes:
            _files.write_text(self.path, json.dumps(content))
        self._reserved = upto

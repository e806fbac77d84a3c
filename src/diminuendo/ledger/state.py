"""A budget and a run as values: what is spent, how many steps, and the sums in a record."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from diminuendo.budget import Budget
from diminuendo.ledger import renamed, windows
from diminuendo.ledger.records import canonical
from diminuendo.ledger.terms import Terms

OPEN, CLOSED, RECLAIMED = "open", "closed", "reclaimed"
RELEASED = "released"
"""What ledgers of the version before call a reclaimed run."""


@dataclass(frozen=True)
class Status:
    """A budget and what is spent of it; `spent_units` counts units of 2⁻²⁰⁰ (`Terms.limit`).

    window  for a budget with windows: the one that `spent_units` was spent in (`windows.label_of`)
    since   and the one in which the budget was created
    """

    terms: Terms
    spent_units: int
    window: str = ""
    since: str = ""

    def at(self, now: datetime.datetime) -> Status:
        """The budget at a moment: nothing is spent of a window that has just begun."""
        if self.terms.window is None:
            return self
        label = windows.label_of(self.terms.window, now)
        return replace(self, window=label, spent_units=0) if label > self.window else self

    @property
    def windows(self) -> int:
        """How many windows there have been, this one included; 1 without windows."""
        if self.terms.window is None:
            return 1
        return windows.count(self.terms.window, self.since, self.window)

    @property
    def spent(self) -> float:
        """The share of the limit that is spent, rounded up; above 1 only after an import."""
        share = Fraction(self.spent_units, self.terms.limit)
        return math.nextafter(float(share), math.inf) if self.spent_units else 0.0

    @property
    def epsilon(self) -> float:
        """ε of what was charged if the amount had been fixed in advance: no certified claim.

        Certified are the limit, `terms.budget.epsilon`, and `odometer`; see `Terms.epsilon_spent`.
        """
        return self.terms.epsilon_spent(self.spent_units)

    @property
    def odometer(self) -> float | None:
        """ε that is certified at this moment, however it was chosen; see `Terms.odometer`.

        None where the limit is the better claim: near it, and where the budget has windows, since
        the moment is one of many windows.
        """
        epsilon = self.terms.odometer(self.spent_units)
        better = epsilon < self.terms.budget.epsilon and self.terms.window is None
        return epsilon if better else None

    @property
    def left(self) -> Budget | None:
        """What is left as a budget with the same δ, or None if that is nothing."""
        return self.terms.left(self.spent_units)


@dataclass(frozen=True)
class Run:
    """A run and its counts of steps.

    granted    steps that are charged
    started    of these, steps that may have been released
    confirmed  of these, steps that are known to have been taken
    nonce      the token of the request that last moved `started`
    """

    id: str
    budget: str
    status: str
    granted: int
    started: int
    confirmed: int
    spent_units: int
    opened: Mapping[str, Any]
    nonce: str = ""

    @property
    def turn(self) -> int:
        """Deprecated name of `generation`."""
        renamed.warn("Run.turn", "Run.generation")
        return self.generation

    @property
    def generation(self) -> int:
        """How many times the run was taken over by another process (`Ledger.resume_run`)."""
        return int(self.opened["turn"])


def after(status: Status | None, run: Run | None) -> dict[str, Any]:
    """The sums that a record states: they hold after it."""
    sums: dict[str, Any] = {}
    if status is not None:
        sums["spent"] = str(status.spent_units)
        sums["terms"] = terms_digest(status.terms)
        if status.terms.window is not None:
            sums["window"] = [status.since, status.window]
    if run is not None:
        sums["run"] = [run.status, run.granted, run.started, run.confirmed, str(run.spent_units),
                       run.generation, run.nonce]  # fmt: skip
    return sums


@lru_cache(maxsize=64)
def terms_digest(terms: Terms) -> str:
    """The fingerprint of the terms that a record states."""
    return hashlib.sha256(canonical(terms.to_dict()).encode()).hexdigest()[:32]

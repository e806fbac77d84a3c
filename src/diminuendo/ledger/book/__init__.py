"""The class Ledger: who spent how much of a dataset's budget, and a refusal before it is overspent.

Formal guarantees, for every budget in a ledger: the events granted to all runs together, less those
returned unused, never cost more than the budget's filter allows, whatever the number of programs
that ask at once; a grant is on disk before the asker hears of it; and so the releases that were
made under grants are together (ε, δ)-private for the budget's relation, even if every σ was chosen
after seeing what was released before (accounting/filters.py). Not covered: releases made without
asking, and what a person asserts when they `reclaim` a run.
"""

from __future__ import annotations

from typing import Any, Literal

from diminuendo.ledger.book.runs import Grant, Runs
from diminuendo.ledger.identity import Progress, identify, silent
from diminuendo.ledger.spending import LedgerSpending
from diminuendo.planning import Plan

__all__ = ["Grant", "Ledger"]


class Ledger(Runs):
    """A ledger at a URL: sqlite:///path, a path, or postgresql://…; created on first use.

    patience  how many seconds to wait for a busy or absent database before an error
    create    False refuses to create a ledger that does not exist yet
    readonly  change nothing, not even the schema version: for who may only read
    key       signs every record: file:/path, env:NAME or command:…; $DIMINUENDO_LEDGER_KEY
    anchors   places where heads are published as they move; $DIMINUENDO_LEDGER_ANCHORS
    """

    def pay(
        self,
        name: str,
        plan: Plan | None = None,
        *,
        data: Any = None,
        label: str = "",
        ahead: int | Literal["plan"] = "plan",
        progress: Progress = silent,
    ) -> LedgerSpending:
        """A spending that asks this budget before every step, for `fit` or `PrivateGradients`.

        Charges nothing yet: the run opens when training begins.

        plan      whose steps will be asked for, in order; without one, any steps, one by one
        data      the run's data, or the files that they came from: refused where they are not the
                  budget's. They are read only where the budget is tied to data
        ahead     with a plan: "plan" charges all of it at the start, a number that many steps at a
                  time
        progress  told how many bytes of the data have been read, and of how many
        """
        compared = data is not None and self.status(name).terms.data is not None
        identity = identify(data, progress=progress) if compared else None
        return LedgerSpending(self, name, plan, ahead=ahead, data=identity, label=label)

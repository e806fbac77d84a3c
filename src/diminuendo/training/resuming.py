"""Going on from a saved state: nobody gets a second noise for a step that may have been released.

A state says which steps were taken when it was saved. The journal, or a ledger, knows of those that
may have been released afterwards: they stay spent and are not taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from diminuendo import _validate
from diminuendo.errors import InputError, UsageError
from diminuendo.events import GaussianStep
from diminuendo.spending import Spending
from diminuendo.training.distributed import Group
from diminuendo.training.journal import Entry, Journal

_STATE = frozenset({"plan", "examples", "seed", "noise", "step", "lost", "spending", "released"})
"""What a saved state has."""


class Steps(NamedTuple):
    """How many steps are over, and how many of them were lost after the state was saved."""

    over: int
    lost: int


class Memory(NamedTuple):
    """Who knows of a run's steps: its spending and, where there is one, its journal.

    `private` is False for runs with a fixed seed, which draw the same noise again.
    """

    spending: Spending
    journal: Journal | None
    group: Group
    private: bool

    def check(self) -> None:
        """Raise where nobody knows what was released after a state was saved."""
        if self.private and self.journal is None and not self.spending.durable:
            raise UsageError(
                "Nobody knows which steps were released after this state was saved, so that going "
                "on from it could take the same step twice for the price of one. Train with "
                'PrivateGradients(..., journal="journal.json") from the start, or let a ledger pay '
                "(spending=ledger.pay(...))."
            )

    def resume(
        self,
        state: Mapping[str, Any] | None,
        planned: Callable[[int], Iterable[GaussianStep]] | None,
    ) -> Steps:
        """Open the spending, at a state or at the beginning.

        planned  the plan's steps from one on; None where a policy chooses them
        """
        spent = self.spending.steps if state is None else _spent(state)
        step = 0 if state is None else int(state["step"])
        entry = self._entry(step, planned is not None)
        seen: int | None = spent + max(entry.upto - step, 0)
        if not self.private:
            seen = spent
        elif self.journal is None:
            seen = None
        now = self.spending.resume(
            None if state is None else state["spending"],
            seen=seen,
            receipt=entry.receipt,
            events=entry.after(step) if planned is None else planned(step),
        )
        return Steps(step + now - spent, now - spent)

    def _entry(self, step: int, planned: bool) -> Entry:
        """The journal's word; where nobody else keeps count, also of the journal's copies."""
        journal = self.journal
        if journal is None:
            return Entry()
        alone = self.private and not self.spending.durable
        return self.group.agree(lambda: journal.read(saved=step, planned=planned, alone=alone))


def check_state(state: Any, mine: Mapping[str, Any]) -> None:
    """Raise unless this is a saved state, of a run that has what `mine` says."""
    missing = _STATE - set(state) if isinstance(state, Mapping) else _STATE
    if missing:
        raise InputError(
            "what private.state_dict() gave",
            name="the state",
            value=f"one without {', '.join(sorted(missing))}",
            remedy="Save it beside the model's and the optimiser's states.",
        )
    try:
        step = _validate.count("the state's step", state["step"], at_least=0)
        _validate.count("the state's lost", state["lost"], at_least=0, at_most=step)
        _spent(state), list(state["released"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            "what private.state_dict() gave", name="the state", value="spoilt"
        ) from None
    for name, own in mine.items():
        if state[name] != own:
            raise InputError(
                f"that of the run ({own})", name=f"the state's {name}", value=state[name]
            )


def _spent(state: Mapping[str, Any]) -> int:
    return sum(int(event["count"]) for event in state["spending"]["granted"])

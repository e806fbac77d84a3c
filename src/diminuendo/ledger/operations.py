"""What each operation does inside the transaction that holds the head of the chain.

Each function takes the `Change`, checks the state, stores the new one and appends the record.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diminuendo.errors import InputError, UsageError
from diminuendo.ledger import approval, process, rows
from diminuendo.ledger.capacity import (
    affordable_by_all,
    is_of_window,
    refund_of,
    refund_to_parent,
)
from diminuendo.ledger.records import Event, Record, canonical, pack
from diminuendo.ledger.state import CLOSED, OPEN, RECLAIMED, Run, Status
from diminuendo.ledger.store import Change
from diminuendo.ledger.terms import Terms


class BudgetExists(Exception):
    """There is a budget of this name already; `terms` are its own."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms


def answers(
    kind: str,
    *,
    budget: str | None = None,
    run: str | None = None,
    body: Mapping[str, Any] | None = None,
    also: Callable[[Record], bool] = lambda _: True,
) -> Callable[[Record], bool]:
    """A test whether a record is the answer to this request."""
    expected = json.loads(canonical(body or {}))

    def same(record: Record) -> bool:
        return (
            record.kind in (kind, "propose")
            and budget in (None, record.budget)
            and run in (None, record.run)
            and all(record.body[name] == value for name, value in expected.items())
            and also(record)
        )

    return same


def create(change: Change, *, terms: Terms, allow_second: bool) -> Record:
    """Create a budget. Takes the same time however many there are."""
    existing = rows.existing_budget(change.connection, terms.name)
    if existing is not None:
        raise BudgetExists(existing.terms)
    rows.refuse_second(change.connection, terms, allow_second)
    if terms.parent is not None:
        relation = rows.budget_in(change.connection, terms.parent).terms.budget.relation
        if relation != terms.budget.relation:
            raise InputError(
                f"that of the budget {terms.parent!r} ({relation})",
                name="the relation",
                value=terms.budget.relation,
            )
    guardian = approval.guardian(change.connection, terms)
    if guardian is not None:
        request = {"action": "create", "terms": terms.to_dict()}
        if proposed := approval.proposal(change, request, guardian):
            return proposed
    status = rows.add_budget(change, terms)
    body = {"terms": terms.to_dict(), "limit": str(terms.limit), "by": process.user_name(),
            "user": change.user}  # fmt: skip
    return rows.write(change, "create", status, None, body)


def open_run(change: Change, *, name: str, label: str, plan: str, data: str | None) -> Record:
    """Open a run on a budget."""
    status = rows.budget_in(change.connection, name)
    rows.refuse_other_data(status.terms, data)
    opened = {"label": label, "plan": plan, "turn": 0, **process.this_process()}
    opened |= rows.membership(change, status.terms)
    run = Run(uuid.uuid4().hex[:16], name, OPEN, 0, 0, 0, 0, opened)
    rows.add_run(change.connection, run)
    return rows.write(change, "open", status, run, opened)


def resume_run(change: Change, *, run: str, data: str | None) -> Record:
    """Make this process the owner of an open run."""
    before = rows.open_run_in(change.connection, run)
    status = rows.budget_in(change.connection, before.budget)
    rows.refuse_other_data(status.terms, data)
    if before.opened["pid"] != os.getpid() and process.is_alive(before.opened):
        raise still_alive(before)
    member = rows.membership(change, status.terms)
    owner = {**process.this_process(), "turn": before.generation + 1, **member}
    now = replace(before, opened={**before.opened, **owner})
    return rows.write(change, "resume", status, now, owner)


@dataclass(frozen=True)
class GrantRequest:
    """The arguments of `Ledger.grant`, with the price of each event.

    costs  prices for the run's budget, for the one that it is a part of, and so on
    """

    run: str
    events: list[Event]
    costs: list[list[int]]
    first: int | None
    start: bool
    partial: bool
    confirmed: int | None
    generation: int | None

    def is_answered_by(self, record: Record) -> bool:
        """Whether a record grants what is asked for here."""
        granted, asked = list(record.body["events"]), pack(self.events)
        if self.partial and granted:
            asked = asked[: len(granted)]
            asked[-1][2] = min(asked[-1][2], granted[-1][2])
        return (
            granted == asked
            and record.body["started"] is self.start
            and self.first in (None, record.body["first"])
        )


def grant(change: Change, *, request: GrantRequest) -> Record:
    """Charge events to a run's budget; raises NotEnoughLeft if they do not fit."""
    before = rows.open_run_in(change.connection, request.run, request.generation)
    if request.first not in (None, before.granted):
        raise UsageError(
            f"Run {before.id} was granted {before.granted} steps, and not the {request.first} that "
            "this request follows: an earlier request took effect late, or another process has "
            "asked for the same run. Nothing was charged by this one. Look at the run again "
            "before asking for more."
        )
    stated = rows.chain_of(change.connection, before.budget)
    status, *above = chain = [status.at(change.now) for status in stated]
    if before.granted and status.terms.window is not None and not before.opened["plan"]:
        _refuse_next_window(change, before, status)
    events, costs = affordable_by_all(chain, request.events, request.costs, request.partial)
    cost = costs[0]
    steps = sum(event.count for event in events)
    granted = before.granted + steps
    run = replace(
        before,
        granted=granted,
        started=granted if request.start else before.started,
        confirmed=rows.confirmed_of(before, request.confirmed),
        spent_units=before.spent_units + cost,
        nonce=change.token if request.start else before.nonce,
    )
    body = {
        "events": pack(events),
        "first": before.granted,
        "steps": steps,
        "cost": str(cost),
        "started": request.start,
        "confirmed": run.confirmed,
    }
    if any(budget.window for budget in chain):
        body["windows"] = [budget.window for budget in chain]
    now = replace(status, spent_units=status.spent_units + cost)
    record = rows.write(change, "grant", now, run, body)
    for parent, share in zip(above, costs[1:], strict=True):
        rows.write_share(change, parent, before.budget, before.id, share)
    return record


def _refuse_next_window(change: Change, run: Run, status: Status) -> None:
    """Steps that are chosen on the way can be claimed for one window only, the run's first."""
    last = next(rows.grants_of(change.connection, run.id))
    if last.body["windows"][0] != status.window:
        raise UsageError(
            f"Run {run.id} has no plan and began in {last.body['windows'][0]}; now it is "
            f"{status.window}. What it may claim is the limit of one {status.terms.window}, so "
            "that nothing was charged. End it and open another run."
        )


def start(
    change: Change,
    *,
    run: str,
    upto: int,
    previous: str | None,
    confirmed: int | None,
    generation: int | None,
) -> Record:
    """Allow granted steps to be released, if the last start is the one that the caller knows."""
    before = rows.open_run_in(change.connection, run, generation)
    if previous not in (None, before.nonce):
        raise UsageError(
            f"Steps of run {run} were started since this process last did so (up to step "
            f"{before.started}): an earlier request took effect late, or another process has the "
            "same run. Nothing was started. Resume the run, which goes on from there."
        )
    if not before.started <= upto <= before.granted:
        raise InputError(
            f"from {before.started} to {before.granted}, what was granted",
            name="upto",
            value=upto,
        )
    now = replace(
        before,
        started=upto,
        confirmed=rows.confirmed_of(before, confirmed),
        nonce=change.token,
    )
    status = rows.budget_in(change.connection, before.budget)
    return rows.write(change, "start", status, now, {"upto": upto, "confirmed": now.confirmed})


def close_run(
    change: Change, *, run: str, used: int, reason: str, generation: int | None
) -> Record:
    """End a run of which `used` steps were taken, as only its own process can know.

    Where giving back needs two people, steps that were started stay spent.
    """
    before = rows.open_run_in(change.connection, run, generation)
    if not process.is_this(before.opened):
        raise UsageError(
            f"Run {run} belongs to process {before.opened['pid']} on host "
            f"{before.opened['host']}, and only that one knows which steps it has taken. Nothing "
            "was given back. Resume the run, or end it with `diminuendo ledger reclaim`."
        )
    status = rows.budget_in(change.connection, before.budget)
    if not before.confirmed <= used <= before.started:
        raise InputError(
            f"from {before.confirmed} (confirmed) to {before.started} (started)",
            name="used",
            value=used,
        )
    used = before.started if status.terms.two_persons else used
    return _give_back(change, before, used, CLOSED, "close", {"reason": reason})


def reclaim(change: Change, *, run: str, by: str, unreleased: bool, dead: bool) -> Record:
    """End the run of a process that died."""
    before = rows.open_run_in(change.connection, run)
    refuse_alive(before, dead=dead)
    status = rows.budget_in(change.connection, before.budget)
    request = {"action": "reclaim", "unreleased": unreleased}
    proposed = None
    if status.terms.two_persons:
        proposed = approval.proposal(change, request, status, before)
    if proposed is not None:
        return proposed
    used = before.confirmed if unreleased else before.started
    assertion = {
        "by": by,
        "user": change.user,
        "unreleased": unreleased,
        "assumed": process.reclaim_assumption(before, unreleased),
    }
    return _give_back(change, before, used, RECLAIMED, "reclaim", assertion)


def _give_back(
    change: Change, before: Run, used: int, status: str, kind: str, details: Mapping[str, Any]
) -> Record:
    """End a run and give back the cost of its steps from number `used` on.

    What was charged in a window that is over stays charged there.
    """
    budget, *above = rows.chain_of(change.connection, before.budget)
    returned, shares = 0, [0] * len(above)
    for record in rows.grants_of(change.connection, before.id):
        if record.body["first"] + record.body["steps"] <= used:
            break
        if is_of_window(record.body, 0, budget.window):
            returned += refund_of(budget.terms, record.body, used)
        for i, parent in enumerate(above):
            if is_of_window(record.body, i + 1, parent.window):
                shares[i] += refund_to_parent(parent.terms, record.body, used)
    now = replace(
        before,
        status=status,
        started=used,
        confirmed=used if kind == "close" else before.confirmed,
        spent_units=before.spent_units - returned,
    )
    body = {"used": used, "returned": str(returned), **details}
    left = replace(budget, spent_units=budget.spent_units - returned)
    ended = rows.write(change, kind, left, now, body)
    for parent, share in zip(above, shares, strict=True):
        rows.write_share(change, parent, before.budget, before.id, -share)
    return ended


def refuse_alive(run: Run, *, dead: bool) -> None:
    """Raise UsageError unless the process that owns a run is dead.

    dead  somebody asserts it, which counts where this machine cannot tell
    """
    alive = process.is_alive(run.opened)
    if alive:
        raise still_alive(run)
    if alive is None and not dead:
        raise UsageError(
            f"This machine cannot tell whether process {run.opened['pid']} on host "
            f"{run.opened['host']}, which owns run {run.id}, is dead: it was started on another "
            "machine, before a reboot, or in another container. Nothing was given back. If you "
            "know that it is dead, say --yes-it-is-dead (dead=True)."
        )


def still_alive(run: Run) -> UsageError:
    """The error for who wants a run whose owner is alive."""
    opened = run.opened
    return UsageError(
        f"Run {run.id} belongs to process {opened['pid']} on host {opened['host']}, which is alive "
        "on this machine. Stop it first. A run that ends by itself gives back what it did not use."
    )

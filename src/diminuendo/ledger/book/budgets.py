"""Budgets: creating them, what is left of them, and what would fit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from diminuendo.accounting.filters import best_order
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import BudgetRefused
from diminuendo.events import GaussianStep
from diminuendo.ledger import approval, operations, renamed, rows
from diminuendo.ledger.book.connected import Connected
from diminuendo.ledger.capacity import noise_factor_to_fit
from diminuendo.ledger.records import Event
from diminuendo.ledger.state import Status
from diminuendo.ledger.terms import Terms
from diminuendo.planning import Plan

_TYPICAL = GaussianStep(noise_multiplier=1.0, sampling_rate=0.01)


class Budgets(Connected):
    """The part of a `Ledger` that knows budgets."""

    @renamed.arguments(beside="allow_second")
    def create(
        self,
        name: str,
        budget: Budget | tuple[float, float],
        *,
        data: str | None = None,
        unit: str = "example",
        composition: str | None = None,
        order: int | None = None,
        typical: GaussianStep | None = None,
        parent: str | None = None,
        window: str | None = None,
        members: list[str] | tuple[str, ...] = (),
        two_persons: bool = False,
        allow_second: bool = False,
        token: str | None = None,
    ) -> Status:
        """Create a budget. Repeating the call changes nothing; other terms are refused.

        composition   "gaussian" pays for full-batch steps only, exactly; "renyi" for mini-batches
                      and full batches. By default "renyi" if an order or typical steps are given
        order         the Rényi order, at least 2; by default the best one for steps like `typical`
        parent        the budget that this one is a part of: an extract of the same people's data,
                      a team's or a year's share. Charges here count there too
        window        "day", "week", "month", "quarter" or "year": (ε, δ) for what is charged in
                      each of them, by the calendar in UTC. None: (ε, δ) once and for all
        members       who may open runs here (a quota for a team or a user): users of the database,
                      roles that they belong to, or users of the system. Nobody named: everybody
        two_persons   reclaiming a run, a second budget for the same data, a part of this budget,
                      and an import need two people: the first call is recorded as a proposal, the
                      same call by another person acts
        allow_second  allow a second budget for the same data: the two add up to more than either
        """
        budget = as_budget(budget)
        if composition is None:
            composition = "gaussian" if order is None and typical is None else "renyi"
        if composition == "renyi" and order is None:
            order = best_order(budget, typical or _TYPICAL)
        terms = Terms(
            name=name,
            budget=budget,
            data=data,
            unit=unit,
            composition=composition,
            order=order,
            parent=parent,
            window=window,
            members=members,
            two_persons=two_persons,
        )
        work = functools.partial(operations.create, terms=terms, allow_second=allow_second)
        same = operations.answers("create", budget=name, body={"terms": terms.to_dict()})
        try:
            record = self._change(work, token=token, same=same)
        except operations.BudgetExists as error:
            rows.require_same_terms(error.terms, terms)
        else:
            approval.raise_proposed(record)
        return self.status(name)

    def budgets(self) -> list[Status]:
        """Every budget with what is spent of it, by name."""
        return self._store.read(lambda c: rows.current(c, rows.all_budgets(c)))

    def status(self, name: str) -> Status:
        """A budget and what is spent of it; with windows, in the window that it is now."""
        return self._store.read(lambda c: rows.current(c, [rows.budget_in(c, name)])[0])

    def _chain(self, name: str) -> list[Status]:
        """A budget, the one that it is a part of, and so on, as they are now."""
        return self._store.read(lambda c: rows.current(c, rows.chain_of(c, name)))

    def remaining(self, name: str) -> Budget:
        """What is left, as a budget to plan with. For subsampled plans see `scaled_to_fit`."""
        chain = self._chain(name)
        lefts = [status.left for status in chain]
        for status, left in zip(chain, lefts, strict=True):
            if left is None:
                raise BudgetRefused(f"Nothing is left of the budget {status.terms.name!r}.")
        same = [left for left in lefts if left and left.delta == chain[0].terms.budget.delta]
        return min(same, key=lambda left: left.epsilon)

    def fits(self, name: str, events: Sequence[Event]) -> bool:
        """Whether a grant of these events would be given now."""
        chain = self._chain(name)
        return all(
            status.spent_units + sum(status.terms.costs(events)) <= status.terms.limit
            for status in chain
        )

    def scaled_to_fit(self, name: str, plan: Plan) -> Plan:
        """The plan if it fits; otherwise the plan with every σ scaled up until it fits."""
        chain = self._chain(name)
        factor = max(noise_factor_to_fit(status, plan.events) for status in chain)
        return plan if factor == 1 else plan.with_noise_scaled(factor)

    def fitting(self, name: str, plan: Plan) -> Plan:
        """Deprecated name of `scaled_to_fit`."""
        renamed.warn("Ledger.fitting", "Ledger.scaled_to_fit")
        return self.scaled_to_fit(name, plan)

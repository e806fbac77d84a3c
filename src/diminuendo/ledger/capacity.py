"""What fits into a budget: how much can be granted, what noise would fit, what is given back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from diminuendo.errors import BudgetRefused
from diminuendo.events import GaussianStep
from diminuendo.ledger.records import Event, unpack
from diminuendo.ledger.state import Status
from diminuendo.ledger.terms import Terms

_MANY = 1000
"""With more events than this, a refusal does not compute the noise that would fit."""


class NotEnoughLeft(Exception):
    """Less is left of a budget than was asked for."""

    def __init__(self, status: Status, cost: int) -> None:
        self.status, self.cost = status, cost


def affordable(
    status: Status, asked: list[Event], costs: list[int], partial: bool
) -> tuple[list[Event], int]:
    """The events that can be granted and their cost; raises NotEnoughLeft if they are too few."""
    left = status.terms.limit - status.spent_units
    if sum(costs) <= left:
        return asked, sum(costs)
    if not partial:
        raise NotEnoughLeft(status, sum(costs))
    granted, spent = [], 0
    for event, cost in zip(asked, costs, strict=True):
        count = min(event.count, (left - spent) // (cost // event.count))
        if count > 0:
            granted.append(replace(event, count=count))
            spent += count * (cost // event.count)
        if count < event.count:
            break
    if not granted:
        raise NotEnoughLeft(status, sum(costs))
    return granted, spent


def affordable_by_all(
    chain: Sequence[Status], asked: list[Event], prices: Sequence[list[int]], partial: bool
) -> tuple[list[Event], list[int]]:
    """What a budget and all that it is a part of can grant, and the cost to each of them."""
    answers = [
        affordable(status, asked, costs, partial)
        for status, costs in zip(chain, prices, strict=True)
    ]
    least = min((granted for granted, _ in answers), key=_steps)
    if all(_steps(granted) == _steps(least) for granted, _ in answers):
        return least, [cost for _, cost in answers]
    return least, [sum(status.terms.costs(least)) for status in chain]


def _steps(events: Sequence[Event]) -> int:
    return sum(event.count for event in events)


def refusal(status: Status, asked: Sequence[Event], cost: int) -> str:
    """The message of a refusal: what is left, what was asked for, and what would fit."""
    name, left = status.terms.name, status.left
    share = float(min(Fraction(cost, status.terms.limit), Fraction(10) ** 300))
    epsilon = 0.0 if left is None else left.epsilon
    steps = sum(event.count for event in asked)
    period = "" if status.terms.window is None else f" of {status.window}"
    words = (
        f"The budget {name!r} has {max(1 - status.spent, 0):.3%}{period} left "
        f"(ε = {math.floor(epsilon * 1e4) / 1e4:g} at δ = {status.terms.budget.delta:g}); "
        f"{steps} {'step was' if steps == 1 else 'steps were'} asked for, which "
        f"{'costs' if steps == 1 else 'cost'} {_share(share)}."
    )
    if not all(isinstance(event, GaussianStep) for event in asked):
        return words
    if len(asked) > _MANY:
        return f"{words} Ledger.scaled_to_fit finds noise with which they fit."
    try:
        factor = noise_factor_to_fit(status, asked)
    except BudgetRefused:
        return f"{words} Too little is left for any plan."
    words += f" The same steps with every σ × {math.ceil(factor * 1e3) / 1e3:g} would fit"
    if status.terms.order is not None:
        return f"{words} (Ledger.scaled_to_fit)."
    return (
        f"{words} (Ledger.scaled_to_fit); or plan with what is left (Ledger.remaining, or "
        f"diminuendo plan --epsilon {math.floor(epsilon * 1e4) / 1e4:g})."
    )


def _share(share: float) -> str:
    return f"{share:.3%} of it" if share < 1e4 else f"{share:.3g} times the whole of it"


def noise_factor_to_fit(status: Status, events: Sequence[Event]) -> float:
    """The smallest factor on every σ (within 1e-9) with which the events fit; 1 if they do."""
    terms, left = status.terms, status.terms.limit - status.spent_units

    def fits(factor: float) -> bool:
        scaled = [
            replace(e, noise_multiplier=e.noise_multiplier * factor)
            for e in events
            if isinstance(e, GaussianStep)
        ]
        return sum(terms.costs(scaled)) <= left

    if fits(1.0):
        return 1.0
    if left <= 0:
        raise BudgetRefused(f"Nothing is left of the budget {terms.name!r}.")
    low, high = 1.0, 2.0
    while not fits(high):
        low, high = high, high * 2
        if high > 1e12:
            raise BudgetRefused(f"Too little is left of the budget {terms.name!r} for any plan.")
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def is_of_window(grant: Mapping[str, Any], level: int, window: str) -> bool:
    """Whether a grant was charged in this window.

    level  0 for the run's own budget, 1 for the one that it is a part of, and so on
    """
    return "windows" not in grant or grant["windows"][level] == window


def refund_to_parent(terms: Terms, grant: Mapping[str, Any], used: int) -> int:
    """What a budget gets back of a grant to one of its parts, at its own prices."""
    price = terms.refund(sum(terms.costs(unpack(grant["events"]))))
    return refund_of(terms, {**grant, "cost": price}, used)


def refund_of(terms: Terms, grant: Mapping[str, Any], used: int) -> int:
    """How much of a grant's cost is given back if the run took its first `used` steps only."""
    first, cost = int(grant["first"]), int(grant["cost"])
    if used <= first:
        return cost
    unused, at = [], first
    for event in unpack(grant["events"]):
        over = min(at + event.count - used, event.count)
        if over > 0:
            unused.append(replace(event, count=over))
        at += event.count
    return min(terms.refund(sum(terms.costs(unused))), cost) if unused else 0

"""What there is room for: what can be granted, what would fit, what goes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from diminuendo.errors import BudgetRefused
from diminuendo.events import GaussianStep
from diminuendo.ledger.records import unpack
from diminuendo.ledger.rows import Status
from diminuendo.ledger.terms import Terms

_MANY = 1000
"""Events beyond which a refusal does not work out the noise that would fit."""


class NoRoom(Exception):
    """There is less than was asked for."""

    def __init__(self, status: Status) -> None:
        self.status = status


def affordable(
    status: Status, asked: list[GaussianStep], costs: list[int], most: bool
) -> tuple[list[GaussianStep], int]:
    """What can be granted and its cost; NoRoom where that is not enough."""
    room = status.terms.limit - status.spent_units
    if sum(costs) <= room:
        return asked, sum(costs)
    if not most:
        raise NoRoom(status)
    given, spent = [], 0
    for event, cost in zip(asked, costs, strict=True):
        count = min(event.count, (room - spent) // (cost // event.count))
        if count > 0:
            given.append(replace(event, count=count))
            spent += count * (cost // event.count)
        if count < event.count:
            break
    if not given:
        raise NoRoom(status)
    return given, spent


def refusal(status: Status, asked: Sequence[GaussianStep], cost: int) -> str:
    """What is left, what was asked for, and what would fit."""
    name, left = status.terms.name, status.left
    share = float(min(Fraction(cost, status.terms.limit), Fraction(10) ** 300))
    epsilon = 0.0 if left is None else left.epsilon
    steps = sum(event.count for event in asked)
    words = (
        f"The budget {name!r} has {max(1 - status.spent, 0):.3%} left "
        f"(ε = {math.floor(epsilon * 1e4) / 1e4:g} at δ = {status.terms.budget.delta:g}); "
        f"asked for were {steps} steps, which cost {_share(share)}."
    )
    if len(asked) > _MANY:
        return f"{words} Ledger.fitting finds the noise with which they fit."
    try:
        factor = louder_by(status, asked)
    except BudgetRefused:
        return f"{words} Nothing is left to plan with."
    words += f" The same steps with every σ × {math.ceil(factor * 1e3) / 1e3:g} would fit"
    if status.terms.order is not None:
        return f"{words} (Ledger.fitting)."
    return (
        f"{words} (Ledger.fitting); or plan with what is left (Ledger.remaining, or diminuendo "
        f"plan --epsilon {math.floor(epsilon * 1e4) / 1e4:g})."
    )


def _share(share: float) -> str:
    return f"{share:.3%} of it" if share < 1e4 else f"{share:.3g} times the whole of it"


def louder_by(status: Status, events: Sequence[GaussianStep]) -> float:
    """The least factor on every σ (to 1e-9) with which the events fit; 1 where they fit as is."""
    terms, room = status.terms, status.terms.limit - status.spent_units

    def fits(factor: float) -> bool:
        louder = [replace(e, noise_multiplier=e.noise_multiplier * factor) for e in events]
        return sum(terms.costs(louder)) <= room

    if fits(1.0):
        return 1.0
    if room <= 0:
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


def refund_of(terms: Terms, grant: Mapping[str, Any], used: int) -> int:
    """What of a grant's cost goes back when the run's steps from `used` on were not taken."""
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

"""The terms of a budget. They never change: the records would then mean something else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from diminuendo import _validate
from diminuendo.accounting import renyi
from diminuendo.accounting.filters import UNIT, GaussianFilter, RenyiFilter
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import windows
from diminuendo.ledger.mechanisms import Mechanism

COMPOSITIONS = ("gaussian", "renyi")
_LONGEST_NAME = 200
_ODOMETER_ORDERS = 8
_LATER: dict[str, Any] = {"parent": None, "two_persons": False, "window": None, "members": ()}
"""Terms that version 1 did not have, and what they are where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A name, whose data, what is protected, (ε, δ), and how steps add up.

    composition  "gaussian": full-batch steps, exact. "renyi": full-batch and Poisson-subsampled
                 steps, at one Rényi order that is fixed here.
    data         the identity of the data (`identify`), or None if it was not given
    unit         what one row of the data is: an example, a patient, a household
    two_persons  whether giving back what a dead run held, a second budget for the same data, a part
                 of this budget and an import need two people
    parent       the budget that this one is a part of: whatever is charged here is charged there
                 too, so that all its parts together stay within it
    window       None: (ε, δ) for everything that is ever charged. "day", "week", "month", "quarter"
                 or "year": (ε, δ) for what is charged in each of them, by the calendar in UTC; the
                 limit is whole again when the next one begins, and more than one of them together
                 have a larger ε (`claim_over`)
    members      who may open runs here: users of the database (or roles that they belong to), or
                 of the system where the database has none. Nobody named: everybody
    """

    name: str
    budget: Budget
    data: str | None = None
    unit: str = "example"
    composition: str = "gaussian"
    order: int | None = None
    parent: str | None = None
    two_persons: bool = False
    window: str | None = None
    members: list[str] | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        text("name", self.name)
        if self.parent is not None and text("parent", self.parent) == self.name:
            raise InputError("another budget", name="parent", value=self.parent)
        text("unit", self.unit)
        _validate.choice("composition", self.composition, COMPOSITIONS)
        if not isinstance(self.members, (tuple, list)):
            raise InputError("a list of names", name="members", value=self.members)
        members = tuple(sorted({text("a member", member) for member in self.members}))
        object.__setattr__(self, "members", members)
        if self.window is not None:
            _validate.choice("window", self.window, windows.WINDOWS)
        if self.data is not None:
            _identity(self.data)
        if not isinstance(self.two_persons, bool):
            raise InputError("True or False", name="two_persons", value=self.two_persons)
        if (self.order is None) != (self.composition == "gaussian"):
            raise InputError(
                "given with the Rényi composition, and only there",
                name="order",
                value=self.order,
            )
        self.filter  # noqa: B018  an order that leaves nothing to spend is refused here

    @cached_property
    def filter(self) -> GaussianFilter | RenyiFilter:
        """The prices of steps and the limit; what is spent is kept in the ledger."""
        if self.order is None:
            return GaussianFilter(self.budget)
        return RenyiFilter(self.budget, order=self.order)

    @property
    def limit(self) -> int:
        """The most that can be spent, in units of 2⁻²⁰⁰."""
        return self.filter.limit

    def costs(self, events: Sequence[GaussianStep | Mechanism]) -> list[int]:
        """The price of each event (of all its `count` steps), in units of 2⁻²⁰⁰, rounded up."""
        steps = [event for event in events if isinstance(event, GaussianStep)]
        prices = iter(self.filter.costs(steps) if steps else [])
        return [
            next(prices) if isinstance(event, GaussianStep) else event.cost(self.order)
            for event in events
        ]

    def refund(self, cost: int) -> int:
        """How much is given back for unused steps that cost this much.

        Gaussian prices are exact. A Rényi price is a float, and another machine's may differ in
        its last digits, so that a billionth of it is kept.
        """
        return cost if self.order is None else cost - (cost >> 30)

    def left(self, spent: int) -> Budget | None:
        """What is left, as a budget with the same δ; None if that is less than any ε > 0.

        Gaussian: exactly what a plan may use. Rényi: the guarantee of steps whose divergence
        at the order fits; `Ledger.scaled_to_fit` makes a plan's noise fit.
        """
        if spent == 0:
            return self.budget
        left = Fraction(max(self.limit - spent, 0), UNIT)
        try:
            if self.order is None:
                return self._gaussian_left(left)
            return self._renyi_left(left, self.order)
        except InputError:
            return None

    def _gaussian_left(self, left: Fraction) -> Budget:
        """The largest budget whose μ², computed from its ε, is not more than `left`."""
        kept = 1.0
        while True:
            mu = math.sqrt(left) * (1 - 1e-12) * kept
            epsilon = self.budget.epsilon_of((mu / self.budget.sensitivity) ** 2)
            budget = self._of(epsilon)
            if Fraction(budget.mu * (1 + 1e-12)) ** 2 <= left:
                return budget
            kept -= max(2 * (1 - kept), 1e-10)

    def _renyi_left(self, left: Fraction, order: int) -> Budget:
        offset = renyi.offset(order, self.budget.delta)
        return self._of((float(left) + offset) * (1 - 1e-12) if left else 0.0)

    def _of(self, epsilon: float) -> Budget:
        return replace(self.budget, epsilon=epsilon)

    def epsilon_spent(self, spent: int) -> float:
        """ε of what was charged, at the budget's δ, as if the amount had been fixed in advance.

        This is *not* a certified claim about a run that stopped, or was looked at, because of what
        it had released: with such a rule the privacy loss exceeds it far more often than δ allows.
        Certified are the limit (the budget's ε, whatever rule was followed) and `odometer`.
        Within the limit it is at most the budget's ε.
        """
        return self.filter.claim(spent)

    def claim_over(self, count: int) -> float:
        """The certified ε of everything charged in `count` windows, at the budget's δ.

        Formal guarantee: the charges in `count` windows that were fixed in advance (by the
        calendar, not by what was released) never exceed `count` times the limit, so that a filter
        of that limit would have granted all of them. Without windows there is one, for ever.
        """
        if self.window is None or count <= 1:
            return self.budget.epsilon
        return self.filter.claim(count * self.limit)

    def odometer(self, spent: int) -> float:
        """ε that holds at every moment at once, also at one chosen by what was released before.

        Formal guarantee: with probability 1 − δ, the privacy loss never exceeds this value at any
        step, whatever rule picks the steps and the moment to stop. For λ > 0 and charges with Rényi
        divergence D at order 1 + λ, exp(λ (loss − D)) is a supermartingale that starts at 1, and so
        (Ville's inequality) loss < D + ln(1/δ)/λ at all times with probability 1 − δ. The orders
        are fixed by the terms: the budget's own, or for "gaussian" eight that share δ. Compare
        Rogers and others (2016) and Whitehouse and others (2023). It is larger than
        `epsilon_spent`, and near the limit larger than the budget's ε, which is then the better
        claim: who shows it leaves it out there (`Status.odometer`).
        """
        if spent <= 0:
            return 0.0
        charged, delta = float(Fraction(spent, UNIT)) * (1 + 1e-12), self.budget.delta
        if self.order is not None:
            return (charged - math.log(delta) / (self.order - 1)) * (1 + 1e-12)
        whole, each = float(Fraction(self.limit, UNIT)), math.log(_ODOMETER_ORDERS / delta)
        powers = [math.sqrt(2 * each / whole) * 2.0**j for j in range(_ODOMETER_ORDERS)]
        return min((1 + power) / 2 * charged + each / power for power in powers) * (1 + 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """The terms as JSON values; what version 1 did not have only if it is used."""
        values = asdict(self)
        return {
            name: list(value) if name == "members" else value
            for name, value in values.items()
            if name not in _LATER or value != _LATER[name]
        }

    @classmethod
    def from_dict(cls, data: Any) -> Terms:
        """The terms that `to_dict` wrote, checked."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or {*data, *_LATER} != names:
            raise InputError("an object with a budget's terms", name="terms", value=data)
        try:
            return cls(**{**data, "budget": Budget(**data["budget"])})
        except TypeError:
            raise InputError("of the right types", name="terms", value=data) from None


def text(name: str, value: Any, *, empty: bool = False) -> str:
    """Check that a value is one line of printable text, and return it."""
    good = (
        isinstance(value, str)
        and (empty or value.strip() != "")
        and len(value) <= _LONGEST_NAME
        and value.isprintable()
    )
    if not good:
        raise InputError(
            f"a line of at most {_LONGEST_NAME} printable characters", name=name, value=value
        )
    return str(value)


def _identity(value: Any) -> None:
    digits = str(value).removeprefix("sha256:")
    if (
        not isinstance(value, str)
        or not value.startswith("sha256:")
        or len(digits) != 64
        or set(digits) - set("0123456789abcdef")
    ):
        raise InputError(
            "sha256: and 64 hexadecimal digits",
            name="data",
            value=value,
            remedy="`diminuendo ledger identify FILE` prints it.",
        )

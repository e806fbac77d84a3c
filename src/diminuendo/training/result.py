"""How a run ended and what it spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import Spending
from diminuendo.training.mechanism import NoiseName

Status = Literal["done", "refused", "interrupted"]


@dataclass(frozen=True)
class Result:
    """How a run ended and what it spent.

    Holds nothing that was not paid for, except for `training_loss` where it was asked to be
    revealed: the last batch's mean loss. `lost` steps were spent by a crash and not taken. With
    `noise` "fast" the claim is for real arithmetic only: released are rounded numbers. With exact
    noise `delta_added` comes on top of δ: the probability that a rounding error goes unnoticed.
    `unit` is what the claim protects: an example, or with groups a person.
    """

    status: Status
    reason: str
    steps: int
    events: tuple[GaussianStep, ...]
    epsilon: float
    delta: float
    relation: str
    private: bool
    lost: int = 0
    revealed: bool = False
    training_loss: float | None = None
    noise: NoiseName = "exact"
    delta_added: float = 0.0
    unit: str = "example"
    ledger: dict[str, Any] = field(default_factory=dict)
    """Where the spending is on record: ledger, budget, run and chain head."""


def steps_in_words(number: int) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} step{'' if number == 1 else 's'}"


class Spent(Protocol):
    """What a result tells of a run: `PrivateGradients` has it, and so have some adapters."""

    plan: Plan
    spending: Spending
    step: int
    lost: int
    noise: NoiseName
    unit: str

    @property
    def private(self) -> bool:
        """False where a fixed seed makes the noise predictable."""

    @property
    def delta_missed(self) -> float:
        """What is to be added to δ for rounding errors."""


def result_of(
    run: Spent,
    status: Status,
    reason: str,
    *,
    revealed: bool = False,
    training_loss: float | None = None,
) -> Result:
    """The result of a run that ended so, for the reason that is completed by lost steps."""
    if run.lost:
        taken = run.step - run.lost
        if status == "done":
            reason = f"{steps_in_words(taken)} of the plan's {run.plan.steps} were taken"
        reason += (
            f"; {steps_in_words(run.lost)} were lost when the run broke off: spent, and not taken"
        )
    spending = run.spending
    return Result(
        status,
        reason,
        run.step,
        spending.granted,
        spending.epsilon(),
        spending.budget.delta,
        spending.budget.relation,
        run.private,
        run.lost,
        revealed,
        training_loss,
        run.noise,
        run.delta_missed,
        run.unit,
    )

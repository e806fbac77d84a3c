"""What an experiment tracker is told of a run: σ_t, ε so far and the learning rate, nothing unpaid.

A `Logger` is anything with the three methods below; `diminuendo.adapters.tensorboard` and
`diminuendo.adapters.mlflow` have two. Facts and values are fixed by the plan, or were paid for; a
training loss is among them only where it was asked to be revealed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import torch

    from diminuendo.training.result import Result
    from diminuendo.training.step import PrivateGradients

Fact = str | int | float | bool
"""What a tracker keeps once for a run."""


@runtime_checkable
class Logger(Protocol):
    """Where a run's public numbers go."""

    def begin(self, facts: Mapping[str, Fact]) -> None:
        """A run begins; nothing has been spent yet. Raise here if the tracker cannot be reached."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """So many steps are over (1, 2, …), the last one with these values."""

    def end(self, facts: Mapping[str, Fact]) -> None:
        """The run is over: `status` is "done", "refused", "interrupted", or an error's name."""


def facts_of(private: PrivateGradients) -> dict[str, Fact]:
    """The plan of a run in a tracker's words."""
    plan, budget = private.plan, private.spending.budget
    rates = plan.sampling_rate
    return {
        "plan": plan.digest,
        "planned_epsilon": plan.epsilon,
        "budget_epsilon": budget.epsilon,
        "delta": budget.delta,
        "relation": budget.relation,
        "steps": plan.steps,
        "schedule": plan.schedule,
        "clip": plan.clip,
        "examples": plan.examples,
        "sampling_rate": rates if isinstance(rates, float) else "one for each step",
        "noise": private.noise,
        "private": private.private,
    }


class Tracking:
    """A run as its logger sees it; without a logger, and on other ranks, nothing happens.

    As a context it begins before anything is spent: what the logger raises there ends the run.
    Where an error ends the context, the logger is told. A logger that fails while the run goes on
    does not end it, since its steps are paid for: it is warned about, and told no more.
    """

    def __init__(
        self,
        logger: Logger | None,
        private: PrivateGradients,
        epsilon: Callable[[], float | None],
    ) -> None:
        self._logger = logger if private.group.first else None
        self._private, self.epsilon = private, epsilon

    def __enter__(self) -> Self:
        if self._logger is not None:
            self._logger.begin(facts_of(self._private))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.end(error)

    def rate_of(self, optimizer: torch.optim.Optimizer) -> float | None:
        """The learning rate, read only if somebody wants to know: it may be in a GPU's memory."""
        return None if self._logger is None else float(optimizer.param_groups[0]["lr"])

    def step(self, learning_rate: float | None, loss: float | None) -> None:
        """A step is over, with what `rate_of` gave; `loss` only where it is to be revealed."""
        if self._logger is None or learning_rate is None:
            return
        values = {"noise_multiplier": self._sigma(), "learning_rate": learning_rate}
        epsilon = self.epsilon()
        if epsilon is not None:
            values["epsilon"] = epsilon
        if loss is not None:
            values["training_loss_not_private"] = loss
        logger = self._logger
        self._or_go_on(lambda: logger.step(self._private.step, values))

    def _sigma(self) -> float:
        private = self._private
        if private.policy is None:
            return float(private.plan.sigmas[private.step - 1])
        return private.spending.granted[-1].noise_multiplier

    def end(self, result: Result | BaseException) -> None:
        """The run is over, with a result or by an error."""
        if self._logger is None:
            return
        facts: dict[str, Fact]
        if isinstance(result, BaseException):
            facts = {"status": type(result).__name__, "steps": self._private.step}
        else:
            facts = {
                "status": result.status,
                "reason": result.reason,
                "steps": result.steps,
                "lost": result.lost,
                "epsilon": result.epsilon,
                "delta": result.delta + result.delta_added,
                "unit": result.unit,
                **{f"ledger_{name}": str(value) for name, value in result.ledger.items()},
            }
        logger = self._logger
        self._or_go_on(lambda: logger.end(facts))

    def _or_go_on(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:
            self._logger = None
            warnings.warn(
                f"The logger failed ({type(error).__name__}: {error}) and is told no more. The run "
                "goes on: its steps are paid for.",
                stacklevel=4,
            )

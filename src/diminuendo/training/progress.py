"""What a person sees while a run goes on: steps, ε so far, time left. A loss only on request."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diminuendo import _progress, _validate
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.training.step import PrivateGradients
from diminuendo.training.tracking import Logger

_SECONDS = 1.0
_FINEST = 200

Advance = Callable[[float | None], None]
AfterStep = Callable[[int, PrivateGradients], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What `fit` takes for `progress` where yes or no does not say enough.

    shown       whether a bar is shown, on stderr
    after_step  called after each step with the number of steps taken, and the `PrivateGradients`
    logger      where σ_t, ε so far and the learning rate go: an experiment tracker
    reveal_training_loss
                shows the mean loss of each batch in the bar, and the last one's in the result; the
                privacy claim does not cover it
    """

    shown: bool = True
    after_step: AfterStep | None = None
    logger: Logger | None = None
    reveal_training_loss: bool = False

    def __post_init__(self) -> None:
        _validate.flag("shown", self.shown)
        _validate.flag("reveal_training_loss", self.reveal_training_loss)
        if self.after_step is not None and not callable(self.after_step):
            raise InputError(
                "a function of the step and the PrivateGradients",
                name="after_step",
                value=self.after_step,
            )
        if self.logger is not None and not isinstance(self.logger, Logger):
            raise InputError(
                "something with the methods begin, step and end",
                name="logger",
                value=self.logger,
                remedy="TensorBoardLogger(folder), say.",
            )

    @classmethod
    def of(cls, progress: Progress | bool) -> Progress:
        """A `Progress` as it is; yes or no as one."""
        if isinstance(progress, Progress):
            return progress
        return cls(shown=_validate.flag("progress", progress))


class EpsilonSoFar:
    """ε by step, certified: exact at some steps, at the others that of the next such step.

    The accountant is asked about halves, quarters and so on of the run, before it begins, for as
    long as `seconds` last; never while it goes on.
    """

    def __init__(self, plan: Plan, seconds: float = _SECONDS) -> None:
        known = {plan.steps: plan.epsilon}
        end, parts = time.monotonic() + seconds, 2
        while parts <= min(_FINEST, 2 * plan.steps) and time.monotonic() < end:
            for k in range(1, parts, 2):
                step = plan.steps * k // parts
                if step and step not in known and time.monotonic() < end:
                    known[step] = plan.epsilon_after(step)
            parts *= 2
        self._steps = sorted(known)
        self._values = [known[step] for step in self._steps]

    def __call__(self, step: int) -> float:
        return self._values[bisect_left(self._steps, step)] if step else 0.0


RunningEpsilon = Callable[[], float | None]
"""ε so far; None where a run is not private."""


@contextmanager
def bar(shown: bool, private: PrivateGradients, epsilon: RunningEpsilon) -> Iterator[Advance]:
    """A bar on the first rank; what it yields is called after each step, with a loss or None."""
    if not (shown and private.group.first):
        yield lambda loss: None  # noqa: ARG005
        return
    total = private.plan.steps
    with _progress.bar("training", total=total) as progress:

        def show(revealed: str = "") -> None:
            said = _said(epsilon())
            progress.update(private.step, note=f"{private.step}/{total} {said}{revealed}")

        show()
        yield lambda loss: show("" if loss is None else f", loss {loss:.4g} (not private)")


def running_epsilon(private: PrivateGradients) -> RunningEpsilon:
    """ε by the plan or by the filter, after the steps that are over when it is asked for.

    The accountant works at the first call alone.
    """
    known: list[EpsilonSoFar] = []

    def so_far() -> float | None:
        if not private.private:
            return None
        if private.policy is not None:
            return private.spending.epsilon()
        if not known:
            known.append(EpsilonSoFar(private.plan))
        return known[0](private.step)

    return so_far


def _said(epsilon: float | None) -> str:
    """Three decimals, never below the value."""
    if epsilon is None:
        return "not private"
    return f"ε ≤ {math.ceil(epsilon * 1000) / 1000:.12g}" if epsilon else "nothing spent"


@contextmanager
def reading(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """How much of the data has been read for its identity."""
    with _progress.bar("reading the data", shown=shown) as progress:
        yield lambda done, total: progress.update(done, total=total)

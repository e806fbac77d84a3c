"""What a person sees while a run goes on: steps, ε so far, time left. A loss only on request."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diminuendo import _progress
from diminuendo.planning import Plan
from diminuendo.training.step import PrivateGradients

_SECONDS = 1.0
_FINEST = 200

Advance = Callable[[float | None], None]
AfterStep = Callable[[int, PrivateGradients], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What `fit` takes for `progress` where yes or no does not say enough.

    shown       whether a bar is shown, on stderr
    after_step  called after each step with the number of steps taken, and the `PrivateGradients`
    reveal_training_loss
                shows the mean loss of each batch in the bar, and the last one's in the result; the
                privacy claim does not cover it
    """

    shown: bool = True
    after_step: AfterStep | None = None
    reveal_training_loss: bool = False

    @classmethod
    def of(cls, progress: Progress | bool) -> Progress:
        """A `Progress` as it is; yes or no as one."""
        return progress if isinstance(progress, Progress) else cls(shown=bool(progress))


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


@contextmanager
def bar(shown: bool, private: PrivateGradients) -> Iterator[Advance]:
    """A bar on the first rank; what it yields is called after each step, with a loss or None."""
    if not (shown and private.group.first):
        yield lambda loss: None  # noqa: ARG005
        return
    words, total = _words(private), private.plan.steps
    with _progress.bar("training", total=total) as progress:

        def show(revealed: str = "") -> None:
            progress.update(private.step, note=f"{private.step}/{total} {words()}{revealed}")

        show()
        yield lambda loss: show("" if loss is None else f", loss {loss:.4g} (not private)")


def _words(private: PrivateGradients) -> Callable[[], str]:
    if not private.private:
        return lambda: "not private"
    if private.policy is not None:
        return lambda: _said(private.spending.epsilon())
    so_far = EpsilonSoFar(private.plan)
    return lambda: _said(so_far(private.step))


def _said(epsilon: float) -> str:
    """Three decimals, never below the value."""
    return f"ε ≤ {math.ceil(epsilon * 1000) / 1000:.12g}" if epsilon else "nothing spent"


@contextmanager
def reading(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """How much of the data has been read for its identity."""
    with _progress.bar("reading the data", shown=shown) as progress:
        yield lambda done, total: progress.update(done, total=total)

"""Steps without a plan: what `make_private` promises is a noise multiplier, not a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from diminuendo import accounting
from diminuendo.budget import Budget, check_delta
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import Spending
from diminuendo.training.step import PrivateGradients

_DELTA = 1e-9
"""δ of a nominal plan. No claim is made at it: `get_epsilon` is asked with one of its own."""


def nominal_plan(*, sigma: float, rate: float, clip: float, examples: int) -> Plan:
    """One step of a run whose length is not known: what every step of it shares."""
    step = GaussianStep(noise_multiplier=sigma, sampling_rate=rate)
    known = Budget(epsilon=1.0, delta=_DELTA)
    epsilon = max(accounting.claim([step], known), 1e-12)
    return Plan(
        budget=Budget(epsilon=epsilon, delta=_DELTA),
        steps=1,
        sigmas=np.array([step.noise_multiplier]),
        sampling_rate=rate,
        clip=clip,
        examples=examples,
        parameters=None,
        schedule="uniform",
        momentum=None,
        alpha=1.0,
        epsilon=epsilon,
        erub=1.0,
        erub_uniform=1.0,
        uniform_steps=1,
        noise_ratio=1.0,
        assumptions=("One step of a run whose length is not planned.",),
    )


class Metered(Spending):
    """Counts every step and refuses none: nobody stated how much may be spent.

    Steps are charged before they are released, as everywhere. What they cost is a claim for steps
    that were fixed in advance, in number and noise.
    """

    adaptive = True

    def fits(self, event: GaussianStep) -> bool:
        """Always."""
        del event
        return True

    def epsilon(self) -> float:
        """The certified ε of what was granted, at the budget's δ."""
        return accounting.claim(self.granted, self.budget)

    def _charge(self, event: GaussianStep) -> None:
        del event


class Accountant:
    """What all runs of a `PrivacyEngine` were charged, under the names of Opacus' accountants."""

    def __init__(self) -> None:
        self._before: list[GaussianStep] = []
        self._added_before = 0.0
        self._runs: list[PrivateGradients] = []

    def watch(self, run: PrivateGradients) -> None:
        """Count this run's steps from now on."""
        self._runs.append(run)

    @property
    def events(self) -> tuple[GaussianStep, ...]:
        """Everything that was charged, in order; steps that may have been released included."""
        granted = (event for run in self._runs for event in run.spending.granted)
        return (*self._before, *granted)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sampling rate, steps) of everything that was charged."""
        return [(e.noise_multiplier, e.sampling_rate, e.count) for e in self.events]

    def __len__(self) -> int:
        return sum(event.count for event in self.events)

    @classmethod
    def mechanism(cls) -> str:
        """The name of this way to account."""
        return "diminuendo"

    @property
    def delta_added(self) -> float:
        """The probability that some sum of all runs passes for more exact than it is, ≥ 0."""
        runs = [run for run in self._runs if run.charged]
        return self._added_before + sum(run.delta_added for run in runs)

    def get_epsilon(self, delta: float) -> float:
        """A certified upper bound on ε at δ for everything that was charged, ≥ 0.

        What rounding may hide (`delta_added`) is taken from δ first. The claim is for add-remove
        neighbours, and for steps that were fixed in advance: who chooses by what was released when
        to stop, or how much noise comes next, needs a budget (`ledger=`) or a plan.
        """
        delta = check_delta(delta)
        if not self.events:
            return 0.0
        left = delta - self.delta_added
        if left <= 0:
            raise InputError(
                f"above {self.delta_added:.2g}, which rounding may take", name="delta", value=delta
            )
        return accounting.claim(self.events, Budget(epsilon=1.0, delta=left))

    def state_dict(self) -> OrderedDict[str, Any]:
        """The history as plain values."""
        state: OrderedDict[str, Any] = OrderedDict()
        state["history"] = self.history
        state["mechanism"] = self.mechanism()
        state["delta_added"] = self.delta_added
        return state

    def before(self, run: PrivateGradients) -> dict[str, Any]:
        """The state without what this run was charged."""
        others = Accountant()
        others._before, others._added_before = self._before, self._added_before
        others._runs = [other for other in self._runs if other is not run]
        return dict(others.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count a saved history as spent before all runs; only once."""
        if self._before:
            raise InputError("loaded once", name="the history", value=len(self))
        try:
            loaded = [
                GaussianStep(noise_multiplier=sigma, sampling_rate=rate, count=steps)
                for sigma, rate, steps in state["history"]
            ]
            added = float(state.get("delta_added", 0.0))
        except (KeyError, TypeError, ValueError):
            raise InputError(
                "the state_dict of an accountant: a history of (noise multiplier, sampling rate, "
                "steps)",
                name="the state",
                value=state,
            ) from None
        self._before, self._added_before = loaded, added

"""This library's accountant and schedules inside Opacus' own training.

Importing this registers the accountant, so that `opacus.PrivacyEngine(accountant="diminuendo")`
works; `PlannedNoise` is one of its noise schedulers. Opacus' engine, sampler and noise stay: the
certified ε is for real arithmetic and for the steps that Opacus reports, which it counts after
they were released.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diminuendo import _extras, accounting
from diminuendo.budget import Budget, check_delta
from diminuendo.errors import InputError, UsageError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan

with _extras.needed("opacus", extra="opacus", purpose="Working inside Opacus"):
    from opacus.accountants import IAccountant, register_accountant
    from opacus.schedulers import _NoiseScheduler

NAME = "diminuendo"


class CertifiedAccountant(IAccountant):  # type: ignore[misc]
    """ε as a certified upper bound, for full batches and Poisson samples, in Opacus' interface."""

    def __init__(self) -> None:
        self.history: list[tuple[float, float, int]] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step."""
        key = (noise_multiplier, sample_rate)
        count = 1
        if self.history and tuple(self.history[-1][:2]) == key:
            count += self.history.pop()[2]
        self.history.append((*key, count))

    def get_epsilon(self, delta: float) -> float:
        """A certified upper bound on ε at δ for all counted steps, add-remove neighbours; ≥ 0."""
        events = [
            GaussianStep(noise_multiplier=sigma, sampling_rate=rate, count=count)
            for sigma, rate, count in self.history
        ]
        return accounting.claim(events, Budget(epsilon=1.0, delta=check_delta(delta)))

    def __len__(self) -> int:
        return sum(count for _, _, count in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """The name under which Opacus knows it."""
        return NAME


class PlannedNoise(_NoiseScheduler):  # type: ignore[misc]
    """The plan's σ_1 … σ_T, one for each step: call `step()` after each `optimizer.step()`.

    A pure function of the step, so that a saved and reloaded scheduler gives the σ of a run that
    was not interrupted. After the plan's last step `optimizer.step()` raises, and adds no noise.
    """

    def __init__(self, optimizer: Any, plan: Plan, *, last_epoch: int = -1) -> None:
        if not isinstance(plan, Plan):
            raise InputError("a Plan", name="plan", value=plan)
        self._sigmas: list[float] = plan.sigmas.tolist()
        self._digest = plan.digest
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        """σ of the step that comes next; after the plan's last one the optimiser refuses"""
        step: int = self.last_epoch
        if step >= len(self._sigmas):
            self.optimizer.pre_step = self._refuse
        return self._sigmas[min(step, len(self._sigmas) - 1)]

    def _refuse(self, closure: Any = None) -> None:
        del closure
        raise UsageError(f"The plan's {len(self._sigmas)} steps are taken. Plan for more steps.")

    def state_dict(self) -> dict[str, Any]:
        """Which step comes next, and of which plan."""
        return {"last_epoch": self.last_epoch, "plan": self._digest}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same plan; sets the optimiser's σ at once."""
        if state_dict["plan"] != self._digest:
            raise InputError(
                f"of this plan ({self._digest})", name="the state", value=state_dict["plan"]
            )
        self.last_epoch = int(state_dict["last_epoch"])
        self.optimizer.noise_multiplier = self.get_noise_multiplier()


register_accountant(NAME, CertifiedAccountant, force=True)

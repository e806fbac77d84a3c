"""Plans and events as dp-accounting's `DpEvent`, and back.

    from diminuendo.adapters.dp_accounting import from_dp_event, to_dp_event

What is exported is for an accountant's default relation, adding or removing one example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from diminuendo import _extras, _validate
from diminuendo.budget import SENSITIVITY, Relation
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan

with _extras.needed("dp_accounting", extra=None, purpose="Exchanging events with dp-accounting"):
    from dp_accounting import dp_event

_DOWN = 1 - 1e-12
"""Keeps a noise multiplier that is computed from others below its exact value."""


def to_dp_event(
    releases: Plan | Iterable[GaussianStep], *, relation: Relation = "add-remove"
) -> Any:
    """A `ComposedDpEvent` with an entry for each run of equal steps, in order.

    A step on the full batch is a `GaussianDpEvent`, any other a `PoissonSampledDpEvent` of one;
    several are a `SelfComposedDpEvent`. Noise multipliers are relative to the sensitivity under
    `relation` (a plan's own where a plan is given): with replace-one neighbours, half of ours. So
    an accountant with its default relation gives the right ε.
    """
    if isinstance(releases, Plan):
        relation = releases.budget.relation
    _validate.choice("relation", relation, SENSITIVITY)
    steps = releases.events if isinstance(releases, Plan) else tuple(releases)
    if relation != "add-remove" and any(step.sampling_rate < 1 for step in steps):
        raise InputError(
            "add-remove for subsampled steps",
            name="relation",
            value=relation,
            remedy="dp-accounting has no event for Poisson sampling under replace-one.",
        )
    return dp_event.ComposedDpEvent([_exported(step, SENSITIVITY[relation]) for step in steps])


def _exported(step: GaussianStep, sensitivity: float) -> Any:
    single = dp_event.GaussianDpEvent(step.noise_multiplier / sensitivity)
    if step.sampling_rate < 1:
        single = dp_event.PoissonSampledDpEvent(step.sampling_rate, single)
    return single if step.count == 1 else dp_event.SelfComposedDpEvent(single, step.count)


def from_dp_event(event: Any) -> tuple[GaussianStep, ...]:
    """The Gaussian steps that an event consists of, for add-remove neighbours.

    Equal ones that follow each other become one with a count.

    Known are Gaussian events, Poisson samples of them, and what is composed of these. Several
    Gaussian releases of one sample are a single one with less noise. Anything else raises an
    `InputError`: what is not understood must not be left out of an account.
    """
    merged: list[GaussianStep] = []
    for step in _steps(event):
        last = merged[-1] if merged else None
        if last is not None and replace(last, count=step.count) == step:
            merged[-1] = replace(last, count=last.count + step.count)
        else:
            merged.append(step)
    return tuple(merged)


def _steps(event: Any) -> Iterator[GaussianStep]:
    if isinstance(event, dp_event.GaussianDpEvent):
        yield GaussianStep(noise_multiplier=event.noise_multiplier)
    elif isinstance(event, dp_event.PoissonSampledDpEvent):
        rate = event.sampling_probability
        if _validate.real("sampling_probability", rate, at_least=0, at_most=1) > 0:
            inside = from_dp_event(event.event)
            if any(step.sampling_rate < 1 for step in inside):
                raise _unknown(event, "A sample of a sample is not known.")
            if inside:
                yield GaussianStep(noise_multiplier=_together(inside), sampling_rate=rate)
    elif isinstance(event, dp_event.SelfComposedDpEvent):
        times = _validate.count("count", event.count, at_least=0)
        inside = from_dp_event(event.event)
        if len(inside) == 1 and times:
            yield replace(inside[0], count=inside[0].count * times)
        else:
            for _ in range(times if inside else 0):
                yield from inside
    elif isinstance(event, dp_event.ComposedDpEvent):
        for part in event.events:
            yield from _steps(part)
    elif not isinstance(event, dp_event.NoOpDpEvent):
        raise _unknown(event, "Account it with dp-accounting.")


def _together(steps: tuple[GaussianStep, ...]) -> float:
    """The noise multiplier of Gaussian releases of one sample, as one: 1/σ² adds up."""
    if len(steps) == 1 and steps[0].count == 1:
        return steps[0].noise_multiplier
    return _DOWN / math.sqrt(math.fsum(step.count / step.noise_multiplier**2 for step in steps))


def _unknown(event: Any, remedy: str) -> InputError:
    return InputError(
        "made of Gaussian events and Poisson samples of them",
        name="the event",
        value=type(event).__name__,
        remedy=remedy,
    )

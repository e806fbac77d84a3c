"""What a training step releases, as frozen data. Accountants interpret it; nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from diminuendo import _validate
from diminuendo.errors import InputError


@dataclass(frozen=True, kw_only=True)
class GaussianStep:
    """A clipped sum over a Poisson sample, released with Gaussian noise, `count` times over.

    The noise's standard deviation is `noise_multiplier` × the clip norm, on the sum. A
    `sampling_rate` of 1 is the full batch.
    """

    noise_multiplier: float
    sampling_rate: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        sigma = _validate.positive(
            "noise_multiplier", self.noise_multiplier, remedy="Without noise ε is infinite."
        )
        rate = _validate.real("sampling_rate", self.sampling_rate, above=0, at_most=1)
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sampling_rate", rate)
        object.__setattr__(self, "count", _validate.count("count", self.count))


_TYPES: Mapping[str, type[GaussianStep]] = {"gaussian-step": GaussianStep}
"""The closed table through which events are read: a file can name nothing else."""


def to_dict(event: GaussianStep) -> dict[str, Any]:
    """The event as JSON values: its type's name and its fields."""
    name = next(name for name, kind in _TYPES.items() if kind is type(event))
    return {"type": name, **asdict(event)}


def from_dict(data: Mapping[str, Any]) -> GaussianStep:
    """The event that `to_dict` wrote; unknown types and fields raise InputError."""
    fields = dict(data)
    kind = _TYPES[_validate.choice("event type", fields.pop("type", None), _TYPES)]
    known = kind.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise InputError(f"one of {', '.join(known)}", name="event field", value=name)
    if "noise_multiplier" not in fields:
        raise InputError("given", name="noise_multiplier of an event", value=None)
    return kind(**fields)


def from_schedule(sigmas: _validate.Vector, rates: _validate.Vector) -> tuple[GaussianStep, ...]:
    """One event for each run of equal consecutive steps."""
    changes = np.flatnonzero((np.diff(sigmas) != 0) | (np.diff(rates) != 0)) + 1
    starts = np.concatenate(([0], changes))
    counts = np.diff(np.concatenate((starts, [sigmas.size])))
    return tuple(
        GaussianStep(noise_multiplier=float(s), sampling_rate=float(p), count=int(n))
        for s, p, n in zip(sigmas[starts], rates[starts], counts, strict=True)
    )

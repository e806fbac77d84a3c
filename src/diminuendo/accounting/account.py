"""ε and δ of a sequence of Gaussian steps: the one place that claims are computed.

Formal guarantees: what `epsilon` and `delta` return is an upper bound for the composition of all
steps, for an adversary who sees every one of them, under the stated neighbouring relation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate, budget
from diminuendo._validate import Vector
from diminuendo.accounting import gaussian, subsampled
from diminuendo.budget import Relation
from diminuendo.errors import InputError


class Releases(NamedTuple):
    """Distinct (noise multiplier, sampling rate) pairs and how often each occurs."""

    sigmas: Vector
    rates: Vector
    counts: Vector

    @property
    def full_batch(self) -> bool:
        return bool((self.rates == 1).all())

    @property
    def spent(self) -> float:
        """Σ count/σ²: the cost of full-batch steps."""
        return gaussian.spent(self.sigmas / np.sqrt(self.counts))


def releases(sigmas: ArrayLike, sampling_rate: ArrayLike = 1.0) -> Releases:
    """Check a schedule and gather equal steps; order does not matter to the accountant."""
    if np.size(np.asarray(sigmas, dtype=object)) == 0:
        return Releases(np.empty(0), np.empty(0), np.empty(0))
    noise = _validate.vector("sigmas", sigmas, remedy="Without noise ε is infinite.")
    rates = check_rates(sampling_rate, noise.size)
    keys, counts = np.unique(noise + 1j * rates, return_counts=True)
    return Releases(keys.real.copy(), keys.imag.copy(), counts.astype(np.float64))


def check_rates(sampling_rate: ArrayLike, steps: int) -> Vector:
    """One Poisson sampling rate in (0, 1] for each step, from one number or one for each."""
    rates = _validate.vector("sampling_rate", np.atleast_1d(np.asarray(sampling_rate)))
    if rates.max() > 1:
        raise InputError(
            "at most 1",
            name="sampling_rate",
            value=float(rates.max()),
            remedy="It is a probability: batch size over examples.",
        )
    if rates.size not in (1, steps):
        raise InputError(
            f"one number, or one for each of the {steps} steps",
            name="sampling_rate",
            value=f"{rates.size} numbers",
        )
    return np.broadcast_to(rates, (steps,))


def epsilon(
    sigmas: ArrayLike,
    delta: float,
    sampling_rate: ArrayLike = 1.0,
    *,
    relation: Relation = "add-remove",
) -> float:
    """An upper bound on ε at δ for Gaussian steps with these noise multipliers."""
    delta = _validate.real("delta", delta, above=0, below=1)
    _validate.choice("relation", relation, budget.SENSITIVITY)
    steps = releases(sigmas, sampling_rate)
    if steps.sigmas.size == 0:
        return 0.0
    if steps.full_batch:
        return budget.epsilon_of(steps.spent, delta=delta, relation=relation)
    _only_add_remove(relation)
    return subsampled.epsilon_upper(steps.sigmas, steps.rates, steps.counts, delta)


def delta(
    sigmas: ArrayLike,
    epsilon: float,
    sampling_rate: ArrayLike = 1.0,
    *,
    relation: Relation = "add-remove",
) -> float:
    """An upper bound on δ at ε for Gaussian steps with these noise multipliers."""
    epsilon = _validate.real("epsilon", epsilon, at_least=0)
    _validate.choice("relation", relation, budget.SENSITIVITY)
    steps = releases(sigmas, sampling_rate)
    if steps.sigmas.size == 0:
        return 0.0
    if steps.full_batch:
        return budget.delta_of(steps.spent, epsilon=epsilon, relation=relation)
    _only_add_remove(relation)
    return subsampled.delta_upper(steps.sigmas, steps.rates, steps.counts, epsilon)


def _only_add_remove(relation: str) -> None:
    if relation != "add-remove":
        raise InputError(
            "add-remove where steps are subsampled",
            name="relation",
            value=relation,
            remedy="No certified bound for replace-one neighbours under Poisson sampling is "
            "offered; use the full batch, or state the claim for add-remove.",
        )

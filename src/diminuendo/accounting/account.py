"""ε and δ of a sequence of Gaussian steps: the one place where claims are computed.

Formal guarantees: what `epsilon` and `delta` return is an upper bound for the composition of all
steps, for an adversary who sees every one of them, under the stated neighbouring relation; the
lower end of `bracket` is a lower bound for the same composition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate, budget
from diminuendo._validate import Vector
from diminuendo.accounting import gaussian, subsampled
from diminuendo.accounting.subsampled import closed_form
from diminuendo.budget import Budget, Relation, as_budget, check_delta
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep

LEAST_SIGMA, MOST_SIGMA, LEAST_RATE = 0.05, 1e6, 1e-8
"""What subsampled steps are certified for; σ above the most counts as the most."""
TOLERANCE = 5e-4
"""How far a certified ε of subsampled steps may be above the exact one, about, as a share of it."""
_NO_DOUBLE = 1e-300
"""More than any δ > 0 that doubles cannot hold."""

T = TypeVar("T")


def _certified(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except OverflowError:
        raise InputError(
            "noisy enough for an ε that can be certified", name="sigmas", value="too little noise"
        ) from None


class Bracket(NamedTuple):
    """lower ≤ the exact value ≤ upper."""

    lower: float
    upper: float


class Releases(NamedTuple):
    """Distinct (noise multiplier, sampling rate) pairs and how often each occurs."""

    sigmas: Vector
    rates: Vector
    counts: Vector

    @property
    def full_batch(self) -> bool:
        """Whether every step has sampling rate 1."""
        return bool((self.rates == 1).all())

    @property
    def spent(self) -> float:
        """An upper bound on Σ count/σ²: the cost of full-batch steps."""
        return gaussian.spent(self.sigmas / np.sqrt(self.counts))

    def epsilon(self, delta: float, relation: Relation, *, tolerance: float = TOLERANCE) -> float:
        """An upper bound on ε at δ; subsampled, about within this share of the exact one."""
        if self.sigmas.size == 0:
            return 0.0
        if self.full_batch:
            return budget.epsilon_of(self.spent, delta=delta, relation=relation)
        if relation == "replace-one":
            return self._replace_one_epsilon(delta, tolerance)
        reach = self._reach()
        return _certified(lambda: subsampled.epsilon_upper(*reach, delta, tolerance=tolerance))

    def claim(self, budget: Budget) -> float:
        """The ε that may be claimed at the budget's δ, relation and conversion."""
        if self.full_batch:
            return budget.epsilon_of(self.spent)
        return self.epsilon(budget.delta, budget.relation)

    def _reach(self) -> Releases:
        """The same, checked against and held within what the subsampled bounds are made for."""
        if self.sigmas.min() < LEAST_SIGMA:
            raise InputError(
                f"at least {LEAST_SIGMA} where steps are subsampled",
                name="sigmas",
                value=float(self.sigmas.min()),
                remedy="With less noise ε is beyond what is certified.",
            )
        return self._replace(sigmas=np.minimum(self.sigmas, MOST_SIGMA))

    def bracket(self, delta: float) -> Bracket:
        """Bounds on both sides of ε at δ, for add-remove neighbours."""
        if self.sigmas.size == 0:
            return Bracket(0.0, 0.0)
        if self.full_batch:
            least = math.sqrt(self.spent * (1 - 1e-11))
            lower = closed_form.gaussian_epsilon(delta, least)[0]
            return Bracket(lower, max(self.epsilon(delta, "add-remove"), lower))
        return Bracket(*_certified(lambda: subsampled.epsilon_bounds(*self._reach(), delta)))

    def _replace_one_epsilon(self, delta: float, tolerance: float) -> float:
        """Replacing is removing and adding: (ε, δ) for one gives (2ε, (1 + e^ε)δ) for both.

        So an ε is wanted whose own δ leaves room for the factor: approached along the secant, and
        returned only once it satisfies ε ≥ ε(δ/(1 + e^ε)).
        """
        half, before, margin = 0.0, None, 1e-6
        for _ in range(60):
            if half > 300:
                break
            share = delta / (1 + math.exp(half))
            needed = self.epsilon(share, "add-remove", tolerance=tolerance)
            if needed <= half:
                return 2 * half
            growth = 0.0
            if before is not None and half > before[0]:
                growth = min(max((needed - before[1]) / (half - before[0]), 0.0), 0.9)
            before = (half, needed)
            half += (needed - half) / (1 - growth) + margin * needed
            margin *= 2
        raise InputError(
            "noisy enough for a bound under replace-one neighbours",
            name="sigmas",
            value=float(self.sigmas.min()),
            remedy="Subsampled steps get one through group privacy, which does not settle here; "
            "use more noise, the full batch, or state the claim for add-remove.",
        )


def releases(sigmas: ArrayLike, sampling_rate: ArrayLike = 1.0) -> Releases:
    """Check a schedule and gather equal steps; order does not matter to the accountant."""
    if np.size(np.asarray(sigmas, dtype=object)) == 0:
        check_rates(sampling_rate, 0)
        return Releases(np.empty(0), np.empty(0), np.empty(0))
    noise = _validate.vector("sigmas", sigmas, remedy="Without noise ε is infinite.")
    rates = check_rates(sampling_rate, noise.size)
    keys, counts = np.unique(noise + 1j * rates, return_counts=True)
    return Releases(keys.real.copy(), keys.imag.copy(), counts.astype(np.float64))


def claim(events: Iterable[GaussianStep], budget: Budget | tuple[float, float]) -> float:
    """The ε ≥ 0 that may be claimed for these events together, by the budget's terms.

    A certified upper bound for an adversary who sees every step, at the budget's δ and neighbouring
    relation: by the closed form (and the budget's conversion) where every step takes the full
    batch, by the certified bounds for Poisson sampling otherwise. The events must have been fixed
    in advance; for σ chosen while training, what a filter guarantees is the claim.
    """
    return of_events(events).claim(as_budget(budget))


def of_events(events: Iterable[GaussianStep]) -> Releases:
    """Events with equal ones gathered; order does not matter to the accountant."""
    counts: dict[tuple[float, float], int] = {}
    for event in events:
        key = (event.noise_multiplier, event.sampling_rate)
        counts[key] = counts.get(key, 0) + event.count
    pairs = np.array(sorted(counts), dtype=np.float64).reshape(-1, 2)
    times = np.array([counts[key] for key in sorted(counts)], dtype=np.float64)
    return Releases(pairs[:, 0], pairs[:, 1], times)


def check_rates(sampling_rate: ArrayLike, steps: int) -> Vector:
    """One Poisson sampling rate in (0, 1] for each step, from one number or one for each."""
    alone = np.ndim(sampling_rate) == 0
    if not alone and np.size(np.asarray(sampling_rate)) == steps == 0:
        return np.empty(0)
    rates = _validate.vector("sampling_rate", np.atleast_1d(np.asarray(sampling_rate)))
    if rates.min() < LEAST_RATE:
        raise InputError(f"at least {LEAST_RATE:g}", name="sampling_rate", value=float(rates.min()))
    if rates.max() > 1:
        raise InputError(
            "at most 1",
            name="sampling_rate",
            value=float(rates.max()),
            remedy="It is a probability: expected batch size divided by number of examples.",
        )
    if not alone and rates.size != steps:
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
    """An upper bound on ε at δ for Gaussian steps with these noise multipliers.

    sigmas          one noise multiplier for each step: noise deviation over clip norm, positive
    delta           δ in (0, 1)
    sampling_rate   Poisson sampling rate in (0, 1], one for all steps or one for each; 1 is the
                    full batch
    relation        "add-remove" or "replace-one"

    Returns ε ≥ 0, which holds for the whole sequence.
    """
    _validate.choice("relation", relation, budget.SENSITIVITY)
    return releases(sigmas, sampling_rate).epsilon(check_delta(delta), relation)


def delta(
    sigmas: ArrayLike,
    epsilon: float,
    sampling_rate: ArrayLike = 1.0,
    *,
    relation: Relation = "add-remove",
) -> float:
    """An upper bound on δ, in [0, 1], at ε ≥ 0 for Gaussian steps with these noise multipliers.

    The other arguments are those of `epsilon`.
    """
    epsilon = _validate.real("epsilon", epsilon, at_least=0)
    _validate.choice("relation", relation, budget.SENSITIVITY)
    steps = releases(sigmas, sampling_rate)
    if steps.sigmas.size == 0:
        return 0.0
    if steps.full_batch:
        return budget.delta_of(steps.spent, epsilon=epsilon, relation=relation)
    half = epsilon / 2 if relation == "replace-one" else epsilon
    upper = _certified(lambda: subsampled.delta_bounds(*steps._reach(), half).upper) + _NO_DOUBLE
    if relation == "replace-one":
        return 1.0 if half > 700 else min(upper * (1 + math.exp(half)), 1.0)
    return min(upper, 1.0)


def bracket(sigmas: ArrayLike, delta: float, sampling_rate: ArrayLike = 1.0) -> Bracket:
    """Certified lower and upper bounds on the smallest ε at δ, for add-remove neighbours."""
    return releases(sigmas, sampling_rate).bracket(check_delta(delta))


def running_epsilon(sigmas: ArrayLike, delta: float, sampling_rate: ArrayLike = 1.0) -> Vector:
    """An upper bound on ε at δ after each step, in the order given, for add-remove neighbours."""
    delta = check_delta(delta)
    if np.size(np.asarray(sigmas, dtype=object)) == 0:
        return np.empty(0)
    noise = _validate.vector("sigmas", sigmas, remedy="Without noise ε is infinite.")
    rates = check_rates(sampling_rate, noise.size)
    if (rates == 1).all():
        return gaussian.running_epsilon(noise, delta)
    releases(noise, rates)._reach()
    noise = np.minimum(noise, MOST_SIGMA)
    return _certified(lambda: subsampled.running_epsilon(noise, rates, delta))

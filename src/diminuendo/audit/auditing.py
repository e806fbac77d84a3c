"""audit(plan): train on canaries, guess from what is released which were there, bound ε from below.

What the lower bound assumes, and with what probability it is wrong:

`epsilon_lower`  the release is the plan's mechanism with noise of an unknown scale c: the same
                 relative noise in every step, the plan's sampling. c is bounded from the distance
                 between present and absent canaries, and ε is accounted from below for c·σ_t. For
                 full batches this is the μ of Gaussian differential privacy. Wrong with probability
                 at most 1 − confidence.
`epsilon_any`    nothing: it holds for any mechanism at all, with the same confidence.
`findings`       noise that steps or coordinates share, which none of the two would notice; a false
                 one comes with probability at most `FALSE_FINDING`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diminuendo import _validate, accounting
from diminuendo._progress import Bar, bar
from diminuendo._validate import Vector
from diminuendo.audit import statistics
from diminuendo.audit.canaries import Canaries
from diminuendo.audit.statistics import Flags
from diminuendo.audit.trainers import Train, by_fit
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.planning import Plan

FALSE_FINDING = 1e-6
LEAST_CANARIES = 20
PER_RUN = 20_000
"""More canaries in one run would not be faster: the engine certifies sums of about so many."""
MOST_CANARIES = 2_000_000
PARTS, MOST_NUMBERS = 24, 10_000_000
"""Steps are gathered in so many parts at most, over which the best attack is learned; in fewer
where all canaries' parts together would be more numbers than that."""
_PLANNED, _LEARNED = 0.8, 0.2
"""How the error probability is shared between the plan's own weights and the learned ones."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found.

    claim          the plan's certified ε, at delta
    epsilon_lower  ε is at least this, with `confidence`, under the assumption in `assumes`
    epsilon_any    the same without any assumption; usually much smaller
    noise_scale    the estimated noise, in units of the planned one (1: as planned); smaller than 1
                   means less private
    attack         whose weights gave the bound: "planned" or "learned"
    findings       sentences about the noise that are wrong with probability 1e-6 at most
    exceeded       whether the claim is refuted: by a lower bound above it, or by a finding
    """

    claim: float
    delta: float
    relation: str
    epsilon_lower: float
    epsilon_any: float
    confidence: float
    noise_scale: float
    attack: Literal["planned", "learned"]
    steps: int
    canaries: int
    runs: int
    assumes: str
    findings: tuple[str, ...]

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return max(self.epsilon_lower, self.epsilon_any) > self.claim or bool(self.findings)

    @property
    def share(self) -> float:
        """The lower bound as a share of the claim, from 0; above 1 it refutes the claim."""
        return self.epsilon_lower / self.claim if self.claim else math.inf

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values; infinite numbers become None."""
        facts = {**asdict(self), "exceeded": self.exceeded, "share": self.share}
        facts["findings"] = list(self.findings)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in facts.items()
        }


def audit(
    plan: Plan,
    *,
    train: Train | None = None,
    canaries: int | None = None,
    runs: int | None = None,
    precision: float = 0.015,
    confidence: float = 0.95,
    seed: int | None = None,
    progress: bool = True,
) -> Audit:
    """A lower bound on ε from what a trainer releases under this plan, beside the plan's claim.

    train       who is audited; `fit` with its defaults (exact noise) unless given: see `by_fit`
                and `by_loop`, or write your own
    canaries    in each run; each is one example, and the plan's number of examples becomes this
                (it is a public divisor and nothing else)
    runs        how many times is trained: 1 is an audit in one run
    precision   where `canaries` and `runs` are not given: enough of them that the bound comes
                this close, relative to the noise's scale, as far as 2,000,000 canaries allow
    confidence  with which the lower bounds hold, each on its own
    seed        which canaries are present; from the operating system unless given. The trainer's
                noise is its own matter

    For Poisson sampling under replace-one neighbours the canaries that are absent are zeroed out,
    as for add-remove: replacing an example by one whose gradient is zero is a special case.
    """
    if not isinstance(plan, Plan):
        raise InputError("a Plan", name="plan", value=plan)
    confidence = _validate.real("confidence", confidence, at_least=0.5, below=1)
    precision = _validate.real("precision", precision, above=0, below=1)
    m, count = _amount(plan, canaries, runs, precision, confidence)
    full = bool((plan.rates == 1).all())
    reverse = full and plan.budget.relation == "replace-one"
    own = replace(plan, examples=m)
    train = by_fit() if train is None else train
    layout = _Layout.of(own, most=max(MOST_NUMBERS // (m * count), 2))
    coins = np.random.default_rng(seed).integers(2**62, size=count).tolist()
    parts = np.empty((count, m, layout.parts))
    present = np.empty((count, m), dtype=bool)
    with bar("auditing", total=count * plan.steps, shown=progress) as shown:
        for run in range(count):
            drawn = Canaries.draw(
                m, plan.clip, absent="reversed" if reverse else "zeroed", seed=coins[run]
            )
            parts[run] = layout.observe(train, drawn, shown)
            present[run] = drawn.present.numpy()
    return _judge(plan, layout, parts, present, 1 - confidence, halved=reverse)


@dataclass(frozen=True, eq=False)
class _Layout:
    """How a plan's steps become parts: each step weighted by rate/σ², the best linear weights.

    planned  the distance of present and absent canaries that the plan implies, in deviations
    """

    plan: Plan
    weights: Vector
    part: NDArray[np.int64]
    parts: int
    planned: float

    @classmethod
    def of(cls, plan: Plan, most: int = PARTS) -> _Layout:
        weights = plan.rates / plan.sigmas**2
        parts = min(plan.steps, PARTS, most)
        distance = float(np.sum(weights * plan.rates)) / math.sqrt(
            float(np.sum((weights * plan.sigmas) ** 2))
        )
        return cls(plan, weights, np.arange(plan.steps) * parts // plan.steps, parts, distance)

    def observe(self, train: Train, canaries: Canaries, shown: Bar) -> Vector:
        """One run's parts, (canaries, parts); refuses a trainer that takes other steps."""
        total = torch.zeros(self.parts, len(canaries.present), dtype=torch.float64)
        seen = 0

        def see(gradients: Sequence[Tensor]) -> None:
            nonlocal seen
            if seen < self.plan.steps:
                divisor = self.plan.examples * float(self.plan.rates[seen])
                along = canaries.projected(gradients, divisor)
                total[int(self.part[seen])] += float(self.weights[seen]) * along
            seen += 1
            shown.advance()

        train(canaries, self.plan, see)
        if seen != self.plan.steps:
            raise InputError(
                f"those of the plan ({self.plan.steps})",
                name="the steps that the trainer showed",
                value=seen,
                remedy="Call `see` once after each step of the plan.",
            )
        if not bool(total.isfinite().all()):
            raise InputError(
                "finite numbers", name="what the trainer released", value="infinite or no numbers"
            )
        return np.asarray(total.numpy().T)


def _judge(
    plan: Plan, layout: _Layout, parts: Vector, present: Flags, error: float, *, halved: bool
) -> Audit:
    """Bounds from the plan's own weights on all canaries, and from learned ones on every second."""
    runs, m, _ = parts.shape
    scale = 0.5 if halved else 1.0
    planned = statistics.effect(parts.sum(axis=2), present, _PLANNED * error)
    odd = np.arange(m) % 2 == 1
    direction = statistics.learned_direction(
        parts[:, odd].reshape(-1, layout.parts), present[:, odd].ravel()
    )
    learned = statistics.effect(parts[:, ~odd] @ direction, present[:, ~odd], _LEARNED * error)
    attack: Literal["planned", "learned"] = (
        "learned" if learned.lower > planned.lower else "planned"
    )
    best = learned if attack == "learned" else planned
    distance = layout.planned
    lower = epsilon_at(plan.sigmas, plan.rates, plan.budget, distance, best.lower * scale)
    guesses = statistics.best_guesses(runs * m, distance / scale, plan.budget.delta, error)
    free = statistics.any_mechanism(
        parts.sum(axis=2), present, guesses=guesses, delta=plan.budget.delta, error=error
    )
    scale_found = distance / (planned.estimate * scale) if planned.estimate > 0 else math.inf
    return Audit(
        claim=plan.epsilon,
        delta=plan.budget.delta,
        relation=plan.budget.relation,
        epsilon_lower=lower,
        epsilon_any=free,
        confidence=1 - error,
        noise_scale=scale_found,
        attack=attack,
        steps=plan.steps,
        canaries=m,
        runs=runs,
        assumes="Gaussian noise of one unknown scale in every step, and the plan's sampling",
        findings=_findings(parts, present),
    )


def epsilon_at(
    sigmas: Vector, rates: Vector, budget: Budget, planned: float, distance: float
) -> float:
    """A lower bound on ε ≥ 0 where canaries lie at least `distance` apart, and `planned` is what
    the noise multipliers imply: within the family of these steps with noise of one other scale."""
    if distance <= 0:
        return 0.0
    scale = planned / min(distance, 1e6)
    sigmas = sigmas * scale
    if (rates == 1).all():
        sigmas = sigmas / budget.sensitivity
        least = math.sqrt(sigmas.size) / 1e3
    else:
        least = accounting.account.LEAST_SIGMA
    sigmas = sigmas * max(1.0, least / float(sigmas.min()))  # more noise: still a lower bound
    return float(accounting.bracket(sigmas, budget.delta, rates).lower)


def _findings(parts: Vector, present: Flags) -> tuple[str, ...]:
    """Noise that is shared between steps, or between neighbouring coordinates."""
    absent = [own[~there] for own, there in zip(parts, present, strict=True)]
    centred = np.concatenate([rows - rows.mean(axis=0) for rows in absent if len(rows) > 1])
    found = []
    steps = statistics.correlated(centred, FALSE_FINDING / 2)
    if steps is not None:
        found.append(
            f"The noise of different steps is correlated ({steps:+.3f}): it must be drawn anew for "
            "every step."
        )
    sums = [rows.sum(axis=1) for rows in absent]
    pairs = np.concatenate([np.stack([row[:-1], row[1:]], axis=1) for row in sums if row.size > 1])
    neighbours = statistics.correlated(pairs[::2], FALSE_FINDING / 2)
    if neighbours is not None:
        found.append(
            f"The noise of neighbouring coordinates is correlated ({neighbours:+.3f}): every "
            "coordinate needs its own."
        )
    return tuple(found)


def _amount(
    plan: Plan, canaries: int | None, runs: int | None, precision: float, confidence: float
) -> tuple[int, int]:
    """Canaries in each run, and runs."""
    if canaries is not None:
        canaries = _validate.count("canaries", canaries, at_least=LEAST_CANARIES)
    if runs is not None:
        runs = _validate.count("runs", runs)
    if canaries is not None:
        return canaries, runs or 1
    distance = _Layout.of(plan).planned
    quantile = 2.2 * math.sqrt(-math.log(2 * (1 - confidence))) if confidence < 1 else 0.0
    needed = (quantile / precision) ** 2 * (4 / distance**2 + 0.5)
    total = int(min(max(needed, 1000), MOST_CANARIES))
    if runs is not None:
        return min(max(total // runs, LEAST_CANARIES), PER_RUN), runs
    count = math.ceil(total / PER_RUN)
    return math.ceil(total / count), count

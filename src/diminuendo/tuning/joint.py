"""Everything chosen together, on auxiliary data: noise, learning rate, clipping, momentum, model.

One pool of candidates. Each round proposes neighbours of the best so far, and of the best under
every restriction (see `restrictions`), so that what is left without a choice has been tuned, too.
The best few are then trained on more auxiliary sets, the best of those is chosen, and it and the
ablations are measured on sets that no choice was made on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diminuendo.replicas.statistics import Interval, interval, paired
from diminuendo.tuning.judge import Judge, Value
from diminuendo.tuning.proposals import Proposals
from diminuendo.tuning.restrictions import Restriction
from diminuendo.tuning.space import Candidate

_FIRST_SCALE, _LAST_SCALE = 1.0, 0.3
_NEIGHBOURS_OF_BEST = 6
_NEIGHBOURS = 2
_FINALISTS = 3
_BEHIND = 0.02
"""Objective behind the best model's from which on a model is no longer tuned."""


@dataclass(frozen=True)
class Effort:
    """How much is tried.

    rounds     of proposals
    repeats    runs of each candidate
    finals     runs of each finalist, the earlier ones included
    held_out   runs of each candidate that is reported
    """

    rounds: int
    repeats: int
    finals: int
    held_out: int


@dataclass(frozen=True)
class Measured:
    """A candidate with what it reached: while it was chosen, and on held-out auxiliary data."""

    candidate: Candidate
    score: float
    values: Sequence[Value]

    @property
    def objective(self) -> Interval:
        """The objective on held-out data."""
        return interval([one.objective for one in self.values])

    @property
    def accuracy(self) -> Interval:
        """Test accuracy on held-out data."""
        return interval([one.accuracy for one in self.values])

    def above(self, other: Measured) -> Interval:
        """By how much its objective is above another's, paired."""
        if other.candidate == self.candidate:
            return Interval(0.0, 0.0)
        return paired(*([one.objective for one in m.values] for m in (self, other)))


@dataclass(frozen=True)
class Found:
    """The best of all, the best under each restriction, and every candidate with its score."""

    best: Measured
    restricted: Mapping[str, Measured]
    tried: Mapping[Candidate, float]


def search(
    judge: Judge,
    proposals: Proposals,
    limits: Sequence[Restriction],
    effort: Effort,
    tell: Callable[[float], None],
) -> Found | None:
    """What was found; None where no candidate's runs were finite. `tell` gets the share done."""
    pool: dict[Candidate, float] = {}
    everything = [Restriction("", {}), *limits]
    stages = effort.rounds + 3

    def add(candidates: Sequence[Candidate]) -> None:
        new = [one for one in dict.fromkeys(candidates) if one not in pool]
        pool.update(zip(new, judge.means(new, effort.repeats).tolist(), strict=True))

    add(proposals.first(judge.models))
    add([probe for one in _best(pool, everything[0])[:1] for probe in proposals.probes(one)])
    tell(1 / stages)
    for number in range(effort.rounds):
        left = number / max(effort.rounds - 1, 1)
        scale = _FIRST_SCALE * (_LAST_SCALE / _FIRST_SCALE) ** left
        add(_neighbours(pool, proposals, everything, scale))
        tell((number + 2) / stages)
    if not any(math.isfinite(score) for score in pool.values()):
        return None
    finalists = {candidate for one in everything for candidate in _best(pool, one)[:_FINALISTS]}
    ordered = sorted(finalists, key=lambda one: (pool[one], str(one)))
    finals = dict(zip(ordered, judge.means(ordered, effort.finals).tolist(), strict=True))
    tell((effort.rounds + 2) / stages)
    winners = {one.name: own[0] for one in everything if (own := _best(finals, one))}
    distinct = list(dict.fromkeys(winners.values()))
    values = dict(zip(distinct, judge.unseen(distinct, effort.held_out), strict=True))
    measured = {name: Measured(one, finals[one], values[one]) for name, one in winners.items()}
    tell(1.0)
    return Found(measured.pop(""), measured, pool)


def _neighbours(
    pool: Mapping[Candidate, float],
    proposals: Proposals,
    limits: Sequence[Restriction],
    scale: float,
) -> list[Candidate]:
    """Neighbours of the best, and of the best under each restriction that is worth it.

    A restriction begins from the best of all, as far as it keeps to it.
    """
    best = _best(pool, limits[0])
    if not best:
        return []
    found = [proposals.near(best[i % 3 % len(best)], scale) for i in range(_NEIGHBOURS_OF_BEST)]
    for limit in limits[1:]:
        own = _best(pool, limit)
        if "model" in limit.fixed and (not own or pool[own[0]] > pool[best[0]] + _BEHIND):
            continue
        start = limit.imposed(best[0], proposals)
        found.append(start)
        base = own[0] if own else start
        found += [limit.imposed(proposals.near(base, scale), proposals) for _ in range(_NEIGHBOURS)]
    return found


def _best(pool: Mapping[Candidate, float], limit: Restriction) -> list[Candidate]:
    """The candidates that keep to a restriction and stayed finite, the best first."""
    own = [one for one, score in pool.items() if limit.holds(one) and np.isfinite(score)]
    return sorted(own, key=lambda one: (pool[one], str(one)))

"""The canary audit of a method of the comparison: its noisy sums against its budget.

Whatever a method releases of gradients passes through `Private`, in units of its sensitivity. On
canaries, each of which adds one unit in a direction of its own, Σ_t rate_t·u_t/σ_t² tells present
canaries from absent ones. How far they lie apart bounds the noise's scale, and that bounds ε from
below, as for a trainer (`audit`). Releases other than gradients (counts, losses) are paid for and
not attacked. Of methods that release one trained model, many models on neighbouring data are
compared (`neighbours`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from diminuendo import _validate
from diminuendo.audit import statistics
from diminuendo.audit.auditing import epsilon_at
from diminuendo.budget import Budget
from diminuendo.compare import neighbours
from diminuendo.compare.method import Method, find
from diminuendo.compare.methods import METHODS
from diminuendo.compare.models import Layer, Model
from diminuendo.compare.private import Private
from diminuendo.errors import InputError

_LENGTH = 100.0


@dataclass(frozen=True)
class CanaryModel(Model):
    """Example i has a long gradient along e_i where its label is 1, and none where it is 0."""

    canaries: int
    classes: int = 2
    convex = True

    @property
    def parameters(self) -> int:
        """One for each canary."""
        return self.canaries

    def start(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Zeros."""
        return torch.zeros(len(generators), self.canaries)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Two equal logits: accuracies and losses say nothing."""
        return torch.zeros(*x.shape[:2], 2, dtype=theta.dtype)

    def layers(self, theta: Tensor, x: Tensor, y: Tensor) -> list[Layer]:
        """The unit vectors, times the length of those that are present; it grows with θ, so that
        differences of gradients show canaries, too."""
        length = _LENGTH * (1 + theta.norm(dim=1, keepdim=True).clamp(max=1e3))
        return [Layer(x, (length * y).unsqueeze(2).to(theta.dtype))]


@dataclass(frozen=True, kw_only=True)
class MethodAudit:
    """ε is at least `epsilon_lower` with `confidence`, beside the claim.

    attacked     "gradients": the bound holds if the noise has one scale, and `noise_scale` is its
                 estimate in units of what was paid for; "noised model": it holds if the noise that
                 is added in the end is Gaussian; "model": it assumes nothing. `noise_scale` is None
                 for models
    """

    method: str
    claim: float
    epsilon_lower: float
    confidence: float
    attacked: Literal["gradients", "model", "noised model"]
    noise_scale: float | None

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return self.epsilon_lower > self.claim


def audit_method(
    key: str,
    budget: Budget,
    *,
    candidate: int | None = None,
    canaries: int = 300,
    runs: int = 10,
    confidence: float = 0.95,
    seed: int = 0,
) -> MethodAudit:
    """Audit a method with its settings of this candidate.

    candidate       the first unless given; of a method that releases a model the third, which
                    regularises most, so that one example shows best
    canaries, runs  canaries in each run; of a method that releases a model, as many models as both
                    together make
    """
    method = find(METHODS, key)
    if method.run is None:
        raise InputError("one with a valid claim", name="the method", value=key)
    _validate.count("canaries", canaries, at_least=20)
    error = 1 - _validate.real("confidence", confidence, at_least=0.5, below=1)
    if candidate is None:
        candidate = 0 if method.releases == "gradients" else 2
    if method.releases != "gradients":
        return MethodAudit(
            method=key,
            claim=budget.epsilon,
            epsilon_lower=neighbours.epsilon_lower(
                method.run,
                method.candidate(candidate),
                budget,
                models=canaries * runs,
                error=error,
                seed=seed,
                gaussian=method.releases == "noised model",
            ),
            confidence=1 - error,
            attacked=method.releases,
            noise_scale=None,
        )
    present = torch.from_numpy(np.random.default_rng(seed).integers(2, size=(runs, canaries)))
    seen: list[tuple[Tensor, float, float, Tensor | None]] = []
    private = Private(
        CanaryModel(canaries),
        torch.eye(canaries).expand(runs, -1, -1),
        present,
        budget,
        seeds=range(seed, seed + runs),
        observe=lambda *release: seen.append(release),
    )
    with torch.no_grad():
        method.run(private, any_settings(method, candidate))
    if {len(noisy) for noisy, *_ in seen} == {1} and runs > 1:
        raise InputError("1 for a method that chooses on the way", name="runs", value=runs)
    score = torch.zeros(runs, canaries, dtype=torch.float64)
    for noisy, sigma, rate, rows in seen:
        own = noisy if rows is None else noisy * rows
        score += rate / sigma**2 * own.double()
    first = [release for release in seen if release[3] is None or bool(release[3][0])]
    sigmas, rates = (np.array([release[k] for release in first]) for k in (1, 2))
    weights = rates / sigmas**2
    planned = float(np.sum(weights * rates) / np.sqrt(np.sum((weights * sigmas) ** 2)))
    found = statistics.effect(score.numpy(), present.numpy().astype(bool), error)
    return MethodAudit(
        method=key,
        claim=budget.epsilon,
        epsilon_lower=epsilon_at(sigmas, rates, budget, planned, found.lower),
        confidence=1 - error,
        attacked="gradients",
        noise_scale=planned / found.estimate if found.estimate > 0 else math.inf,
    )


def any_settings(method: Method, candidate: int) -> dict[str, float]:
    """The candidate's settings; what would be learnt is drawn at random, for the claim must hold
    whatever it is."""
    drawn = np.random.default_rng([candidate, 80]).uniform(-1, 1, size=len(method.learned))
    return {**method.candidate(candidate), **dict(zip(method.learned, drawn.tolist(), strict=True))}

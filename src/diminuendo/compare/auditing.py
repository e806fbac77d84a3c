"""The canary audit of a method of the comparison: its noisy sums against its budget.

Whatever a method releases of gradients passes through `Private`, in units of its sensitivity. On
canaries, each of which adds one unit in a direction of its own, Σ_t u_t/σ_t² over √Σ_t 1/σ_t² tells
present canaries from absent ones best, and its distance is the μ of what was released. Releases
other than gradients (counts, losses) are paid for and not attacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diminuendo import _validate
from diminuendo.audit import statistics
from diminuendo.budget import Budget, gaussian_epsilon
from diminuendo.compare.method import find
from diminuendo.compare.methods import METHODS
from diminuendo.compare.models import Layer, Model
from diminuendo.compare.private import Private
from diminuendo.errors import InputError

_LENGTH = 100.0


@dataclass(frozen=True)
class CanaryModel(Model):
    """Example i has the gradient `_LENGTH`·e_i where its label is 1, and none where it is 0."""

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
        """The unit vectors, times the length of those that are present."""
        return [Layer(x, (_LENGTH * y).unsqueeze(2).to(theta.dtype))]


@dataclass(frozen=True, kw_only=True)
class MethodAudit:
    """ε is at least `epsilon_lower` with `confidence`, beside the claim; `mu` is what Gaussian
    differential privacy allows, and `mu_found` the estimate."""

    method: str
    claim: float
    epsilon_lower: float
    confidence: float
    mu: float
    mu_found: float

    @property
    def exceeded(self) -> bool:
        """Whether the claim is refuted."""
        return self.epsilon_lower > self.claim


def audit_method(
    key: str,
    budget: Budget,
    *,
    candidate: int = 0,
    canaries: int = 300,
    runs: int = 10,
    confidence: float = 0.95,
    seed: int = 0,
) -> MethodAudit:
    """Audit a method that releases full-batch gradients with independent noise."""
    method = find(METHODS, key)
    if method.run is None or method.family in ("not iterative, for convex losses", "batches"):
        raise InputError(
            "one whose full-batch gradients are released", name="the method", value=key
        )
    _validate.count("canaries", canaries, at_least=20)
    error = 1 - _validate.real("confidence", confidence, at_least=0.5, below=1)
    present = torch.from_numpy(np.random.default_rng(seed).integers(2, size=(runs, canaries)))
    scores, weights = [torch.zeros(runs, canaries)], [0.0]
    seen: list[tuple[Tensor, float]] = []
    private = Private(
        CanaryModel(canaries),
        torch.eye(canaries).expand(runs, -1, -1),
        present,
        budget,
        seeds=range(seed, seed + runs),
        observe=lambda noisy, sigma: seen.append((noisy, sigma)),
    )
    with torch.no_grad():
        method.run(private, method.candidate(candidate))
    rows = {len(noisy) for noisy, _ in seen}
    if rows == {1} and runs > 1:  # the replicas were run one after the other
        raise InputError("1 for a method that chooses on the way", name="runs", value=runs)
    for noisy, sigma in seen:
        scores[0] = scores[0] + noisy * sigma**-2
        weights[0] += sigma**-2
    score = (scores[0] / math.sqrt(weights[0])).double().numpy()
    found = statistics.effect(score, present.numpy().astype(bool), error)
    lower = gaussian_epsilon(found.lower, budget.delta) if found.lower > 1e-9 else 0.0
    return MethodAudit(
        method=key,
        claim=budget.epsilon,
        epsilon_lower=lower,
        confidence=1 - error,
        mu=budget.mu,
        mu_found=found.estimate,
    )

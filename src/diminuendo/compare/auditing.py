"""The canary audit of a method of the comparison: its noisy sums against its budget.

Whatever a method releases of gradients passes through `Private`, in units of its sensitivity. On
canaries, each of which adds one unit in a direction of its own, Σ_t rate_t·u_t/σ_t² tells present
canaries from absent ones. How far they lie apart bounds the noise's scale, and that bounds ε from
below, as for a trainer (`audit`). Releases other than gradients (counts, losses) are paid for and
not attacked. Methods that release one trained model have no such canaries: the tests compare their
models on neighbouring data instead.
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
from diminuendo.audit.auditing import epsilon_at
from diminuendo.budget import Budget
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
    """ε is at least `epsilon_lower` with `confidence`, beside the claim, if the noise has one
    scale; `noise_scale` is its estimate in units of what was paid for."""

    method: str
    claim: float
    epsilon_lower: float
    confidence: float
    noise_scale: float

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
    """Audit a method whose gradients are released, with its settings of this candidate."""
    if not can_be_audited(key):
        raise InputError("one whose gradients are released", name="the method", value=key)
    method = find(METHODS, key)
    assert method.run is not None
    _validate.count("canaries", canaries, at_least=20)
    error = 1 - _validate.real("confidence", confidence, at_least=0.5, below=1)
    present = torch.from_numpy(np.random.default_rng(seed).integers(2, size=(runs, canaries)))
    seen: list[tuple[Tensor, float, float]] = []
    private = Private(
        CanaryModel(canaries),
        torch.eye(canaries).expand(runs, -1, -1),
        present,
        budget,
        seeds=range(seed, seed + runs),
        observe=lambda *release: seen.append(release),
    )
    with torch.no_grad():
        method.run(private, method.candidate(candidate))
    if {len(noisy) for noisy, _, _ in seen} == {1} and runs > 1:
        raise InputError("1 for a method that chooses on the way", name="runs", value=runs)
    sigmas, rates = (np.array([release[k] for release in seen]) for k in (1, 2))
    weights = rates / sigmas**2
    score = sum(float(w) * noisy.double() for w, (noisy, _, _) in zip(weights, seen, strict=True))
    planned = float(np.sum(weights * rates) / np.sqrt(np.sum((weights * sigmas) ** 2)))
    found = statistics.effect(torch.as_tensor(score).numpy(), present.numpy().astype(bool), error)
    return MethodAudit(
        method=key,
        claim=budget.epsilon,
        epsilon_lower=epsilon_at(sigmas, rates, budget, planned, found.lower),
        confidence=1 - error,
        noise_scale=planned / found.estimate if found.estimate > 0 else math.inf,
    )


def one_by_one(key: str) -> bool:
    """Whether the method chooses by what was seen, so that its replicas are run one by one."""
    return find(METHODS, key).family == "noise by what was seen"


def can_be_audited(key: str) -> bool:
    """Whether the method releases gradients, on which canaries can be seen."""
    method = find(METHODS, key)
    return method.run is not None and method.family != "not iterative, for convex losses"

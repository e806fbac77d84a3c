"""Clipping rules: how examples' gradient norms become factors, and what one example can add.

Every rule bounds an example's contribution to the sum by `bound`, a number or one for each replica
(a bound may be chosen by what was released before: the noise is in units of it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Bound = float | Tensor
_TINY = 1e-12


class Rule(Protocol):
    """A clipping rule."""

    @property
    def bound(self) -> Bound:
        """The largest norm of one example's contribution."""
        ...

    def factors(self, norms: list[Tensor]) -> list[Tensor]:
        """Factors for each layer, from each layer's norms (R, N)."""
        ...


def _column(bound: Bound) -> Bound:
    return bound.unsqueeze(1) if isinstance(bound, Tensor) else bound


def _total(norms: list[Tensor]) -> Tensor:
    return torch.as_tensor(torch.stack(norms).norm(dim=0))


@dataclass(frozen=True, eq=False)
class Flat:
    """min(1, C/‖g‖): the whole gradient (Abadi et al. 2016)."""

    bound: Bound

    def factors(self, norms: list[Tensor]) -> list[Tensor]:
        """The same factor for every layer."""
        factor = (_column(self.bound) / _total(norms).clamp(min=_TINY)).clamp(max=1.0)
        return [factor] * len(norms)


@dataclass(frozen=True, eq=False)
class Automatic:
    """C/(‖g‖ + γ): nearly normalised (Bu, Wang, Zha and Karypis 2023, AUTO-S)."""

    bound: Bound
    gamma: float = 0.01

    def factors(self, norms: list[Tensor]) -> list[Tensor]:
        """The same factor for every layer."""
        return [_column(self.bound) / (_total(norms) + self.gamma)] * len(norms)


@dataclass(frozen=True, eq=False)
class PerSample:
    """C/(‖g‖ + r/(‖g‖ + r)): small gradients keep small (Xia et al. 2023, DP-PSAC)."""

    bound: Bound
    r: float = 0.1

    def factors(self, norms: list[Tensor]) -> list[Tensor]:
        """The same factor for every layer; times ‖g‖ it is below C for every r > 0."""
        total = _total(norms)
        return [_column(self.bound) / (total + self.r / (total + self.r))] * len(norms)


@dataclass(frozen=True, eq=False)
class PerLayer:
    """min(1, C_l/‖g_l‖) with C_l = C/√layers (McMahan et al. 2018)."""

    bound: Bound

    def factors(self, norms: list[Tensor]) -> list[Tensor]:
        """Each layer's own factors."""
        share = _column(self.bound) / math.sqrt(len(norms))
        return [(share / own.clamp(min=_TINY)).clamp(max=1.0) for own in norms]

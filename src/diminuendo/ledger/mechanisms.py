"""Releases other than training steps, so that statistics and training draw on one budget.

Every parameter is relative to the sensitivity under the *budget's* relation: a Laplace scale of 2
is twice the largest change of the statistic between neighbouring data. What each costs:

| mechanism | in a "renyi" budget of order a | in a "gaussian" budget |
|---|---|---|
| `Laplace(scale)` | its Rényi divergence (Mironov 2017) | as pure ε = 1/scale |
| `PureEpsilon(epsilon)` | min(ε, a·ε²/2) (Bun and Steinke 2016) | μ², μ = 2Φ⁻¹(e^ε / (1 + e^ε)) |
| `DiscreteGaussian(noise_multiplier)` | a/(2σ²) (Canonne, Kamath and Steinke 2020) | refused |
| `ZeroConcentrated(rho)` | a·ρ | refused |
| `RenyiCurve({order: divergence})` | the least given at an order ≥ a | refused |

A mechanism that is ε-DP is μ-Gaussian differentially private for that μ: the trade-off curve of μ
is convex and meets that of ε in its corner, so that it lies below it everywhere. Concentrated
privacy implies no μ at all, hence the refusals.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

from scipy.special import ndtri

from diminuendo import _validate
from diminuendo.accounting.filters import UNIT
from diminuendo.errors import InputError

_MARGIN = 1e-9
"""Prices are rounded up by this share, more than floating point can be wrong."""


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A release that is made `count` times."""

    kind: ClassVar[str]
    count: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _validate.count("count", self.count))

    @abstractmethod
    def divergence(self, order: int) -> float:
        """An upper bound on the Rényi divergence of one release at a whole order ≥ 2."""

    def mu(self) -> float:
        """A μ such that one release is μ-Gaussian differentially private."""
        raise InputError(
            "a Gaussian step, Laplace or a pure ε in a Gaussian budget",
            name="the release",
            value=type(self).__name__,
            remedy='Charge it to a budget with composition="renyi".',
        )

    def cost(self, order: int | None) -> int:
        """The price of all `count` releases, in units of 2⁻²⁰⁰, at an order or by μ²."""
        one = self.mu() ** 2 if order is None else self.divergence(order)
        if not math.isfinite(one):
            raise InputError("small enough for a finite price", name="the release", value=one)
        return self.count * max(math.ceil(Fraction(one * (1 + _MARGIN)) * UNIT), 1)


def _positive(mechanism: Mechanism, name: str) -> None:
    object.__setattr__(mechanism, name, _validate.positive(name, getattr(mechanism, name)))


@dataclass(frozen=True, kw_only=True)
class PureEpsilon(Mechanism):
    """Any ε-DP release: randomised response, the exponential mechanism, a count with noise."""

    kind = "pure"
    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "epsilon")

    def divergence(self, order: int) -> float:
        """min(ε, a·ε²/2)."""
        return min(self.epsilon, order / 2 * self.epsilon * self.epsilon)

    def mu(self) -> float:
        """2Φ⁻¹(e^ε / (1 + e^ε))."""
        return _mu_of(self.epsilon)


def _mu_of(epsilon: float) -> float:
    """By the lower tail, e^−ε / (1 + e^−ε), where floating point is exact enough."""
    return -2 * float(ndtri(math.exp(-epsilon) / (1 + math.exp(-epsilon))))


@dataclass(frozen=True, kw_only=True)
class Laplace(Mechanism):
    """A number with Laplace noise of this scale, in units of its sensitivity."""

    kind = "laplace"
    scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "scale")

    def divergence(self, order: int) -> float:
        """ln(a/(2a−1)·e^((a−1)/b) + (a−1)/(2a−1)·e^(−a/b)) / (a−1), at most 1/b."""
        a, b = order, self.scale
        whole = math.log(a / (2 * a - 1)) + (a - 1) / b
        rest = math.log((a - 1) / (2 * a - 1)) - a / b
        high = max(whole, rest)
        total = high + math.log(math.exp(whole - high) + math.exp(rest - high))
        exact = max(total, 0.0) / (a - 1) + 1e-14
        return min(exact, PureEpsilon(epsilon=1 / b).divergence(a))

    def mu(self) -> float:
        """As pure ε = 1/scale."""
        return _mu_of(1 / self.scale)


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian(Mechanism):
    """Whole numbers with discrete Gaussian noise; σ in units of the sensitivity."""

    kind = "discrete-gaussian"
    noise_multiplier: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "noise_multiplier")

    def divergence(self, order: int) -> float:
        """a/(2σ²)."""
        return order / 2 / self.noise_multiplier / self.noise_multiplier


@dataclass(frozen=True, kw_only=True)
class ZeroConcentrated(Mechanism):
    """Any ρ-zCDP release."""

    kind = "zcdp"
    rho: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "rho")

    def divergence(self, order: int) -> float:
        """a·ρ."""
        return order * self.rho


@dataclass(frozen=True, kw_only=True)
class RenyiCurve(Mechanism):
    """Any release whose Rényi divergence is known at some orders, as {order: divergence}."""

    kind = "renyi-curve"
    curve: Mapping[float, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.curve, Mapping) or not self.curve:
            raise InputError("{order: divergence}", name="curve", value=self.curve)
        checked = {
            _validate.real("an order of the curve", float(order), above=1): _validate.positive(
                "a divergence of the curve", value
            )
            for order, value in self.curve.items()
        }
        object.__setattr__(self, "curve", dict(sorted(checked.items())))

    def __hash__(self) -> int:
        return hash((self.count, tuple(self.curve.items())))

    def divergence(self, order: int) -> float:
        """The least divergence that is given at this order or a higher one: it grows with it."""
        above = [value for given, value in self.curve.items() if given >= order]
        if not above:
            raise InputError(
                f"given at the budget's order ({order}) or a higher one",
                name="the curve",
                value=list(self.curve),
            )
        return min(above)


KINDS: dict[str, type[Mechanism]] = {
    kind.kind: kind for kind in (Laplace, PureEpsilon, DiscreteGaussian, ZeroConcentrated)
} | {RenyiCurve.kind: RenyiCurve}
"""The closed table through which records are read."""


def to_json(mechanism: Mechanism) -> list[Any]:
    """[kind, parameters, count], as a record holds it."""
    fields = {name: value for name, value in asdict(mechanism).items() if name != "count"}
    if isinstance(mechanism, RenyiCurve):
        fields = {"curve": [[order, value] for order, value in mechanism.curve.items()]}
    return [mechanism.kind, fields, mechanism.count]


def from_json(kind: str, fields: Mapping[str, Any], count: int) -> Mechanism:
    """The mechanism that `to_json` wrote, checked."""
    found = KINDS[_validate.choice("the release", kind, KINDS)]
    arguments = dict(fields)
    if found is RenyiCurve:
        arguments = {"curve": {float(order): value for order, value in fields["curve"]}}
    return found(**arguments, count=count)

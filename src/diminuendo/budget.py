"""A privacy budget, and the ways from (ε, δ) to what Gaussian noise may spend, and back.

Noise of multiplier σ_t on a sum of clipped gradients costs 1/σ_t², and a full-batch schedule
costs R = Σ_t 1/σ_t². Under replace-one neighbours one example moves the sum by 2C instead of C,
so the same noise costs four times as much and `Budget.R` is a quarter.

Formal guarantees: `Budget.R`, `mu` and `rho` are rounded down, `epsilon_of` and `delta_of` are
rounded up, by more than the floating-point error of their evaluation; the two roundings are
matched so that `epsilon_of(budget.R)` never exceeds `budget.epsilon`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, minimize_scalar
from scipy.special import erf, erfcx, log_ndtr

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError

Relation = Literal["add-remove", "replace-one"]
Conversion = Literal["exact", "zcdp", "zcdp-tight"]

SENSITIVITY: dict[str, float] = {"add-remove": 1.0, "replace-one": 2.0}
"""How far one example can move the clipped sum, in units of the clip norm."""

CONVERSIONS: tuple[Conversion, ...] = ("exact", "zcdp", "zcdp-tight")

_DOWN = 1 - 1e-10
_UP = 1 + 2e-11
_MU_RANGE = (1e-12, 1e4)
_EPS = 2.0**-52


def gaussian_delta(epsilon: ArrayLike, mu: ArrayLike) -> Vector:
    """δ(ε) of a μ-GDP mechanism, Φ(−a) − e^ε Φ(−b) with a = ε/μ − μ/2, b = ε/μ + μ/2; from above.

    For a ≥ 0 both terms carry the factor exp(−a²/2), and what is left is a difference of two
    scaled complementary error functions. What that evaluation can lose to rounding is added.
    """
    epsilon, mu = np.asarray(epsilon, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    a, b, root2 = epsilon / mu - mu / 2, epsilon / mu + mu / 2, math.sqrt(2)
    positive = np.maximum(a, 0.0)
    scale = 0.5 * np.exp(-(positive**2) / 2)
    one, two = erfcx(positive / root2), erfcx(b / root2)
    shift = 4 * (1 + np.abs(a) + b) * (1 + np.abs(a))
    tail = scale * (np.maximum(one - two, 0.0) + _EPS * (16 + shift) * (one + two))
    spread = 0.5 * (erf(-a / root2) + erf(b / root2))
    second = np.exp(epsilon + log_ndtr(-b)) * -np.expm1(-epsilon)
    bulk = spread - second + _EPS * ((64 + shift) * spread + 64 * (1 + epsilon + b * b) * second)
    return np.asarray(np.where(a >= 0, tail, bulk))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The μ for which δ(ε) = delta: the inverse of `gaussian_delta` in its second argument."""
    return _log_root(lambda mu: float(gaussian_delta(epsilon, mu)) - delta, *_MU_RANGE)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) ≤ delta for a μ-GDP mechanism."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    highest = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-12
    return float(
        brentq(
            lambda eps: float(gaussian_delta(eps, mu)) - delta,
            0.0,
            highest,
            xtol=1e-300,
            rtol=1e-14,
        )
    )


def _log_root(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of an increasing function on [low, high], to relative precision."""
    return math.exp(
        brentq(lambda x: function(math.exp(x)), math.log(low), math.log(high), rtol=1e-15)
    )


def _zcdp_rho(epsilon: float, delta: float) -> float:
    """ρ = ε + 2L − 2√(L(ε+L)), L = ln(1/δ); the print has a plus. Written as (ε/(√(ε+L)+√L))²."""
    log = math.log(1 / delta)
    return (epsilon / (math.sqrt(epsilon + log) + math.sqrt(log))) ** 2


def _tight_epsilon_at(order: float, rho: float, delta: float) -> float:
    """ε of ρ-zCDP through one Rényi order (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    return order * rho + _tight_offset(order, delta)


def _tight_offset(order: float, delta: float) -> float:
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def _best_order(objective: Callable[[float], float]) -> float:
    """The least value over Rényi orders; every order gives a valid bound, so the search is free."""
    found = minimize_scalar(
        lambda x: objective(1 + math.exp(x)),
        bounds=(-12.0, 30.0),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.fun)


def _tight_rho(epsilon: float, delta: float) -> float:
    return -_best_order(lambda order: -(epsilon - _tight_offset(order, delta)) / order)


def _raw_mu(epsilon: float, delta: float, conversion: str) -> float:
    if conversion == "exact":
        return gaussian_mu(epsilon, delta)
    rho = (_zcdp_rho if conversion == "zcdp" else _tight_rho)(epsilon, delta)
    return math.sqrt(2 * max(rho, 0.0))


def _raw_epsilon(mu: float, delta: float, conversion: str) -> float:
    rho = mu * mu / 2
    if conversion == "exact":
        return gaussian_epsilon(mu, delta)
    if conversion == "zcdp":
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))
    return max(_best_order(lambda order: _tight_epsilon_at(order, rho, delta)), 0.0)


def _raw_delta(mu: float, epsilon: float, conversion: str) -> float:
    rho = mu * mu / 2
    if conversion == "exact":
        return float(gaussian_delta(epsilon, mu))
    if conversion == "zcdp":
        return math.exp(-(max(epsilon - rho, 0.0) ** 2) / (4 * rho))
    log_delta = _best_order(
        lambda order: (
            (order - 1) * (order * rho - epsilon + math.log1p(-1 / order)) - math.log(order)
        )
    )
    return min(math.exp(log_delta), 1.0)


def check_delta(delta: float) -> float:
    """δ as a float in [1e-300, 1), or InputError: doubles below lose the digits of a bound."""
    return _validate.real(
        "delta", delta, at_least=1e-300, below=1, remedy="A usual choice is well below 1/examples."
    )


def _effective_mu(R: float, relation: str) -> float:
    _validate.choice("relation", relation, SENSITIVITY)
    return SENSITIVITY[relation] * math.sqrt(
        _validate.real(
            "R", R, at_least=0, at_most=1e8, remedy="So little noise has no finite ε worth stating."
        )
    )


def epsilon_of(
    R: float,
    *,
    delta: float,
    relation: Relation = "add-remove",
    conversion: Conversion = "exact",
) -> float:
    """An upper bound on ε ≥ 0 at δ for any full-batch Gaussian schedule with Σ_t 1/σ_t² = R."""
    delta = check_delta(delta)
    _validate.choice("conversion", conversion, CONVERSIONS)
    mu = _effective_mu(R, relation)
    return _raw_epsilon(mu, delta, conversion) * _UP if mu > 0 else 0.0


def delta_of(
    R: float,
    *,
    epsilon: float,
    relation: Relation = "add-remove",
    conversion: Conversion = "exact",
) -> float:
    """An upper bound on δ in [0, 1] at ε for any full-batch schedule with Σ_t 1/σ_t² = R."""
    epsilon = _validate.real("epsilon", epsilon, at_least=0)
    _validate.choice("conversion", conversion, CONVERSIONS)
    mu = _effective_mu(R, relation)
    if mu == 0:
        return 0.0
    return min(_raw_delta(mu * (1 + 1e-11), epsilon, conversion) * (1 + 1e-9) + 1e-300, 1.0)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A privacy budget (ε, δ) for a neighbouring relation, and how it converts to Gaussian noise.

    epsilon       ε > 0
    delta         δ in (0, 1), well below 1/examples
    relation      "add-remove" (one example is there or zeroed out, the divisor stays public) or
                  "replace-one"
    conversion    "exact" (Gaussian differential privacy, no loss), "zcdp" (the paper's) or
                  "zcdp-tight"
    """

    epsilon: float
    delta: float
    relation: Relation = "add-remove"
    conversion: Conversion = "exact"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check_delta(self.delta))
        _validate.choice("relation", self.relation, SENSITIVITY)
        _validate.choice("conversion", self.conversion, CONVERSIONS)
        try:
            usable = 0 < self.mu < math.inf
        except (ValueError, OverflowError):
            raise InputError(
                "between about 1e-9 and 1e7",
                name="epsilon",
                value=self.epsilon,
                remedy=f"At delta={self.delta:g} it is beyond what can be converted.",
            ) from None
        if not usable:
            raise InputError(
                "large enough to allow any noise at all",
                name="epsilon",
                value=self.epsilon,
                remedy=f"At delta={self.delta:g} the {self.conversion} conversion allows nothing.",
            )

    @cached_property
    def mu(self) -> float:
        """The budget as Gaussian differential privacy: any schedule with √Σ(Δ/σ_t)² ≤ μ fits."""
        return _raw_mu(self.epsilon, self.delta, self.conversion) * _DOWN

    @property
    def rho(self) -> float:
        """The budget as zero-concentrated differential privacy, μ²/2."""
        return self.mu**2 / 2

    @property
    def sensitivity(self) -> float:
        """How far one example can move the clipped sum, in units of the clip norm."""
        return SENSITIVITY[self.relation]

    @property
    def R(self) -> float:
        """What Σ_t 1/σ_t² may come to."""
        return (self.mu / self.sensitivity) ** 2

    @classmethod
    def from_R(
        cls,
        R: float,
        *,
        delta: float,
        relation: Relation = "add-remove",
        conversion: Conversion = "exact",
    ) -> Budget:
        """The budget that a schedule with Σ_t 1/σ_t² = R uses up."""
        R = _validate.positive("R", R)
        epsilon = epsilon_of(R, delta=delta, relation=relation, conversion=conversion)
        if epsilon == 0:
            raise InputError(
                "large enough to cost some ε at this δ",
                name="R",
                value=R,
                remedy=f"At delta={delta:g} this much noise is already (0, δ)-private.",
            )
        return cls(epsilon=epsilon, delta=delta, relation=relation, conversion=conversion)

    def epsilon_of(self, R: float) -> float:
        """An upper bound on ε of a schedule with Σ_t 1/σ_t² = R, by this budget's terms."""
        return epsilon_of(R, delta=self.delta, relation=self.relation, conversion=self.conversion)


def as_budget(value: object) -> Budget:
    """The Budget itself, or the one that a pair (ε, δ) of numbers describes (add-remove, exact)."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return Budget(epsilon=value[0], delta=value[1])
    raise InputError(
        "a Budget, or a pair (epsilon, delta)",
        name="budget",
        value=value,
        remedy="For example dim.Budget(epsilon=2, delta=1e-5).",
    )

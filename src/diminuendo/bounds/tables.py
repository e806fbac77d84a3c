"""The paper's two tables of bounds as functions of their parameters: constants one, logs kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from diminuendo import _validate
from diminuendo.budget import Budget, as_budget
from diminuendo.influence import momentum_split


class Row(NamedTuple):
    """One algorithm of a table, evaluated. `ours` marks the rows that the paper itself proves."""

    algorithm: str
    formula: str
    bound: float
    ours: bool


@dataclass(frozen=True)
class _Terms:
    """The letters of the tables."""

    N: int
    D: int
    R: float
    loose: float  # R_{ε,δ} = ε²/ln(1/δ), the budget of accountants older than zCDP
    epsilon: float
    failure: float
    mu: float
    past_split: bool

    @property
    def base(self) -> float:
        return self.D / (self.N**2 * self.R)

    @property
    def log_n(self) -> float:
        return math.log(self.N)

    @property
    def momentum_static(self) -> float:
        return 1 + self.log_n * self.past_split

    @property
    def momentum_dynamic(self) -> float:
        return 1 + self.base * self.past_split


def _terms(
    budget: Budget,
    examples: int,
    parameters: int,
    failure: float,
    mu: float,
    kappa: float,
    beta: float,
) -> _Terms:
    N = _validate.count("examples", examples, at_least=2)
    D = _validate.count("parameters", parameters)
    kappa = _validate.real("kappa", kappa, above=1)
    steps = max(1.0, kappa * math.log(max(N**2 * budget.R / D, math.e)))
    return _Terms(
        N=N,
        D=D,
        R=budget.R,
        loose=budget.epsilon**2 / math.log(1 / budget.delta),
        epsilon=budget.epsilon,
        failure=_validate.real("failure", failure, at_least=1e-12, below=1),
        mu=_validate.positive("strong_convexity", mu),
        past_split=steps > momentum_split(gamma=1 - 1 / kappa, beta=beta),
    )


def empirical_risk_table(
    budget: Budget | tuple[float, float],
    *,
    examples: int,
    parameters: int,
    failure: float = 0.05,
    kappa: float = 20.0,
    beta: float = 0.9,
) -> list[Row]:
    """Table 1: excess empirical risk, for 1-smooth and 1-Lipschitz losses.

    κ and β decide only whether T = κ ln(N²R/D) lies past the momentum split T̂.
    """
    z = _terms(as_budget(budget), examples, parameters, failure, 1.0, kappa, beta)
    N, D, L, base = z.N, z.D, z.loose, z.base
    streaming = D**2 * math.log(1 / z.failure) ** 2 / (L * N)
    adam = math.sqrt(D) * math.log(N * D * z.epsilon / (1 - z.failure)) / (N * L)
    adjusted = min(math.sqrt(D) / (N * L), D * z.log_n / (N**2 * L**2))
    return [
        Row("GD + advanced composition", "D ln³N / (N R_εδ)", D * z.log_n**3 / (N * L), False),
        Row("GD + moments accountant", "D ln²N / (N² R_εδ)", D * z.log_n**2 / (N**2 * L), False),
        Row("GD + moments, adjusted", "min √D/(N R_εδ), D lnN/(N² R_εδ²)", adjusted, False),
        Row("GD + streaming batches", "D² ln²(1/p) / (R_εδ N)", streaming, False),
        Row("Adam + moments accountant", "√D ln(NDε/(1−p)) / (N R_εδ)", adam, False),
        Row("GD, non-private", "D / (N² R)", base, True),
        Row("GD, static", "D lnN / (N² R)", base * z.log_n, True),
        Row("GD, dynamic", "D / (N² R)", base, True),
        Row("Momentum, static", "D/(N² R)·(1 + lnN·[T>T̂])", base * z.momentum_static, True),
        Row("Momentum, dynamic", "D/(N² R)·(1 + D/(N² R)·[T>T̂])", base * z.momentum_dynamic, True),
    ]


def true_risk_table(
    budget: Budget | tuple[float, float],
    *,
    examples: int,
    parameters: int,
    failure: float = 0.05,
    strong_convexity: float = 1.0,
    kappa: float = 20.0,
    beta: float = 0.9,
) -> list[Row]:
    """Table 2: excess true risk under strong convexity, for 1-smooth and 1-Lipschitz losses."""
    z = _terms(as_budget(budget), examples, parameters, failure, strong_convexity, kappa, beta)
    N, D, L, p, base = z.N, z.D, z.loose, z.failure, z.base
    repeats = math.log(1 / p)
    advanced = math.sqrt(D) * z.log_n**2 * repeats / (p * z.mu * N * L)
    snowball = (1 / math.sqrt(N) + 2 * math.sqrt(D / z.R) / N) * z.log_n
    convex = max(math.sqrt(D / L) / N, 1 / math.sqrt(N))

    def likely(factor: float) -> float:
        return (math.sqrt(D * repeats / (N * z.R) * factor) + 4 / p) / (z.mu * N)

    return [
        Row("GD + advanced composition", "√D ln²N ln(1/p) / (p μ N R_εδ)", advanced, False),
        Row(
            "SVRG + moments accountant",
            "D lnN / (μ N² R_εδ)",
            D * z.log_n / (z.mu * N**2 * L),
            False,
        ),
        Row("Snowball SGD + zCDP", "(1/√N + 2√D/(√R N)) lnN", snowball, False),
        Row("SGD + moments, convex", "max √D/(N √R_εδ), 1/√N", convex, False),
        Row("GD, static, likely", "(√(D lnN ln(1/p)/(NR)) + 4/p) / (μN)", likely(z.log_n), True),
        Row("GD, dynamic, likely", "(√(D ln(1/p)/(NR)) + 4/p) / (μN)", likely(1.0), True),
        Row("Momentum, static, likely", "as GD, ·(1 + lnN·[T>T̂])", likely(z.momentum_static), True),
        Row(
            "Momentum, dynamic, likely",
            "as GD, ·(1 + D/(N²R)·[T>T̂])",
            likely(z.momentum_dynamic),
            True,
        ),
        Row("GD, non-private, stable", "D / (N² R)", base, True),
        Row("GD, static, stable", "D lnN / (N² R)", base * z.log_n, True),
        Row("GD, dynamic, stable", "D / (N² R)", base, True),
        Row("Momentum, static, stable", "D/(N² R)·(1 + lnN·[T>T̂])", base * z.momentum_static, True),
        Row(
            "Momentum, dynamic, stable",
            "D/(N² R)·(1 + D/(N² R)·[T>T̂])",
            base * z.momentum_dynamic,
            True,
        ),
    ]

"""What is known of the loss, in one form for planning: its influence, its bias, its best T."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _validate, influence
from diminuendo._validate import Vector
from diminuendo.bounds import steps as best
from diminuendo.bounds.momentum import admissible_step
from diminuendo.errors import InputError
from diminuendo.influence.closed_forms import contraction


class Landscape(Protocol):
    """ERUB = bias(T) + factor·α·R·Σ_t b_t σ_t², with b = bound_influence(T).

    `influence` is what schedules are made from. It is the same, except where a measured or stated
    rate of convergence says more about the run than the theorem's worst case does.
    """

    @property
    def factor(self) -> float: ...

    @property
    def said(self) -> str: ...

    def influence(self, steps: int) -> Vector: ...

    def bound_influence(self, steps: int) -> Vector: ...

    def bias(self, steps: int) -> float: ...

    def best_steps(self, alpha: float) -> tuple[int, int]:
        """T* of the dynamic and of the uniform schedule."""
        ...


@dataclass(frozen=True)
class GradientDescent:
    """The PL condition with convergence rate γ, steps of length step_size/M."""

    gamma: float
    step_size: float
    said: str

    factor = 1.0

    @property
    def rate(self) -> float:
        return contraction(self.gamma, self.step_size)

    def influence(self, steps: int) -> Vector:
        return influence.gradient_descent(gamma=self.gamma, steps=steps, step_size=self.step_size)

    bound_influence = influence

    def bias(self, steps: int) -> float:
        return self.rate**steps

    def best_steps(self, alpha: float) -> tuple[int, int]:
        alpha *= self.step_size**2
        return (
            best.best_steps_dynamic(gamma=self.rate, alpha=alpha).steps,
            best.best_steps_uniform(gamma=self.rate, alpha=alpha).steps,
        )


@dataclass(frozen=True)
class Momentum:
    """The average with β: `rate` as stated, `gamma` at the theorem's step η₀/(2M)."""

    rate: float
    gamma: float
    beta: float
    factor: float
    said: str

    def influence(self, steps: int) -> Vector:
        return influence.momentum(gamma=self.rate, beta=self.beta, steps=steps)

    def bound_influence(self, steps: int) -> Vector:
        return influence.momentum(gamma=self.gamma, beta=self.beta, steps=steps)

    def bias(self, steps: int) -> float:
        return self.gamma**steps

    def best_steps(self, alpha: float) -> tuple[int, int]:
        return (
            best.best_steps_momentum_dynamic(
                gamma=self.gamma, beta=self.beta, alpha=alpha, eta0=self.factor
            ).steps,
            best.best_steps_momentum_uniform(
                gamma=self.gamma, beta=self.beta, alpha=alpha, eta0=self.factor
            ).steps,
        )


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A quadratic with known eigenvalues: its noise is exact, its bias that of the worst start."""

    eigenvalues: Vector
    step_size: float
    said: str

    factor = 1.0

    @property
    def _slowest(self) -> float:
        scaled = self.eigenvalues[self.eigenvalues > 0] / self.eigenvalues.max()
        return float(np.max(np.abs(1 - self.step_size * scaled)))

    def influence(self, steps: int) -> Vector:
        return influence.spectrum(self.eigenvalues, steps=steps, step_size=self.step_size)

    bound_influence = influence

    def bias(self, steps: int) -> float:
        return self._slowest ** (2 * steps)

    def best_steps(self, alpha: float) -> tuple[int, int]:
        """Every T at once: q_t depends on T − t alone, so the sums over q are running sums."""
        slowest = self._slowest
        needed = 2.0 if slowest == 0 else 20 / max(-math.log(slowest), 1e-300) + 2
        furthest = math.ceil(min(needed, _FURTHEST))
        t = np.arange(1, furthest + 1.0)
        ages = self.influence(furthest)[::-1]
        bias = slowest ** (2 * t)
        dynamic = bias + alpha * np.cumsum(np.sqrt(ages)) ** 2
        uniform = bias + alpha * t * np.cumsum(ages)
        return int(np.argmin(dynamic)) + 1, int(np.argmin(uniform)) + 1


@dataclass(frozen=True, eq=False)
class Curve:
    """A measured influence. Its growth over the run stands for the convergence rate."""

    values: Vector
    said: str

    factor = 1.0

    def influence(self, steps: int) -> Vector:
        _validate.same_length(
            "influence",
            self.values,
            "steps",
            np.empty(steps),
            remedy="Measure the curve for this many steps, or leave steps to the curve.",
        )
        return self.values

    bound_influence = influence

    def bias(self, steps: int) -> float:
        if steps == 1:
            return 1.0
        growth = np.polyfit(np.arange(steps), np.log(self.values), 1)[0]
        return math.exp(-max(float(growth), 0.0) * steps)

    def best_steps(self, alpha: float) -> tuple[int, int]:
        del alpha  # the curve was measured for one number of steps
        return self.values.size, self.values.size


_FURTHEST = 10**6
"""How far T* is looked for on a spectrum: every T up to it is evaluated."""

GUESSED_KAPPA = 20.0
GUESSED_FALL = 1 / 3
_MEASURE = (
    "It is a guess: measure the influence curve on public or synthetic data and give it as "
    "influence=, or give kappa=, gamma= or spectrum=."
)


def known(
    *,
    kappa: float | None,
    gamma: float | None,
    spectrum: ArrayLike | None,
    curve: ArrayLike | None,
    beta: float | None,
    step_size: float,
    steps: int | None,
) -> Landscape:
    """The landscape that the given facts describe; at most one of the four may be given."""
    given = [
        name
        for name, value in (
            ("kappa", kappa),
            ("gamma", gamma),
            ("spectrum", spectrum),
            ("influence", curve),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise InputError(
            "the only one of kappa, gamma, spectrum and influence",
            name=given[0],
            value=" and ".join(given),
            remedy="They say the same thing: give one.",
        )
    size = _validate.real(
        "step_size", step_size, above=0, at_most=1, remedy="It is counted in units of 1/M."
    )
    if kappa is not None:
        kappa = _validate.real("kappa", kappa, at_least=1, remedy="kappa = M/mu.")
    if gamma is not None:
        gamma = _validate.real("gamma", gamma, at_least=0, below=1, remedy="gamma = 1 − 1/kappa.")
    if beta is not None:
        beta = _validate.real("momentum", beta, at_least=1e-6, below=1, remedy="0.9 is usual.")
    if curve is not None:
        said = influence.measured.said_of(curve) or "a measured influence curve"
        return Curve(influence.from_values(curve), said)
    if spectrum is not None:
        _no_momentum("spectrum", beta)
        values = _validate.vector("spectrum", spectrum, positive=False)
        _validate.positive("max(spectrum)", values.max())
        return Quadratic(values, size, f"a Hessian spectrum of {values.size} eigenvalues")
    if size != 1 and (beta is not None or not given):
        raise InputError(
            "left out with momentum, and where nothing is known of the loss",
            name="step_size",
            value=step_size,
            remedy="It scales gamma, kappa or spectrum of plain gradient descent.",
        )
    if beta is not None:
        return _momentum(kappa, gamma, beta, steps)
    if kappa is not None:
        return GradientDescent(1 - 1 / kappa, size, f"kappa = {kappa:g}")
    if gamma is not None:
        return GradientDescent(gamma, size, f"gamma = {gamma:g}")
    rate = _guess(steps)
    return GradientDescent(rate, 1.0, f"nothing (gamma = {rate:.6g} is assumed). {_MEASURE}")


def _guess(steps: int | None) -> float:
    """Without facts: κ = 20, or for a given T the γ at which σ falls to a third over the run."""
    return 1 - 1 / GUESSED_KAPPA if steps is None else GUESSED_FALL ** (4 / steps)


def _momentum(
    kappa: float | None, gamma: float | None, beta: float, steps: int | None
) -> Landscape:
    """κ = 1/(1−γ) decides the bound; a γ that was given or guessed also makes the schedule."""
    if kappa is not None:
        eta0 = admissible_step(beta=beta, kappa=kappa)
        rate = 1 - eta0 / (2 * kappa)
        said = f"kappa = {kappa:g} with momentum {beta:g}, at the theorem's step {eta0:.3g}/(2M)"
        return Momentum(rate, rate, beta, eta0, said)
    if gamma is not None:
        rate, said = gamma, f"gamma = {gamma:g} with momentum {beta:g}"
    else:
        rate = max(_guess(steps), (1 + beta) / 2)
        said = f"momentum {beta:g} alone (gamma = {rate:.6g} is assumed). {_MEASURE}"
    eta0 = admissible_step(beta=beta, kappa=1 / (1 - rate))
    said += f" (the bound is for the theorem's step {eta0:.3g}/(2M), far shorter than usual)"
    return Momentum(rate, 1 - eta0 * (1 - rate) / 2, beta, eta0, said)


def _no_momentum(name: str, beta: float | None) -> None:
    if beta is not None:
        raise InputError(
            "left out where a spectrum is given",
            name="momentum",
            value=beta,
            remedy=f"With momentum give kappa or gamma instead of {name}.",
        )

"""What is known about the loss, in one form for planning: its influence, its bias, its best T."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

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
    def factor(self) -> float:
        """What the noise term of the bound is multiplied by: 1, or η₀ with momentum."""
        ...

    @property
    def description(self) -> str:
        """A sentence about what is known, for the plan's assumptions."""
        ...

    def influence(self, steps: int) -> Vector:
        """q_1…q_T, from which the noise schedule is made."""
        ...

    def bound_influence(self, steps: int) -> Vector:
        """b_1…b_T, the weights of σ_t² in the bound."""
        ...

    def bias(self, steps: int) -> float:
        """What is left of the initial excess loss after T steps without noise, in [0, 1]."""
        ...

    def best_steps(self, alpha: float) -> tuple[int, int]:
        """T* of the dynamic and of the uniform schedule."""
        ...


@dataclass(frozen=True)
class GradientDescent:
    """The PL condition with convergence rate γ, steps of length step_size/M."""

    gamma: float
    step_size: float
    description: str

    factor = 1.0

    @property
    def rate(self) -> float:
        """The convergence rate at this step size, in [0, 1)."""
        return contraction(self.gamma, self.step_size)

    def influence(self, steps: int) -> Vector:
        """q_1…q_T of the theorem."""
        return influence.gradient_descent(gamma=self.gamma, steps=steps, step_size=self.step_size)

    bound_influence = influence

    def bias(self, steps: int) -> float:
        """rate^T."""
        return self.rate**steps

    def best_steps(self, alpha: float) -> tuple[int, int]:
        """T* of the dynamic and of the uniform schedule, exactly."""
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
    description: str

    @property
    def plain_rate(self) -> float:
        """1 − 1/κ: the rate of plain steps of length 1/M, from that of the theorem's own step."""
        return max(1 - 2 * (1 - self.gamma) / self.factor, 0.0)

    def influence(self, steps: int) -> Vector:
        """q_1…q_T at the rate that was stated."""
        return influence.momentum(gamma=self.rate, beta=self.beta, steps=steps)

    def bound_influence(self, steps: int) -> Vector:
        """b_1…b_T at the theorem's own step."""
        return influence.momentum(gamma=self.gamma, beta=self.beta, steps=steps)

    def bias(self, steps: int) -> float:
        """γ^T at the theorem's own step."""
        return self.gamma**steps

    def best_steps(self, alpha: float) -> tuple[int, int]:
        """T* of the dynamic and of the uniform schedule, exactly."""
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
    description: str
    weights: Vector | None = None

    factor = 1.0

    @property
    def _slowest(self) -> float:
        scaled = self.eigenvalues[self.eigenvalues > 0] / self.eigenvalues.max()
        return float(np.max(np.abs(1 - self.step_size * scaled)))

    def influence(self, steps: int) -> Vector:
        """q_1…q_T of the spectrum."""
        return influence.spectrum(
            self.eigenvalues, steps=steps, step_size=self.step_size, weights=self.weights
        )

    bound_influence = influence

    def bias(self, steps: int) -> float:
        """What is left along the slowest direction."""
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
    description: str

    factor = 1.0

    def influence(self, steps: int) -> Vector:
        """The curve itself, which has to be for this many steps."""
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
        """What the mean growth of the curve says about convergence."""
        if steps == 1:
            return 1.0
        growth = np.polyfit(np.arange(steps), np.log(self.values), 1)[0]
        return math.exp(-max(float(growth), 0.0) * steps)

    def best_steps(self, alpha: float) -> tuple[int, int]:
        """The number of steps that the curve was measured for, twice."""
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


def describe(
    *,
    kappa: float | None,
    gamma: float | None,
    spectrum: Any,
    curve: ArrayLike | None,
    beta: float | None,
    step_size: float,
    steps: int | None,
) -> Landscape:
    """The landscape of these facts; at most one of kappa, gamma, spectrum and curve is stated."""
    stated = [
        name
        for name, value in (
            ("kappa", kappa),
            ("gamma", gamma),
            ("spectrum", spectrum),
            ("influence", curve),
        )
        if value is not None
    ]
    if len(stated) > 1:
        raise InputError(
            "the only one of kappa, gamma, spectrum and influence",
            name=stated[0],
            value=" and ".join(stated),
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
        origin = influence.measured.origin_of(curve) or "a measured influence curve"
        return Curve(influence.from_values(curve), f"Known about the loss: {origin}.")
    if spectrum is not None:
        _no_momentum("spectrum", beta)
        return _quadratic(spectrum, size)
    if size != 1 and (beta is not None or not stated):
        raise InputError(
            "left out with momentum, and where nothing is known about the loss",
            name="step_size",
            value=step_size,
            remedy="It scales gamma, kappa or spectrum of plain gradient descent.",
        )
    if beta is not None:
        return _momentum(kappa, gamma, beta, steps)
    if kappa is not None:
        return GradientDescent(1 - 1 / kappa, size, f"Known about the loss: kappa = {kappa:g}.")
    if gamma is not None:
        return GradientDescent(gamma, size, f"Known about the loss: gamma = {gamma:g}.")
    rate = _guess(steps)
    return GradientDescent(
        rate,
        1.0,
        f"Nothing is known about the loss, so gamma = {rate:.6g} is assumed. {_MEASURE}",
    )


def _quadratic(spectrum: Any, size: float) -> Quadratic:
    """From eigenvalues, or from a measured spectrum with its weights; negative ones are flat."""
    origin, weights = "a Hessian spectrum", None
    values = getattr(spectrum, "eigenvalues", None)
    if values is None:
        values = _validate.vector("spectrum", spectrum, positive=False)
    else:
        values = np.maximum(np.asarray(values, dtype=np.float64), 0.0)
        weights = _validate.vector("the spectrum's weights", spectrum.weights)
        origin = "a measured Hessian spectrum"
        if not getattr(spectrum, "private", True):
            origin += ", measured on the private data and not paid for: the plan is NOT PRIVATE,"
    _validate.positive("max(spectrum)", float(values.max()))
    sentence = f"Known about the loss: {origin} of {values.size} eigenvalues."
    return Quadratic(values, size, sentence, weights)


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
        sentence = (
            f"Known about the loss: kappa = {kappa:g}, with momentum {beta:g} at the theorem's "
            f"step {eta0:.3g}/(2M)."
        )
        return Momentum(rate, rate, beta, eta0, sentence)
    if gamma is not None:
        rate = gamma
        sentence = f"Known about the loss: gamma = {gamma:g}, with momentum {beta:g}."
    else:
        rate = max(_guess(steps), (1 + beta) / 2)
        sentence = (
            f"Nothing is known about the loss, so gamma = {rate:.6g} is assumed with momentum "
            f"{beta:g}. {_MEASURE}"
        )
    eta0 = admissible_step(beta=beta, kappa=1 / (1 - rate))
    sentence += f" The bound is for the theorem's step {eta0:.3g}/(2M), far shorter than usual."
    return Momentum(rate, 1 - eta0 * (1 - rate) / 2, beta, eta0, sentence)


def _no_momentum(name: str, beta: float | None) -> None:
    if beta is not None:
        raise InputError(
            "left out where a spectrum is given",
            name="momentum",
            value=beta,
            remedy=f"With momentum give kappa or gamma instead of {name}, or what it makes of it: "
            "influence=influence.spectrum(…, momentum=…, kind=…, lr=…), and lr as there.",
        )

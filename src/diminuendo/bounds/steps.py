"""T*, the number of steps that minimises ERUB, exactly, over the whole numbers from 1.

Each search is exact because the bound's shape in T is known: for gradient descent it has a single
valley whose bottom has a closed form; for momentum it is one closed form once the averages have
forgotten their start (β^t below rounding), and what comes before is scanned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import wrightomega

from diminuendo import _validate
from diminuendo.bounds import erub
from diminuendo.bounds.momentum import admissible_step_at
from diminuendo.influence import momentum
from diminuendo.influence.closed_forms import averaging_weights

_FORGOTTEN = 56 * math.log(2)
"""β^t below 2⁻⁵⁶ changes no double."""

_LONGEST = 10**12


class BestSteps(NamedTuple):
    """T*, the ERUB there, and the number of steps that the paper's closed form names."""

    steps: int
    erub: float
    printed: int


def _valley(bound: Callable[[int], float], bottom: float) -> tuple[int, float]:
    """The better of the two whole numbers around the bottom of a function with one valley."""
    low = max(1, math.floor(min(bottom, _LONGEST)))
    return min(((t, bound(t)) for t in (low, low + 1)), key=lambda pair: pair[1])


def best_steps_uniform(*, gamma: float, alpha: float) -> BestSteps:
    """argmin γ^T + ακ(1−γ^T)T. With u = T ln(1/γ) the bottom solves e^u + u = 1 + ln(1/γ)/(ακ):
    the Wright omega function, where the paper turns to a surrogate."""
    gamma, alpha = _check(gamma, alpha)
    if gamma == 0:
        return BestSteps(1, alpha, 1)
    rate = -math.log(gamma)
    level = 1 + rate * (1 - gamma) / alpha
    bottom = math.log(float(wrightomega(level).real)) / rate
    steps, bound = _valley(
        lambda t: erub.gradient_descent_uniform(gamma=gamma, alpha=alpha, steps=t), bottom
    )
    return BestSteps(steps, bound, math.ceil(math.log1p(rate / alpha) / rate))


def best_steps_dynamic(*, gamma: float, alpha: float) -> BestSteps:
    """T* = 2 ln(1 + (1−√γ)²/α)/ln(1/γ), rounded to the better side.

    From the proof; the theorem prints ⌈2κ ln(1 + 1/(κα))⌉, about twice as many.
    """
    gamma, alpha = _check(gamma, alpha)
    if gamma == 0:
        return BestSteps(1, alpha, 1)
    rate, kappa = -math.log(gamma), 1 / (1 - gamma)
    bottom = 2 * math.log1p((1 - math.sqrt(gamma)) ** 2 / alpha) / rate
    steps, bound = _valley(
        lambda t: erub.gradient_descent_dynamic(gamma=gamma, alpha=alpha, steps=t), bottom
    )
    return BestSteps(steps, bound, math.ceil(2 * kappa * math.log1p(1 / (kappa * alpha))))


def best_steps_momentum_uniform(
    *, gamma: float, beta: float, alpha: float, eta0: float | None = None
) -> BestSteps:
    """argmin γ^T + η₀αT·Σ_t γ^{T−t} s_t, with s_t = (1−β)(1+β^t)/((1−β^t)(1+β)).

    Past K steps s_t is constant, the sum is a + b·γ^{T−K}, and the slope over γ^{T−K} rises from
    the step on where b ≤ a·γ^{K−T}: one root. What lies before is scanned.
    """
    gamma, alpha = _check(gamma, alpha)
    eta0 = admissible_step_at(beta=beta, gamma=gamma) if eta0 is None else eta0
    price, rate = eta0 * alpha, -math.log(gamma)
    settled = math.ceil(_FORGOTTEN / -math.log(beta))
    t = np.arange(1, settled + 1.0)
    noise = averaging_weights(beta, settled) * (1 + beta**t) / (1 + beta)
    sums = np.cumsum(gamma**-t * noise) * gamma**t
    early = gamma**t + price * t * sums
    steady = (1 - beta) / (1 + beta) / (1 - gamma)
    extra = float(sums[-1]) - steady

    def late(steps: int) -> float:
        decay = float(gamma ** (steps - settled))
        return decay * gamma**settled + price * steps * (steady + extra * decay)

    def slope(steps: float) -> float:
        growth = math.exp(min(rate * (steps - settled), 700))
        return price * (steady * growth + extra - extra * rate * steps) - rate * gamma**settled

    rising = settled + max(0.0, math.log(max(extra, 1e-300) / steady) / rate)
    bottom = rising
    if slope(rising) < 0:
        end = 2 * rising
        while slope(end) < 0:
            end *= 2
        bottom = float(brentq(slope, rising, end, rtol=1e-14))
    candidates = [(int(np.argmin(early)) + 1, float(early.min())), _valley(late, bottom)]
    candidates += [(step, late(step)) for step in range(settled, math.ceil(rising))]
    best = min(candidates, key=lambda pair: pair[1])
    return BestSteps(*best, _printed_momentum(gamma, alpha, eta0, factor=1))


def best_steps_momentum_dynamic(
    *, gamma: float, beta: float, alpha: float, eta0: float | None = None
) -> BestSteps:
    """argmin γ^T + η₀α(Σ√q_t)² with the exact momentum influence.

    Past T₀ = 2K + 2 steps Σ√q_t = P + G + (H − G)x with x = γ^{(T−T₀)/2}: H from the first K
    steps, P from the last, G the geometric middle. So the bound is a parabola in x. Shorter runs
    are scanned, unless γ^{T₀} alone already exceeds the best found.
    """
    gamma, alpha = _check(gamma, alpha)
    eta0 = admissible_step_at(beta=beta, gamma=gamma) if eta0 is None else eta0
    price, rate = eta0 * alpha, -math.log(gamma)
    settled = math.ceil(_FORGOTTEN / -math.log(beta))
    base = 2 * settled + 2
    roots = np.sqrt(momentum(gamma=gamma, beta=beta, steps=base))
    head, tail = float(roots[:settled].sum()), float(roots[settled:].sum())
    root = math.sqrt(gamma)
    middle = (1 - beta) / math.sqrt(gamma - beta**2) * root ** (settled + 3) / (1 - root)

    def late(steps: int) -> float:
        x = float(gamma ** ((steps - base) / 2))
        return float(gamma**base) * x**2 + price * (tail + middle + (head - middle) * x) ** 2

    lean = price * (middle - head)
    bottom = lean * (tail + middle) / (gamma**base + lean * (middle - head))
    x = min(max(bottom, 2.0**-54), 1.0)
    best = _valley(lambda t: late(max(t, base)), base + 2 * math.log(1 / x) / rate)
    best = (max(best[0], base), best[1])
    if gamma**base < best[1]:
        best = min(best, _scan_momentum(gamma, beta, price, base), key=lambda pair: pair[1])
    return BestSteps(*best, _printed_momentum(gamma, alpha, eta0, factor=2))


def _scan_momentum(gamma: float, beta: float, price: float, last: int) -> tuple[int, float]:
    """The least momentum bound for T = 1…last, growing q by q_i(T) = γq_i(T−1) + w_T²β^{2(T−i)}."""
    weights = averaging_weights(beta, last) ** 2
    fading = beta ** (2 * np.arange(last - 1, -1, -1.0))
    q = np.zeros(last)
    best = (1, math.inf)
    for steps in range(1, last + 1):
        q[:steps] *= gamma
        q[:steps] += weights[steps - 1] * fading[last - steps :]
        bound = gamma**steps + price * float(np.sqrt(q[:steps]).sum()) ** 2
        if bound < best[1]:
            best = (steps, bound)
    return best


def _printed_momentum(gamma: float, alpha: float, eta0: float, factor: int) -> int:
    """⌈factor·(κ/η₀) ln(1 + η₀/(κα))⌉ with κ = η₀/(2(1−γ)): the printed order, constants one."""
    kappa = eta0 / (2 * (1 - gamma))
    return math.ceil(factor * kappa / eta0 * math.log1p(eta0 / (kappa * alpha)))


def _check(gamma: float, alpha: float) -> tuple[float, float]:
    return (
        _validate.real("gamma", gamma, at_least=0, below=1),
        _validate.positive("alpha", alpha),
    )

"""Every claim of the comparison before referees who share no code with the accountant.

A method is run, what it was charged is taken from its spending as events, and the (ε, δ) of these
events is worked out again: by Google's dp_accounting, and by a second way that is written here.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from diminuendo.budget import Budget
from diminuendo.compare import whole
from diminuendo.compare.auditing import any_settings
from diminuendo.compare.convolution import Convolutional
from diminuendo.compare.methods import METHODS
from diminuendo.compare.models import Linear, Model
from diminuendo.compare.private import Private
from diminuendo.events import GaussianStep

BUDGET = Budget(epsilon=2.0, delta=1e-5)
RUN = [key for key, method in METHODS.items() if method.run is not None]
Kind = tuple[float, float]
"""Noise multiplier and sampling rate."""


def hidden(model: Model | None = None, features: int = 4) -> Private:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 60, features, generator=generator)
    y = torch.randint(3, (2, 60), generator=generator)
    x = x / x.norm(dim=2, keepdim=True)
    return Private(model or Linear(4, 3), x, y, BUDGET, seeds=[1, 2])


def kinds(events: tuple[GaussianStep, ...]) -> Counter[Kind]:
    found: Counter[Kind] = Counter()
    for event in events:
        found[event.noise_multiplier, event.sampling_rate] += event.count
    return found


def full_batch(found: Counter[Kind]) -> bool:
    return all(rate == 1 for _, rate in found)


def outside_epsilon(found: Counter[Kind], delta: float) -> float:
    """dp_accounting's optimistic ε: the exact one is not below it."""
    if full_batch(found):
        mu = math.sqrt(math.fsum(count / sigma**2 for (sigma, _), count in found.items()))
        found = Counter({(1 / mu, 1.0): 1})
    total = None
    for (sigma, rate), count in found.items():
        own = pld.from_gaussian_mechanism(
            sigma,
            sampling_prob=rate,
            value_discretization_interval=2e-4,
            pessimistic_estimate=False,
            use_connect_dots=False,
        ).self_compose(count)
        total = own if total is None else total.compose(own)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


def closed_form_delta(found: Counter[Kind], epsilon: float) -> float:
    """Full batches: Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) with 40 digits."""
    with mpmath.workdps(40):
        square = mpmath.fsum(count / mpmath.mpf(sigma) ** 2 for (sigma, _), count in found.items())
        mu, e = mpmath.sqrt(square), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(-e / mu + mu / 2) - mpmath.exp(e) * mpmath.ncdf(-e / mu - mu / 2))


def grid_delta(found: Counter[Kind], epsilon: float, width: float = 2e-4) -> float:
    """Sampled steps: the law of the total privacy loss on a grid, rounded to the side that makes
    it smaller, composed by Fourier transforms; the larger of both directions."""
    size = 1 << 17
    worst = 0.0
    for removed in (True, False):
        transform: NDArray[np.complex128] = np.ones(size // 2 + 1, dtype=np.complex128)
        for (sigma, rate), count in found.items():
            law = _loss_law(sigma, rate, removed, width, size)
            transform = transform * np.fft.rfft(law) ** count
        total = np.fft.irfft(transform, size)
        losses = width * ((np.arange(size) + size // 2) % size - size // 2)
        beyond = losses > epsilon
        worst = max(worst, float(np.sum(total[beyond] * -np.expm1(epsilon - losses[beyond]))))
    return worst


def _loss_law(
    sigma: float, rate: float, removed: bool, width: float, size: int
) -> NDArray[np.float64]:
    """Probabilities of ln(P/Q) rounded down to multiples of `width`, as a cyclic array.

    P is the law with the example, (1 − p)·N(0, σ²) + p·N(1, σ²), and Q without, or the reverse.
    Outcomes are cut into 200,000 cells; in each the smaller end's loss stands for all of it.
    """
    edges = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)
    missed = math.log1p(-rate) if rate < 1 else -math.inf
    loss = np.logaddexp(missed, math.log(rate) + (2 * edges - 1) / (2 * sigma**2))
    if not removed:
        loss = -loss
    least = np.minimum(loss[:-1], loss[1:])
    without = np.diff(stats.norm.cdf(edges, 0, sigma))
    added = np.diff(stats.norm.cdf(edges, 1, sigma))
    mass = (1 - rate) * without + rate * added if removed else without
    law = np.zeros(size)
    np.add.at(law, np.floor(least / width).astype(int) % size, mass)
    return law


def check(found: Counter[Kind], claimed: float, delta: float) -> None:
    """Neither referee's answer, rounded to the accountant's favour, is above the claim."""
    assert outside_epsilon(found, delta) <= claimed
    other = closed_form_delta if full_batch(found) else grid_delta
    assert other(found, claimed) <= delta


@pytest.mark.parametrize("key", RUN)
def test_what_a_method_was_charged_is_within_its_claim(key: str) -> None:
    run = METHODS[key].run
    assert run is not None
    for candidate in (0, 2):
        private = hidden()
        run(private, any_settings(METHODS[key], candidate))
        charged = private.granted()
        assert len(charged) == (2 if METHODS[key].alone else 1)
        assert private.claimed() <= BUDGET.epsilon
        for events in charged:
            check(kinds(events), private.claimed(), BUDGET.delta)


@pytest.mark.parametrize("key", [key for key in RUN if METHODS[key].trains("cnn")])
@torch.no_grad()
def test_what_a_convolutional_network_was_charged_is_within_its_claim(key: str) -> None:
    private = hidden(Convolutional((2, 4, 4), 3), 2 * 4 * 4 + 1)
    run = METHODS[key].run
    assert run is not None
    theta = run(private, any_settings(METHODS[key], 0))
    assert theta.shape == (2, private.model.parameters)
    assert bool(theta.isfinite().all())
    assert not torch.equal(theta, private.start())
    assert private.claimed() <= BUDGET.epsilon
    for events in private.granted():
        check(kinds(events), private.claimed(), BUDGET.delta)


def test_the_referees_would_object() -> None:
    """To a claim that is 2% too small, of full batches and of sampled steps."""
    full = Counter({(10.0, 1.0): 30, (12.0, 1.0): 20})
    sampled = Counter({(2.0, 0.3): 12, (3.0, 0.5): 6})
    for found in (full, sampled):
        true = outside_epsilon(found, 1e-5)
        other = closed_form_delta if full_batch(found) else grid_delta
        assert other(found, 0.98 * true) > 1e-5
        assert other(found, 1.02 * true) <= 1e-5
        with pytest.raises(AssertionError):
            check(found, 0.98 * true, 1e-5)


MIXED = ("correlated", "banded")


@pytest.mark.parametrize(
    "key",
    [k for k in RUN if METHODS[k].releases == "gradients" and not k.startswith(MIXED)],
)
def test_noise_is_drawn_with_the_multiplier_that_was_paid(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draw for each payment, in order; a release to one replica after the other is one draw.
    (Correlated noise is drawn at once: its covariance is tested beside its methods.)"""
    paid: list[float] = []
    drawn: list[float] = []
    pay, noised = Private.pay, Private.noised

    def watched_pay(self: Private, sigma: float, rate: float = 1.0) -> None:
        pay(self, sigma, rate)
        paid.append(sigma)

    def watched_noised(
        self: Private, sums: Tensor, bound: float, sigma: float, **more: Any
    ) -> Tensor:
        if more.get("replicas", slice(0, 1)).start == 0:
            drawn.append(sigma)
        assert len(drawn) == len(paid), "charged, then released"
        assert sigma == drawn[-1]
        return noised(self, sums, bound, sigma, **more)

    monkeypatch.setattr(Private, "pay", watched_pay)
    monkeypatch.setattr(Private, "noised", watched_noised)
    run = METHODS[key].run
    assert run is not None
    run(hidden(), any_settings(METHODS[key], 0))
    assert drawn
    assert drawn == paid


def test_objective_perturbation_before_a_referee() -> None:
    """δ by adaptive quadrature over the χ law with 25 digits, for the multiplier that is used."""
    for ridge, classes, epsilon in ((3.0, 3, 2.0), (50.0, 10, 1.0), (20.0, 2, 0.5)):
        budget = Budget(epsilon=epsilon, delta=1e-5)
        multiplier = whole.objective_multiplier(budget, ridge, 1.0, classes)
        with mpmath.workdps(25):
            m, free = 1 / mpmath.mpf(multiplier), classes - 1
            trace = (1 - mpmath.mpf(1) / classes) / (free * mpmath.mpf(ridge))
            shift = free * mpmath.log(1 + trace) + m * m / 2
            scale = 2 ** (1 - mpmath.mpf(free) / 2) / mpmath.gamma(mpmath.mpf(free) / 2)
            start = max((epsilon - shift) / m, mpmath.mpf(0))

            def integrand(
                c: mpmath.mpf,
                m: mpmath.mpf = m,
                shift: mpmath.mpf = shift,
                free: int = free,
                scale: mpmath.mpf = scale,
                epsilon: float = epsilon,
            ) -> mpmath.mpf:
                density = scale * c ** (free - 1) * mpmath.exp(-c * c / 2)
                return density * (1 - mpmath.exp(epsilon - shift - m * c))

            exact = float(mpmath.quad(integrand, [start, start + 4, start + 10, start + 25]))
        assert 0.98 * budget.delta <= exact <= budget.delta

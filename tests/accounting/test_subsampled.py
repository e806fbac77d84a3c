# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Referees, laws and corner cases for the certified bracket of subsampled steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from diminuendo._validate import Vector
from diminuendo.accounting.subsampled.bounds import (
    delta_bounds,
    epsilon_bounds,
    epsilon_upper,
    running_epsilon,
)
from diminuendo.accounting.subsampled.closed_form import gaussian_epsilon, gaussian_log_delta
from diminuendo.accounting.subsampled.nodes import (
    direct_mixture,
    interpolated_mixture,
    total_variation,
)
from diminuendo.accounting.subsampled.solve import Bracket, mixture_epsilon
from diminuendo.accounting.subsampled.transform import outcome_range, tilted_transforms


def arrays(sigmas, rates, counts) -> tuple[Vector, Vector, Vector]:
    return (
        np.asarray(sigmas, dtype=np.float64),
        np.asarray(rates, dtype=np.float64),
        np.asarray(counts, dtype=np.float64),
    )


def bounds(sigmas, rates, counts, delta) -> Bracket:
    return epsilon_bounds(*arrays(sigmas, rates, counts), delta)


def pld_bracket(sigmas, rates, counts, delta, interval) -> list[float]:
    answers = []
    for pessimistic in (False, True):
        total: Any = None
        for sigma, rate, count in zip(sigmas, rates, counts, strict=True):
            law = pld.from_gaussian_mechanism(
                sigma,
                sampling_prob=rate,
                value_discretization_interval=interval,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
            ).self_compose(int(count))
            total = law if total is None else total.compose(law)
        answers.append(total.get_epsilon_for_delta(delta))
    return answers


REFEREE = [
    ([0.6], [0.01], [100], 1e-5, 1e-3),
    ([1.0], [0.01], [1000], 1e-5, 1e-4),
    ([1.2, 0.8], [0.01, 0.02], [100, 50], 1e-6, 1e-4),
    ([0.5], [0.1], [10], 1e-8, 1e-3),
    ([2.0], [0.5], [50], 1e-5, 1e-3),
    ([5.0, 2.0], [0.3, 1.0], [50, 2], 1e-5, 1e-3),
    ([0.3], [1e-4], [100], 1e-6, 1e-3),
    ([0.7, 1.0, 3.0], [0.001, 0.05, 0.9], [300, 20, 4], 1e-7, 1e-3),
]


@pytest.mark.parametrize(("sigmas", "rates", "counts", "delta", "interval"), REFEREE)
def test_against_discretised_pld(sigmas, rates, counts, delta, interval):
    ours = bounds(sigmas, rates, counts, delta)
    optimistic, pessimistic = pld_bracket(sigmas, rates, counts, delta, interval)
    assert ours.lower <= pessimistic * (1 + 1e-6)
    assert ours.upper >= optimistic * (1 - 1e-6)
    assert ours.lower == pytest.approx(pessimistic, rel=2e-3)


random_schedules = st.tuples(
    st.lists(
        st.tuples(st.floats(0.6, 4.0), st.floats(0.005, 0.5), st.integers(5, 60)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1e-4, 1e-6, 1e-8]),
)


@settings(max_examples=12)
@given(random_schedules)
def test_random_schedules_against_discretised_pld(schedule):
    phases, delta = schedule
    sigmas, rates, counts = zip(*phases, strict=True)
    ours = bounds(sigmas, rates, counts, delta)
    optimistic, pessimistic = pld_bracket(sigmas, rates, counts, delta, 1e-3)
    assert ours.lower <= pessimistic * (1 + 1e-6)
    assert ours.upper >= optimistic * (1 - 1e-6)


def test_known_value():
    ours = bounds([0.6], [0.01], [100], 1e-5)
    assert ours.lower > 3.81
    assert ours.upper < 3.83


def test_full_batch_closed_form():
    mu = math.sqrt(50 / 4.0 + 10 / 9.0)
    ours = bounds([2.0, 3.0], [1.0, 1.0], [50, 10], 1e-6)
    low, high = gaussian_epsilon(1e-6, mu)
    assert ours.lower == pytest.approx(low, rel=1e-9)
    assert ours.upper == pytest.approx(high, rel=1e-9)
    assert ours.lower <= ours.upper
    assert gaussian_log_delta(high, mu)[1] <= math.log(1e-6)


def test_rate_close_to_one_approaches_the_closed_form():
    exact = gaussian_epsilon(1e-6, math.sqrt(20.0) / 3.0)[1]
    ours = bounds([3.0], [1.0 - 1e-9], [20], 1e-6)
    assert ours.lower <= exact * (1 + 1e-6)
    assert ours.upper >= exact * (1 - 1e-6)


@pytest.mark.parametrize(
    ("sigma", "rate", "delta"),
    [(0.3, 1e-2, 1e-6), (0.6, 0.1, 1e-5), (1.0, 0.5, 1e-8), (3.0, 0.9, 1e-4), (1.0, 1e-3, 1e-6)],
)
def test_single_step_engine_encloses_closed_form(sigma, rate, delta):
    mixture = direct_mixture(np.array([1 / sigma]), np.array([rate]), np.ones(1), 0.0)
    engine = mixture_epsilon(mixture, delta, 5e-4)
    exact = bounds([sigma], [rate], [1], delta)
    assert engine.lower <= exact.upper
    assert exact.lower <= engine.upper
    assert exact.upper - exact.lower <= 1e-9 * exact.upper


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "eps"),
    [(1.0, 0.1, 20, 1.0), (0.6, 0.05, 10, 0.5), (2.0, 0.5, 8, 0.3)],
)
def test_monte_carlo(sigma, rate, steps, eps):
    rng = np.random.default_rng(7)
    draws = 200_000
    shares = []
    for remove in (True, False):
        total = np.zeros(draws)
        for _ in range(steps):
            x = sigma * rng.standard_normal(draws)
            if remove:
                x += rng.random(draws) < rate
            loss = np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2)))
            total += loss if remove else -loss
        sample = np.maximum(-np.expm1(eps - total), 0.0)
        shares.append((sample.mean(), sample.std() / math.sqrt(draws)))
    mean, deviation = max(shares)
    ours = delta_bounds(*arrays([sigma], [rate], [steps]), eps)
    assert ours.lower <= mean + 5 * deviation
    assert ours.upper >= mean - 5 * deviation


def test_single_step_curve_is_convex_in_theta_and_rate():
    mu = np.linspace(0.05, 3.0, 60)
    theta = total_variation(mu)
    for eps in np.linspace(-6.0, 6.0, 41):
        curve = ndtr(-eps / mu + mu / 2) - np.exp(eps) * ndtr(-eps / mu - mu / 2)
        slope = np.diff(curve) / np.diff(theta)
        assert np.all(np.diff(slope) >= -1e-9)
    rates = np.linspace(0.05, 0.95, 40)
    for alpha in np.geomspace(0.1, 10.0, 31):
        inner = np.maximum(1 + (alpha - 1) / rates, 1e-300)
        eps = np.log(inner)
        curve = rates * (ndtr(-eps + 0.5) - inner * ndtr(-eps - 0.5))
        curve = np.where(alpha > 1 - rates, curve, 1 - alpha)
        assert np.all(np.diff(curve, 2) >= -1e-9)


def test_transform_error_bound_holds():
    """Against brute-force quadrature on a much finer grid."""
    mu, rate = np.array([0.5, 1.7]), np.array([0.02, 0.3])
    span = outcome_range(mu, rate, math.log(1e-14))
    for remove, lam in ((True, 3.0), (False, 8.0)):
        du, size = 0.9, 60
        ours = tilted_transforms(mu, rate, span, lam, du, size, remove=remove)
        for node in range(2):
            z = np.linspace(span[0][node], span[1][node], 400_001)
            loss = np.log1p(rate[node] * np.expm1(mu[node] * z - mu[node] ** 2 / 2))
            base = np.exp((1 + lam if remove else -lam) * loss - z * z / 2)
            sign = 1.0 if remove else -1.0
            trapezoid = np.ones(z.size)
            trapezoid[[0, -1]] = 0.5
            for k in (0, 1, 17, 59):
                value = np.sum(trapezoid * base * np.exp(1j * sign * k * du * loss))
                value /= np.sum(trapezoid * base)
                assert abs(value - ours.phi[node, k]) <= 1e-8
            assert ours.error[node] < 1e-11


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("vary", ["sigma", "both"])
def test_interpolation_encloses_direct(upper, vary):
    sigma = np.linspace(1.4, 0.8, 90)
    rate = np.full(90, 0.01) if vary == "sigma" else np.linspace(0.01, 0.02, 90)
    direct = mixture_epsilon(direct_mixture(1 / sigma, rate, np.ones(90), 0.0), 1e-5, 1e-4)
    mixture = interpolated_mixture(1 / sigma, rate, np.ones(90), 0.0, 0.1, upper=upper)
    assert mixture.mu.size < 90
    found = mixture_epsilon(mixture, 1e-5, 1e-4)
    if upper:
        assert found.upper >= direct.lower
        assert found.upper <= 1.02 * direct.upper
    else:
        assert found.lower <= direct.upper
        assert found.lower >= 0.95 * direct.lower


def test_many_distinct_steps():
    sigma = np.linspace(1.5, 0.8, 300)
    rate, count = np.full(300, 0.01), np.ones(300)
    found = epsilon_bounds(sigma, rate, count, 1e-5)
    assert found.upper - found.lower <= 1e-3 * found.upper
    direct = mixture_epsilon(direct_mixture(1 / sigma, rate, np.ones(300), 0.0), 1e-5, 1e-4)
    assert found.lower <= direct.upper
    assert found.upper >= direct.lower
    assert found.lower <= epsilon_upper(sigma, rate, count, 1e-5) <= 1.002 * found.upper


settings_of_steps = st.tuples(
    st.floats(0.5, 10.0), st.floats(1e-3, 0.9), st.integers(20, 2000), st.floats(-10.0, -4.0)
)


@settings(max_examples=15)
@given(settings_of_steps, st.sampled_from(["sigma", "rate", "count", "delta"]))
def test_monotone(setting, which):
    sigma, rate, count, exponent = setting
    worse = {"sigma": sigma, "rate": rate, "count": count, "delta": exponent}
    worse["sigma"] *= 0.8 if which == "sigma" else 1.0
    worse["rate"] *= 1.1 if which == "rate" else 1.0
    worse["count"] += count if which == "count" else 0
    worse["delta"] -= 1.0 if which == "delta" else 0.0
    first = bounds([sigma], [rate], [count], 10.0**exponent)
    second = bounds([worse["sigma"]], [worse["rate"]], [worse["count"]], 10.0 ** worse["delta"])
    assert 0.0 <= first.lower <= first.upper < math.inf
    assert first.lower <= second.upper


@settings(max_examples=10)
@given(settings_of_steps)
def test_delta_and_epsilon_agree(setting):
    sigma, rate, count, exponent = setting
    found = bounds([sigma], [rate], [count], 10.0**exponent)
    below = delta_bounds(*arrays([sigma], [rate], [count]), found.upper)
    assert below.lower <= 10.0**exponent * (1 + 1e-9)
    if found.lower > 0.0:
        above = delta_bounds(*arrays([sigma], [rate], [count]), found.lower)
        assert above.upper >= 10.0**exponent * (1 - 1e-9)


def test_order_and_repetition_do_not_matter():
    first = bounds([0.8, 1.2, 0.8], [0.02, 0.05, 0.02], [10, 5, 20], 1e-6)
    second = bounds([1.2, 0.8], [0.05, 0.02], [5, 30], 1e-6)
    assert first == second
    many = bounds([1.1] * 40, [0.03] * 40, [1] * 40, 1e-6)
    assert many == bounds([1.1], [0.03], [40], 1e-6)


def test_running_epsilon():
    sigma, rate = np.linspace(1.5, 0.9, 200), np.full(200, 0.02)
    sigma[50], rate[50] = 20.0, 1.0
    running = running_epsilon(sigma, rate, 1e-5)
    assert running.shape == (200,)
    assert np.all(np.diff(running) >= 0.0)
    for steps in (1, 2, 9, 51, 120, 200):
        ones = np.ones(steps)
        exact = epsilon_bounds(sigma[:steps], rate[:steps], ones, 1e-5)
        assert exact.lower <= running[steps - 1] <= 1.01 * exact.upper


def test_running_epsilon_with_rare_sampling_and_leading_full_batches():
    sigma, rate = np.linspace(1.5, 0.8, 120), np.full(120, 1e-4)
    sigma[:2], rate[:2] = 500.0, 1.0
    running = running_epsilon(sigma, rate, 1e-8)
    assert np.all(np.isfinite(running))
    assert np.all(np.diff(running) >= 0.0)
    for steps in (1, 2, 3, 60, 120):
        ones = np.ones(steps)
        exact = epsilon_bounds(sigma[:steps], rate[:steps], ones, 1e-8)
        assert exact.lower <= running[steps - 1]


CORNERS = list(
    itertools.product(
        [0.3, 1.0, 100.0], [1e-6, 1e-2, 0.5, 1.0], [1, 100, 10**6], [1e-12, 1e-5, 1e-2]
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.3, 1.0, 100.0])
def test_corners(sigma):
    for case in CORNERS:
        if case[0] != sigma:
            continue
        _, rate, count, delta = case
        found = bounds([sigma], [rate], [count], delta)
        assert 0.0 <= found.lower <= found.upper < math.inf, case
        limit = 1e-3 if 0.1 <= found.upper <= 20.0 else 5e-3
        assert found.upper - found.lower <= limit * max(found.upper, 1e-3), (case, found)


def convolved_delta(sigmas: Vector, rate: float, eps: float, step: float = 1e-5) -> float:
    """δ(ε) when a record is removed, by convolution on a grid: each atom split by its mean."""
    size = 1 << 18
    total = np.ones(size // 2 + 1, dtype=np.complex128)
    for sigma in sigmas:
        mu = 1 / sigma
        z = np.linspace(-9, mu + 9, 40_001)
        losses = np.log1p(rate * np.expm1(mu * z - mu * mu / 2))
        density = np.exp(-z * z / 2) * (1 - rate) + rate * np.exp(-((z - mu) ** 2) / 2)
        mass = density / density.sum()
        place = losses / step
        below = np.floor(place).astype(int)
        part = place - below
        law = np.bincount(below % size, weights=mass * (1 - part), minlength=size)
        law += np.bincount((below + 1) % size, weights=mass * part, minlength=size)
        total *= np.fft.rfft(law)
    masses = np.fft.irfft(total, size)
    index = np.arange(size)
    values = np.where(index < 0.9 * size, index, index - size) * step
    return float(masses @ np.maximum(-np.expm1(eps - values), 0))


@pytest.mark.parametrize(
    ("sigmas", "delta", "width"),
    [
        (np.geomspace(0.6, 3, 98), 1.3e-4, 0.001),
        (np.geomspace(0.6, 3, 98), 3e-4, 0.001),
        (np.geomspace(0.7, 10, 98), 1e-5, 0.001),
        (np.geomspace(0.7, 10, 98), 1e-4, 0.001),
        (np.geomspace(0.5, 5, 98), 3e-4, 0.001),
        (np.linspace(0.45, 1, 98), 3e-4, 0.001),
        # ε = 1.3e-5: it was 2.6% wide
        pytest.param(np.linspace(0.737, 1.58, 98), 4.68e-4, 0.01, marks=pytest.mark.slow),
    ],
)
def test_many_sigmas_at_a_tiny_rate(sigmas, delta, width):
    """Losses from 1e-4 to above one at once: brackets under 0.1%, not a quarter."""
    found = bounds(sigmas, np.full(98, 1e-4), np.ones(98), delta)
    assert 0 < found.upper - found.lower < width * found.upper
    assert convolved_delta(sigmas, 1e-4, found.upper) <= delta * (1 + 2e-3)
    assert convolved_delta(sigmas, 1e-4, found.lower) >= delta * (1 - 2e-3)


def test_many_large_sigmas_at_a_tiny_rate():
    """ε = 6.5e-5, from losses that are all small: 0.26% wide."""
    sigmas = np.linspace(7.65, 13.4, 98)
    found = bounds(sigmas, np.full(98, 1e-4), np.ones(98), 1.5e-5)
    assert 0 < found.upper - found.lower < 0.001 * found.upper
    assert convolved_delta(sigmas, 1e-4, found.upper, 2e-7) <= 1.5e-5
    assert convolved_delta(sigmas, 1e-4, found.lower, 2e-7) >= 1.5e-5


tiny = st.lists(st.tuples(st.floats(0.2, 3), st.floats(1e-8, 1e-5)), min_size=2, max_size=5)


@settings(max_examples=5)
@given(tiny, st.floats(1e-4, 1))
def test_delta_is_never_above_the_chance_of_being_noticed(steps, eps):
    sigmas, rates = map(np.array, zip(*steps, strict=True))
    union = float(np.sum(rates * total_variation(1 / sigmas)))
    assert delta_bounds(sigmas, rates, np.ones(len(steps)), eps).upper <= union * (1 + 1e-9)
    assert bounds(sigmas, rates, np.ones(len(steps)), min(union * 1.01, 0.5)).upper == 0
    assert running_epsilon(sigmas, rates, min(union * 1.01, 0.5))[-1] == 0


def test_scattered_tiny_rates():
    sigmas, rates, counts = arrays([0.204, 0.935], [1.6e-7, 1.8e-6], [1, 1])
    found = delta_bounds(sigmas, rates, counts, 0.0125)
    assert found.lower <= 7.9e-8 <= found.upper <= 1e-6


@pytest.mark.parametrize("eps", [20.0, 699.0, 700.0, 710.0, 1e4])
def test_delta_at_a_large_epsilon_is_a_number(eps):
    one = delta_bounds(*arrays([1.0], [1e-8], [1]), eps)
    two = delta_bounds(*arrays([1.0, 2.0], [1e-8, 1e-3], [1, 3]), eps)
    for found in (one, two):
        assert 0 <= found.lower <= found.upper < 1e-20

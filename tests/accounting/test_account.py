# mypy: allow-untyped-defs, allow-incomplete-defs
"""ε of schedules: laws, closed forms, edges, and what a budget allows with the rest fixed."""

from __future__ import annotations

import math
from typing import Literal

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import diminuendo as dim
from diminuendo import accounting
from diminuendo.accounting import renyi
from diminuendo.accounting.account import Releases
from diminuendo.budget import Relation, epsilon_of

sigmas_lists = st.lists(st.floats(0.6, 4), min_size=1, max_size=4).map(lambda s: s * 25)
rates = st.floats(-2.5, -0.1).map(lambda x: 10**x)
deltas = st.floats(-10, -4).map(lambda x: 10**x)
SLACK = 1 + 2e-3
"""Two brackets of width 5e-4 may overlap; a law is broken only beyond that."""


def constant(sigma: float, rate: float, steps: int, delta: float) -> accounting.Bracket:
    return Releases(np.array([sigma]), np.array([rate]), np.array([float(steps)])).bracket(delta)


@given(sigmas=sigmas_lists, delta=deltas)
def test_rate_one_is_the_closed_form(sigmas: list[float], delta: float) -> None:
    R = math.fsum(s**-2 for s in sigmas)
    assert dim.epsilon(sigmas, delta) == pytest.approx(epsilon_of(R, delta=delta), rel=1e-8)


@settings(max_examples=15)
@given(sigmas=sigmas_lists, rate=rates, delta=deltas, more=st.floats(1.02, 3))
def test_monotone(sigmas: list[float], rate: float, delta: float, more: float) -> None:
    base = accounting.bracket(sigmas, delta, rate)
    assert 0 <= base.lower <= base.upper
    quieter = [more * s for s in sigmas]
    assert dim.epsilon(quieter, delta, rate) <= base.upper * SLACK + 1e-6
    assert dim.epsilon(sigmas, min(delta * more, 0.5), rate) <= base.upper * SLACK + 1e-6
    assert dim.epsilon(sigmas, delta, min(rate * more, 1)) >= base.lower / SLACK - 1e-6
    assert dim.epsilon([*sigmas, 2.0], delta, rate) >= base.lower / SLACK - 1e-6


@settings(max_examples=15)
@given(sigmas=sigmas_lists, rate=rates, delta=deltas, seed=st.integers(0, 999))
def test_order_and_grouping_do_not_matter(
    sigmas: list[float], rate: float, delta: float, seed: int
) -> None:
    shuffled = list(np.random.default_rng(seed).permutation(sigmas))
    assert dim.epsilon(sigmas, delta, rate) == dim.epsilon(shuffled, delta, rate)
    three = dim.epsilon(sigmas * 3, delta, rate)
    unique, counts = np.unique(sigmas * 3, return_counts=True)
    grouped = Releases(unique, np.full(unique.size, rate), counts.astype(float))
    assert three == grouped.epsilon(delta, "add-remove")


@settings(max_examples=15)
@given(sigmas=sigmas_lists, rate=rates, delta=deltas)
def test_never_above_renyi(sigmas: list[float], rate: float, delta: float) -> None:
    one = np.array(sigmas), np.full(len(sigmas), rate), np.ones(len(sigmas))
    assert dim.epsilon(sigmas, delta, rate) <= renyi.epsilon(*one, delta) * SLACK + 1e-6


@settings(max_examples=15)
@given(sigmas=sigmas_lists, rate=rates, epsilon=st.floats(0.01, 5))
def test_delta_is_the_inverse(sigmas: list[float], rate: float, epsilon: float) -> None:
    delta = dim.delta(sigmas, epsilon, rate)
    assert 0 <= delta <= 1
    if 1e-12 < delta < 0.5:
        assert accounting.bracket(sigmas, delta, rate).lower <= epsilon * SLACK
        assert accounting.bracket(sigmas, delta / 1.02, rate).upper >= epsilon / SLACK


def test_the_central_limit_is_not_what_is_reported() -> None:
    """σ = 0.6, rate 0.01, 100 steps: the CLT says 1.50, the truth is 3.82."""
    ends = constant(0.6, 0.01, 100, 1e-5)
    assert 3.80 < ends.lower <= ends.upper < 3.83


def test_mixtures_of_rates_and_full_batches() -> None:
    sigmas, rates = np.array([1.0, 2.0, 30.0, 1.5]), np.array([0.01, 0.1, 1.0, 0.3])
    whole = accounting.bracket(np.tile(sigmas, 5), 1e-6, np.tile(rates, 5))
    assert whole.upper - whole.lower <= 1e-3 * whole.upper
    for part in range(4):
        chosen = np.arange(20) % 4 != part
        rest = dim.epsilon(np.tile(sigmas, 5)[chosen], 1e-6, np.tile(rates, 5)[chosen])
        assert rest < whole.upper
    assert dim.epsilon([30.0] * 5, 1e-6) < whole.lower


def test_replace_one_is_bounded_by_group_privacy() -> None:
    sigmas = np.full(100, 2.0)
    one = dim.epsilon(sigmas, 1e-6, 0.01)
    both = dim.epsilon(sigmas, 1e-6, 0.01, relation="replace-one")
    assert 2 * one < both < 4 * one
    half = dim.delta(sigmas, both / 2, 0.01)
    assert half * (1 + math.exp(both / 2)) <= 1e-6 * (1 + 1e-3)
    assert dim.delta(sigmas, both, 0.01, relation="replace-one") <= 1e-6 * (1 + 1e-3)
    with pytest.raises(dim.InputError, match="group privacy"):
        dim.epsilon(np.full(1000, 0.3), 1e-6, 0.9, relation="replace-one")


EDGES = [
    (0.3, 0.01, 10, 1e-5),
    (0.2, 0.01, 1, 1e-5),
    (1.0, 1e-6, 1, 1e-12),
    (1.0, 1e-6, 10**6, 1e-12),
    (0.3, 1e-6, 10**6, 1e-12),
    (0.3, 0.9, 1, 1e-12),
    (100.0, 0.9, 10**6, 1e-2),
    (100.0, 1e-6, 1, 1e-2),
    (100.0, 1e-6, 10**6, 1e-12),
    (0.5, 0.5, 100, 1e-12),
    (1.0, 0.01, 10**6, 1e-5),
    (10.0, 0.999999, 100, 1e-8),
    (3.0, 0.1, 1000, 1e-3),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_edges_are_finite_and_tight(edge: tuple[float, float, int, float]) -> None:
    ends = constant(*edge)
    assert math.isfinite(ends.upper)
    assert 0 <= ends.lower <= ends.upper
    if 1e-3 <= ends.upper <= 100:
        assert ends.upper - ends.lower <= (1e-3 if 0.1 <= ends.upper <= 20 else 5e-3) * ends.upper


@pytest.mark.parametrize(
    ("sigmas", "delta", "rate"),
    [
        ([0.15] * 3, 1e-10, 0.3),
        ([0.2] * 2, 1e-12, 0.9),
        ([0.1] * 3, 1e-10, 0.9),
        (list(np.linspace(0.05, 0.06, 70)), 1e-5, 0.01),
        ([1e200] * 3, 1e-5, 0.5),
    ],
)
def test_little_and_much_noise(sigmas: list[float], delta: float, rate: float) -> None:
    ends = accounting.bracket(sigmas, delta, rate)
    assert 0 <= ends.lower <= ends.upper < math.inf


@pytest.mark.parametrize(("sigma", "delta"), [(1e6, 1e-12), (1e8, 1e-12), (10.0, 0.0398)])
def test_full_batch_bracket_against_fifty_digits(sigma: float, delta: float) -> None:
    """ε is where the 50-digit δ crosses; also for hardly any privacy loss at all."""
    ends = accounting.bracket([sigma], delta)
    with mpmath.workdps(50):
        mu = 1 / mpmath.mpf(sigma)

        def exact(epsilon: float) -> mpmath.mpf:
            e = mpmath.mpf(epsilon)
            return mpmath.ncdf(-e / mu + mu / 2) - mpmath.exp(e) * mpmath.ncdf(-e / mu - mu / 2)

        assert exact(ends.upper) <= delta
        assert ends.lower == 0 or exact(ends.lower) >= delta
        assert exact(float(accounting.running_epsilon([sigma], delta)[0])) <= delta


def test_running_epsilon() -> None:
    rng = np.random.default_rng(1)
    sigmas = rng.uniform(0.8, 2, 40)
    curve = accounting.running_epsilon(sigmas, 1e-5, 0.1)
    assert curve.shape == (40,)
    assert (np.diff(curve) >= 0).all()
    for t in (1, 2, 17, 40):
        ends = accounting.bracket(sigmas[:t], 1e-5, 0.1)
        assert ends.lower <= curve[t - 1] <= ends.upper * 1.01 + 1e-4
    full = accounting.running_epsilon(sigmas + 9, 1e-5)
    assert full[-1] == pytest.approx(dim.epsilon(sigmas + 9, 1e-5), rel=1e-8)


@pytest.mark.parametrize(("epsilon", "rate"), [(2.0, 0.01), (0.05, 0.1), (8.0, 0.3)])
@pytest.mark.parametrize("name", ["uniform", "exponential", "step"])
def test_calibrate(epsilon: float, rate: float, name: str) -> None:
    shape = dim.schedules.shapes.falling(name, 40, 0.4)
    budget = dim.Budget(epsilon=epsilon, delta=1e-5)
    sigmas = dim.calibrate(shape, budget, rate)
    assert epsilon * (1 - 1e-4) <= dim.epsilon(sigmas, 1e-5, rate) <= epsilon
    np.testing.assert_allclose(sigmas / sigmas[0], shape / shape[0])
    np.testing.assert_allclose(dim.calibrate(1e3 * shape, budget, rate), sigmas, rtol=1e-3)


def test_calibration_does_not_stop_on_a_tolerance_in_epsilon() -> None:
    """ε = 0.05 asks for relative, not absolute, closeness: no more noise than is needed."""
    budget = dim.Budget(epsilon=0.05, delta=1e-5)
    sigma = dim.calibrate(np.ones(1000), budget, 0.1)[0]
    assert dim.epsilon(np.full(1000, 0.999 * sigma), 1e-5, 0.1) > 0.05


def test_most_steps() -> None:
    budget = dim.Budget(epsilon=2, delta=1e-5)
    for sigma, rate in ((1.0, 0.01), (2.0, 0.05), (20.0, 1.0)):
        steps = accounting.most_steps(sigma, budget, rate)
        assert dim.epsilon(np.full(steps, sigma), 1e-5, rate) <= 2
        assert dim.epsilon(np.full(steps + 1, sigma), 1e-5, rate) > 2
    assert accounting.most_steps(0.3, dim.Budget(epsilon=0.1, delta=1e-9), 0.5) == 0


def test_largest_sampling_rate_and_clip_to_noise() -> None:
    budget, sigmas = dim.Budget(epsilon=2, delta=1e-5), np.linspace(2, 1, 50)
    rate = accounting.largest_sampling_rate(sigmas, budget)
    assert 2 * (1 - 1e-4) <= dim.epsilon(sigmas, 1e-5, rate) <= 2
    assert accounting.largest_sampling_rate(np.full(5, 1e3), budget) == 1
    ratio = accounting.largest_clip_to_noise(np.ones(50), budget, 0.1)
    assert ratio == pytest.approx(1 / dim.calibrate(np.ones(50), budget, 0.1)[0])


def test_nothing_released_costs_nothing() -> None:
    assert dim.epsilon([], 1e-5) == 0
    assert dim.epsilon([], 1e-5, 0.01) == 0
    assert dim.delta([], 1.0) == 0
    assert accounting.bracket([], 1e-5) == (0, 0)
    assert accounting.running_epsilon([], 1e-5, 0.1).size == 0


BAD = [
    (lambda: dim.epsilon([0.0], 1e-5), r"sigmas\[0\].*infinite"),
    (lambda: dim.epsilon([-1.0], 1e-5, 0.1), r"sigmas\[0\]"),
    (lambda: dim.epsilon([1.0, math.nan], 1e-5), r"sigmas\[1\]"),
    (lambda: dim.epsilon([math.inf], 1e-5), r"sigmas\[0\]"),
    (lambda: dim.epsilon(["a"], 1e-5), "sigmas"),
    (lambda: dim.epsilon([10**400], 1e-5), "sigmas"),
    (lambda: dim.epsilon([True, True], 1e-5), "sigmas"),
    (lambda: dim.epsilon([1 + 2j], 1e-5), "sigmas"),
    (lambda: dim.epsilon(["3", "4"], 1e-5), "sigmas"),
    (lambda: dim.epsilon([], 1e-5, 7.0), "sampling_rate"),
    (lambda: dim.epsilon([0.01] * 3, 1e-5, 0.5), "at least 0.05"),
    (lambda: dim.epsilon([1.0] * 3, 1e-5, 1e-9), "sampling_rate"),
    (lambda: dim.calibrate([1e-300, 1e300], dim.Budget(epsilon=1, delta=1e-5)), "shape"),
    (lambda: dim.epsilon([1.0], 0), "delta"),
    (lambda: dim.epsilon([1.0], 1), "delta"),
    (lambda: dim.epsilon([1.0], -1e-5), "delta"),
    (lambda: dim.epsilon([1.0], 1e-5, 0), "sampling_rate"),
    (lambda: dim.epsilon([1.0], 1e-5, 1.1), "sampling_rate"),
    (lambda: dim.epsilon([1.0], 1e-5, math.nan), "sampling_rate"),
    (lambda: dim.epsilon([1.0, 2.0, 3.0], 1e-5, [0.1, 0.2]), "one for each of the 3 steps"),
    (lambda: dim.epsilon([1.0], 1e-5, 0.1, relation="swap"), "relation"),  # type: ignore[arg-type]
    (lambda: dim.delta([1.0], -1), "epsilon"),
    (lambda: dim.calibrate([], dim.Budget(epsilon=1, delta=1e-5), 0.1), "shape"),
    (lambda: dim.calibrate([1, 0], dim.Budget(epsilon=1, delta=1e-5), 0.1), r"shape\[1\]"),
    (
        lambda: dim.calibrate([1], dim.Budget(epsilon=1, delta=1e-5, conversion="zcdp"), 0.1),
        "exact",
    ),
    (lambda: dim.calibrate([1], dim.Budget(epsilon=1, delta=1e-2), 1e-3), "within reach"),
    (lambda: accounting.largest_sampling_rate([], dim.Budget(epsilon=1, delta=1e-5)), "sigmas"),
    (lambda: accounting.most_steps(0, dim.Budget(epsilon=1, delta=1e-5)), "sigma"),
]


@pytest.mark.parametrize(("call", "said"), BAD)
def test_bad_input(call, said: str) -> None:
    with pytest.raises(dim.InputError, match=said):
        call()


@pytest.mark.parametrize("conversion", ["exact", "zcdp"])
def test_one_claim_for_full_batches_and_samples(conversion: Literal["exact", "zcdp"]) -> None:
    budget = dim.Budget(epsilon=3, delta=1e-5, conversion=conversion)
    events = [dim.GaussianStep(noise_multiplier=s, count=n) for s, n in ((8.0, 3), (5.0, 2))]
    R = 3 / 64 + 2 / 25
    assert accounting.claim(events, budget) == pytest.approx(budget.epsilon_of(R), rel=1e-9)
    assert accounting.claim(events, budget) >= budget.epsilon_of(R)
    assert accounting.claim(events[::-1], budget) == accounting.claim(events, budget)
    drawn = [*events, dim.GaussianStep(noise_multiplier=1.0, sampling_rate=0.1, count=7)]
    expected = dim.epsilon([8.0] * 3 + [5.0] * 2 + [1.0] * 7, 1e-5, [1.0] * 5 + [0.1] * 7)
    assert accounting.claim(drawn, budget) == expected
    assert accounting.claim([], budget) == 0
    many = [dim.GaussianStep(noise_multiplier=1e5, count=10**9)]
    assert accounting.claim(many, budget) == pytest.approx(budget.epsilon_of(0.1), rel=1e-9)


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_a_delta_too_small_for_a_double_is_not_called_zero(relation: Relation) -> None:
    """The true δ is above 10⁻³⁰⁰⁰⁰ and not 0: an upper bound may not be 0 either."""
    for rate in (1.0, 0.01, 1e-8):
        assert 0 < dim.delta([1.0], 600, rate, relation=relation) < 1e-30
    assert dim.delta([], 600) == 0

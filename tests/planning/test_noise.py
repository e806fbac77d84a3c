"""The noise of subsampled plans: stationary, unbeaten by simple competitors, on the budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import diminuendo as dim
from diminuendo import influence, schedules
from diminuendo.accounting.subsampled import DeltaModel
from diminuendo.planning import optimal_sigmas

CASES = [
    # steps, rate, ε, γ
    (3, 0.5, 2.0, 0.3),
    (5, 0.5, 8.0, 0.5),
    (8, 0.9, 1.0, 0.8),
    (12, 0.05, 2.0, 0.9),
    (40, 0.1, 4.0, 0.9),
    (100, 0.02, 1.0, 0.98),
]


def competitors(sigmas: np.ndarray) -> Iterator[np.ndarray]:
    """Exponentials of other rates, powers of the optimum, linear shapes, and uniform noise."""
    steps = sigmas.size
    fall = float(sigmas[-1] / sigmas[0])
    yield np.ones(steps)
    for power in (0.8, 1.2):
        yield sigmas**power
        yield schedules.shapes.falling("exponential", steps, min(fall**power, 1.0))
        yield schedules.shapes.falling("linear", steps, min(fall**power, 1.0))


@pytest.mark.parametrize(("steps", "rate", "epsilon", "gamma"), CASES)
def test_no_competitor_beats_the_optimal_schedule(
    steps: int, rate: float, epsilon: float, gamma: float
) -> None:
    budget = dim.Budget(epsilon=epsilon, delta=1e-5)
    q = influence.gradient_descent(gamma=gamma, steps=steps)
    sigmas = optimal_sigmas(q, budget, rate)
    assert epsilon * (1 - 1e-4) <= dim.epsilon(sigmas, 1e-5, rate) <= epsilon
    best = float(np.sum(q * sigmas**2))
    for shape in competitors(sigmas):
        other = dim.calibrate(shape, budget, rate)
        assert np.sum(q * other**2) >= best * (1 - 5e-4)


@pytest.mark.slow
def test_the_optimal_schedule_where_rare_draws_decide_delta() -> None:
    """Transforms turn fast with σ there. Interpolated on fixed nodes, 0.44% of noise was left."""
    steps, rate = 125, 0.003115
    budget = dim.Budget(epsilon=0.73, delta=1e-9)
    q = influence.gradient_descent(gamma=0.9824, steps=steps)
    sigmas = optimal_sigmas(q, budget, rate)
    assert (np.diff(sigmas) <= 0).all()
    shape = schedules.shapes.falling("linear", steps, float(sigmas[-1] / sigmas[0]))
    other = dim.calibrate(shape, budget, rate)
    assert np.sum(q * other**2) >= np.sum(q * sigmas**2) * (1 - 5e-4)


def test_the_marginal_price_is_in_the_logarithm_of_the_transform() -> None:
    """Pricing one more step by ψ − 1 left 1.44% and 1.28% of the noise on the table."""
    for steps, rate, epsilon, gamma, left in [(3, 0.5, 2, 0.3, 0.9856), (5, 0.5, 8, 0.5, 0.9873)]:
        budget = dim.Budget(epsilon=epsilon, delta=1e-5)
        q = influence.gradient_descent(gamma=gamma, steps=steps)
        uniform = float(np.sum(q * dim.calibrate(np.ones(steps), budget, rate) ** 2))
        by_one_more_step = {3: 0.87883, 5: 0.87123}[steps]
        best = float(np.sum(q * optimal_sigmas(q, budget, rate) ** 2))
        assert best / uniform / by_one_more_step == pytest.approx(left, abs=5e-4)


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_two_rates(relation: str) -> None:
    budget = dim.Budget(epsilon=2, delta=1e-5, relation=relation)  # type: ignore[arg-type]
    rates = np.repeat([0.1, 0.05], 6)
    q = influence.gradient_descent(gamma=0.9, steps=12)
    sigmas = optimal_sigmas(q, budget, rates)
    assert dim.epsilon(sigmas, 1e-5, rates, relation=budget.relation) <= 2
    best = np.sum(q / rates**2 * sigmas**2)
    rng = np.random.default_rng(7)
    shapes = [np.ones(12), rates, schedules.optimal_shape(q / rates**2)]
    shapes += [sigmas * np.exp(0.1 * rng.standard_normal(12)) for _ in range(3)]
    for shape in shapes:
        other = dim.calibrate(shape, budget, rates)
        assert np.sum(q / rates**2 * other**2) >= best * (1 - 5e-4)


@pytest.mark.parametrize(
    ("sigmas", "rates", "counts", "epsilon"),
    [
        ([0.9, 1.2, 2.0], [0.5, 0.5, 0.5], [1, 1, 1], 4.0),
        ([1.1, 1.3, 6.0], [0.01, 0.01, 1.0], [1000, 1000, 1], 2.0),
        ([0.65, 0.7], [0.001, 0.001], [500, 500], 1.0),
    ],
)
def test_the_model_is_the_accountants_delta_with_its_derivatives(
    sigmas: list[float], rates: list[float], counts: list[int], epsilon: float
) -> None:
    x, rate, count = np.log(sigmas), np.array(rates), np.array(counts, dtype=float)
    every = np.repeat(sigmas, counts), np.repeat(rates, counts)
    delta = dim.delta(every[0], epsilon, every[1])
    model = DeltaModel(np.array(sigmas), rate, count, epsilon, delta)
    value, gradient, hessian = model(x)
    assert value == pytest.approx(np.log(delta), abs=0.02)
    step = 1e-4
    for k in range(x.size):
        move = step * np.eye(x.size)[k]
        above, below = model(x + move), model(x - move)
        assert gradient[k] == pytest.approx((above.value - below.value) / (2 * step), rel=1e-4)
        np.testing.assert_allclose(
            hessian[k],
            (above.gradient - below.gradient) / (2 * step),
            rtol=2e-3,
            atol=2e-3 * np.abs(hessian).max(),
        )


def test_steps_of_equal_influence_share_their_noise() -> None:
    q = np.repeat([0.2, 1.0, 0.5], 40)
    sigmas = optimal_sigmas(q, dim.Budget(epsilon=2, delta=1e-5), 0.1)
    assert np.unique(sigmas).size == 3
    assert sigmas[0] > sigmas[-1] > sigmas[40]


def test_negligible_influence_follows_the_lemma() -> None:
    """Beyond 1e-10 of the largest influence σ goes on as q^(−1/4)."""
    q = 0.7 ** np.arange(199, -1, -1.0)
    sigmas = optimal_sigmas(q, dim.Budget(epsilon=2, delta=1e-5), 0.2)
    assert (np.diff(sigmas) <= 0).all()
    ratio = np.log(sigmas[110] / sigmas[120]) / np.log(q[120] / q[110])
    assert ratio == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize(("epochs", "rate", "steps"), [(3, 1.0, 3), (2, 0.1, 20), (1.5, 0.3, 5)])
def test_epochs_say_how_many_steps_there_are(epochs: float, rate: float, steps: int) -> None:
    made = dim.plan(
        (4, 1e-5), examples=100, parameters=9, gamma=0.9, epochs=epochs, sampling_rate=rate
    )
    same = dim.plan(
        (4, 1e-5), examples=100, parameters=9, gamma=0.9, steps=steps, sampling_rate=rate
    )
    assert made == same


@pytest.mark.parametrize(
    "more",
    [{"steps": 5}, {"sampling_rate": [0.1, 0.2]}, {"epochs": 0}, {"epochs": "two"}],
)
def test_epochs_that_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(dim.InputError, match="epochs"):
        dim.plan((4, 1e-5), **{"examples": 100, "gamma": 0.9, "epochs": 2, **more})

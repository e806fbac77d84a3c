"""Influence under learning rates: formulas, simulation on quadratics, and the equivalence."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import diminuendo as dim
from diminuendo import influence
from diminuendo.influence.spectral import KINDS, MomentumKind

SPECTRUM = np.array([1.0, 0.6, 0.3, 0.05])
SHAPES = {
    "cosine": influence.cosine(40, peak=1.2),
    "linear": influence.linear(40, end=0.1),
    "step": influence.step_decay(40, every=15, factor=0.3),
    "warm-up": influence.warm_up(influence.cosine(40), steps=8),
    "constant": influence.constant(40, peak=0.7),
}


def test_shapes_are_their_formulas() -> None:
    t = np.arange(4)
    np.testing.assert_allclose(influence.linear(4, peak=2), 2 * (1 - t / 4))
    np.testing.assert_allclose(influence.cosine(4, end=0.5), 0.75 + 0.25 * np.cos(np.pi * t / 4))
    np.testing.assert_allclose(influence.step_decay(4, every=2, factor=0.5), [1, 1, 0.5, 0.5])
    np.testing.assert_allclose(influence.warm_up(np.ones(4), steps=2), [0.5, 1, 1, 1])


def test_numbers_arrays_and_functions_are_learning_rates() -> None:
    np.testing.assert_array_equal(influence.learning_rates(0.5, 3), [0.5] * 3)
    np.testing.assert_array_equal(influence.learning_rates([3, 2, 1], 3), [3, 2, 1])
    np.testing.assert_array_equal(influence.learning_rates(lambda t: 1 / t, 3), [1, 1 / 2, 1 / 3])


def test_schedulers_of_pytorch_are_learning_rates() -> None:
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    rates = influence.learning_rates(partial(schedulers.CosineAnnealingLR, T_max=10), 10)
    np.testing.assert_allclose(rates, influence.cosine(10), rtol=1e-6, atol=1e-12)
    rates = influence.learning_rates(
        lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch), 4
    )
    np.testing.assert_allclose(rates, [1, 0.5, 0.25, 0.125])
    with pytest.raises(dim.InputError, match=r"ReduceLROnPlateau.*private"):
        influence.learning_rates(schedulers.ReduceLROnPlateau, 4)


@pytest.mark.parametrize("gamma", [0.0, 0.7, 0.99])
def test_gradient_descent_is_its_product(gamma: float) -> None:
    lr = SHAPES["cosine"]
    left = 1 - (1 - gamma) * lr * (2 - lr)
    expected = [lr[t] ** 2 * math.prod(left[t + 1 :]) for t in range(40)]
    found = influence.gradient_descent(gamma=gamma, steps=40, lr=lr)
    np.testing.assert_allclose(found, np.maximum(expected, influence.FLOOR), rtol=1e-9)


def test_equal_learning_rates_are_a_step_size() -> None:
    for size in (0.3, 1.0):
        np.testing.assert_allclose(
            influence.gradient_descent(gamma=0.9, steps=30, lr=size),
            influence.gradient_descent(gamma=0.9, steps=30, step_size=size),
            rtol=1e-12,
        )
        np.testing.assert_allclose(
            influence.spectrum(2 * SPECTRUM, steps=30, lr=size / 2),
            influence.spectrum(2 * SPECTRUM, steps=30, step_size=size),
            rtol=1e-10,
        )
    np.testing.assert_allclose(
        influence.momentum(gamma=0.9, beta=0.8, steps=30, lr=np.ones(30)),
        influence.momentum(gamma=0.9, beta=0.8, steps=30),
    )


def final_error(
    lr: np.ndarray, noise: np.ndarray, beta: float | None, kind: MomentumKind
) -> np.ndarray:
    """Parameters after the run, from a start at zero: PyTorch's updates, written out."""
    theta = np.zeros(noise.shape[1:])
    buffer = np.zeros_like(theta)
    for t, (eta, draw) in enumerate(zip(lr, noise, strict=True), start=1):
        gradient = SPECTRUM * theta + draw
        if beta is None:
            update = gradient
        elif kind == "average":
            buffer = beta * buffer + (1 - beta) * gradient
            update = buffer / (1 - beta**t)
        else:
            buffer = beta * buffer + gradient
            update = gradient + beta * buffer if kind == "nesterov" else buffer
        theta = theta - eta * update
    return theta


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_spectrum_is_the_simulated_quadratic(name: str, kind: MomentumKind | None) -> None:
    """q_t is ½ of the loss that unit noise in step t alone leaves; 200 draws, 5 deviations."""
    beta = None if kind is None else 0.6
    lr = SHAPES[name] * (0.5 if kind in ("heavy-ball", "nesterov") else 1.0)
    q = influence.spectrum(SPECTRUM, steps=40, lr=lr, momentum=beta, kind=kind or "average")
    draws = np.random.default_rng(5).standard_normal((40, 200, 4))
    for step in (0, 10, 30, 38, 39):
        noise = np.zeros_like(draws)
        noise[step] = draws[step]
        theta = final_error(lr, noise, beta, kind or "average")
        exact = final_error(lr, np.eye(40)[:, step, None] * np.ones(4), beta, kind or "average")
        assert q[step] == pytest.approx(float(np.mean(SPECTRUM * exact**2)), rel=1e-9, abs=1e-280)
        losses = np.mean(SPECTRUM * theta**2, axis=1)
        assert abs(losses.mean() - q[step]) <= 5 * losses.std() / math.sqrt(200) + 1e-280


@pytest.mark.parametrize("kind", ["heavy-ball", "nesterov"])
@pytest.mark.parametrize("lr", [None, influence.cosine(40)])
def test_pytorchs_momentum_from_a_rate(kind: MomentumKind, lr: Any) -> None:
    """On the quadratic on which plain steps of length 1/M converge at that rate."""
    curvature = 0.1
    run = partial(influence.momentum, gamma=(1 - curvature) ** 2, steps=40, lr=lr, kind=kind)
    rates = np.ones(40) if lr is None else lr
    expected = influence.response(np.array([curvature]), rates, momentum=0.7, kind=kind)
    np.testing.assert_allclose(run(beta=0.7), expected.influence)
    plain = influence.response(np.array([curvature]), rates)
    np.testing.assert_allclose(run(beta=0.0), plain.influence)
    with pytest.raises(dim.InputError, match="one of average, heavy-ball, nesterov"):
        influence.momentum(gamma=0.9, beta=0.5, steps=3, kind="nesterow")  # type: ignore[arg-type]
    edge = 2 * 1.7 / 2.4 if kind == "nesterov" else 2.0
    with pytest.raises(dim.InputError, match=rf"at most {edge:.6g}.*got 2.5"):
        influence.momentum(gamma=0.9, beta=0.7, steps=3, lr=[1, 1, 2.5], kind=kind)


@settings(max_examples=30)
@given(
    curvature=st.floats(0.01, 1),
    lr=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=30),
    seed=st.integers(0, 99),
)
def test_one_curvature_makes_all_learning_rates_equivalent(
    curvature: float, lr: list[float], seed: int
) -> None:
    """Σ_t √q_t = (1 − Π(1−η_tλ))/√λ: with planned noise only the bias is left to choose."""
    roots = np.sqrt(influence.response(np.array([curvature]), np.array(lr)).influence)
    bias = math.prod(1 - eta * curvature for eta in lr)
    assert roots.sum() == pytest.approx(1 - bias, rel=1e-9)
    shuffled = np.random.default_rng(seed).permutation(lr)
    again = influence.response(np.array([curvature]), shuffled)
    assert np.sqrt(again.influence).sum() == pytest.approx(roots.sum(), rel=1e-9)
    assert again.residual[0] == pytest.approx(bias, rel=1e-9)


def test_uniform_noise_with_the_right_fall_is_as_good_as_fading_noise() -> None:
    """η_t = c/(1−(T−t)cλ) makes every q_t the same, so that uniform noise is the planned one."""
    curvature, steps, last = 0.5, 12, 0.05
    rates = np.empty(steps)
    rates[-1] = last
    for t in range(steps - 2, -1, -1):
        rates[t] = rates[t + 1] / (1 - rates[t + 1] * curvature)
    left = np.arange(steps - 1, -1, -1.0)
    np.testing.assert_allclose(rates, last / (1 - left * last * curvature))
    falling = influence.response(np.array([curvature]), rates)
    np.testing.assert_allclose(falling.influence, falling.influence[0])
    each = 1 - float(falling.residual[0]) ** (1 / steps)
    constant = influence.response(np.array([curvature]), np.full(steps, each / curvature))
    assert constant.residual[0] == pytest.approx(falling.residual[0])
    uniform_noise = steps * falling.influence.sum()
    assert uniform_noise == pytest.approx(np.sqrt(constant.influence).sum() ** 2, rel=1e-9)


def test_a_million_steps_do_not_underflow() -> None:
    lr = influence.cosine(10**6)
    for q in (
        influence.gradient_descent(gamma=0.9, steps=10**6, lr=lr),
        influence.spectrum(SPECTRUM, steps=10**6, lr=lr),
    ):
        assert (q > 0).all()
        assert np.isfinite(q**-0.25).all()


BAD: list[tuple[Any, str]] = [
    ([1.0, 1.0], r"length of lr to be steps \(3\), got 2"),
    ([1.0, -1.0, 1.0], r"lr\[1\]"),
    ([1.0, math.nan, 1.0], r"lr\[1\]"),
    ([1.0, math.inf, 1.0], r"lr\[1\]"),
    ([0.0, 0.0, 0.0], "above zero"),
    ([1.0, 2.5, 1.0], r"lr\[1\] to be at most 2.*stable.*got 2.5"),
    (lambda t: "fast", "lr"),
    (lambda: 1.0, "from an optimizer to a scheduler"),
    (lambda t, n: t / n, "from an optimizer to a scheduler"),
    ("fast", "lr"),
    (0.0, "lr"),
]


@pytest.mark.parametrize(("lr", "said"), BAD)
def test_bad_learning_rates(lr: Any, said: str) -> None:
    calls = (
        partial(influence.gradient_descent, gamma=0.9),
        partial(influence.spectrum, SPECTRUM),
    )
    for call in calls:
        with pytest.raises(dim.InputError, match=said):
            call(steps=3, lr=lr)


def test_longer_steps_than_stable_only_where_asked() -> None:
    lr = [4.0, 1.0, 0.5]
    with pytest.raises(dim.InputError, match="max_lr"):
        influence.spectrum(SPECTRUM, steps=3, lr=lr)
    assert influence.spectrum(SPECTRUM, steps=3, lr=lr, max_lr=4).size == 3


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_nesterov_is_stable_for_shorter_steps_only(beta: float) -> None:
    """Beyond 2(1+β)/(1+2β)/M its steps grow, below they shrink."""
    edge = 2 * (1 + beta) / (1 + 2 * beta)

    def left(rate: float) -> float:
        run = influence.response(SPECTRUM, np.full(500, rate), momentum=beta, kind="nesterov")
        return float(np.abs(run.residual).max())

    assert left(1.03 * edge) > 1 > left(0.97 * edge)
    run = partial(influence.spectrum, SPECTRUM, steps=500, momentum=beta, kind="nesterov")
    assert run(lr=0.99 * edge).size == 500
    with pytest.raises(dim.InputError, match=rf"at most {edge:.6g}.*stable"):
        run(lr=1.03 * edge)
    assert run(lr=1.03 * edge, max_lr=2).size == 500


def test_a_function_that_takes_nothing_is_no_learning_rate() -> None:
    pytest.importorskip("torch")
    with pytest.raises(dim.InputError, match="a function of t"):
        influence.learning_rates(lambda: 1.0, 3)

"""Influence by retraining against closed forms; the spectrum of a known Hessian."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import diminuendo as dim
from diminuendo import influence
from diminuendo.measuring import MeasuredInfluence, measure
from diminuendo.measuring.curvature import lanczos, spectrum_of

N, D, T = 50, 12, 20
CLIP, LR = 200.0, 0.3


def linear() -> nn.Module:
    return nn.Linear(D, 1, bias=False).double()


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 0] - targets) ** 2


def regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-0.7, 0, D, dtype=torch.float64)
    return x, torch.randn(N, generator=generator, dtype=torch.float64)


def eigenvalues() -> np.ndarray:
    x = regression()[0].numpy()
    return np.linalg.eigvalsh(x.T @ x / N)


def exact(beta: float) -> np.ndarray:
    """½(C/N)² Σ_i λ_i r_i², r_i the response of coordinate i to a unit of noise in step t."""
    values = eigenvalues()
    found = []
    for t in range(1, T + 1):
        theta, average = np.zeros(D), np.zeros(D)
        for step in range(t, T + 1):
            average = beta * average + (1 - beta) * (values * theta + (step == t))
            theta = theta - LR * average / (1 - beta**step)
        found.append(0.5 * (CLIP / N) ** 2 * (values * theta**2).sum())
    return np.array(found)


def on_quadratic(beta: float, **changes: Any) -> MeasuredInfluence:
    options: dict[str, Any] = {
        "source": "auxiliary",
        "sigmas": np.linspace(0.1, 0.05, T),
        "lr": LR,
        "clip": CLIP,
        "beta": beta,
        "steps": T,
        "repeats": 60,
        "loss": half_square,
        "level": 1 - 1e-6,
        "progress": False,
    }
    return measure(linear, regression(), **{**options, **changes})


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_measured_is_the_closed_form_within_the_interval(beta: float) -> None:
    """Twenty intervals at level 1 − 10⁻⁶: a false alarm in about one of 50,000 seeds."""
    measured = on_quadratic(beta)
    low, high = measured.interval
    assert (low <= exact(beta)).all()
    assert (exact(beta) <= high).all()
    np.testing.assert_allclose(measured.mean, exact(beta), rtol=0.25)
    assert measured.dropped == 0


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_measured_under_learning_rates(beta: float) -> None:
    """Twenty intervals at level 1 − 10⁻⁶, under a falling learning rate."""
    lr = LR * influence.cosine(T)
    measured = on_quadratic(beta, lr=lr)
    values = eigenvalues()
    q = influence.spectrum(values, steps=T, lr=lr, momentum=beta or None)
    truth = 0.5 * (CLIP / N) ** 2 * q * D / values.max()
    low, high = measured.interval
    assert (low <= truth).all()
    assert (truth <= high).all()


def test_measured_learning_rates_may_come_from_a_scheduler() -> None:
    lr = LR * influence.cosine(T)

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr[min(step, T - 1)])

    want = on_quadratic(0.0, lr=lr, repeats=2).mean
    np.testing.assert_allclose(on_quadratic(0.0, lr=scheduler, repeats=2).mean, want)
    np.testing.assert_allclose(on_quadratic(0.0, lr=lambda t: lr[t - 1], repeats=2).mean, want)


def test_the_size_of_the_perturbation_does_not_matter_on_a_quadratic() -> None:
    one, ten = on_quadratic(0.5, repeats=2), on_quadratic(0.5, repeats=2, perturbation=10.0)
    np.testing.assert_allclose(one.mean, ten.mean, rtol=1e-6)


def test_a_grid_is_part_of_the_whole() -> None:
    whole, some = on_quadratic(0.0, repeats=3), on_quadratic(0.0, repeats=3, steps=[2, 20, 7])
    np.testing.assert_array_equal(some.steps, [2, 7, 20])
    np.testing.assert_allclose(some.estimates, whole.estimates[:, [1, 6, 19]], rtol=1e-7)


def around(
    curve: np.ndarray, runs: int = 8, spread: float = 0.02, **changes: Any
) -> MeasuredInfluence:
    """Estimates that scatter around a curve."""
    noise = 1 + spread * np.random.default_rng(0).standard_normal((runs, len(curve)))
    options: dict[str, Any] = {"total_steps": len(curve), "level": 0.95, "source": "auxiliary"}
    return MeasuredInfluence(np.arange(1, len(curve) + 1), curve * noise, **{**options, **changes})


def test_exponential_fit() -> None:
    """A 95% interval on a fixed seed; the true rate is inside, and the fit is nearly perfect."""
    fit = around(influence.gradient_descent(gamma=0.9, steps=40)).exponential()
    assert fit.low <= 0.9 <= fit.high
    assert fit.high - fit.low < 0.01
    assert fit.r_squared > 0.999
    bent = around(influence.momentum(gamma=0.9, beta=0.9, steps=40)).exponential()
    assert bent.r_squared < 0.99


def test_curves_for_plans() -> None:
    truth = influence.gradient_descent(gamma=0.9, steps=40)
    measured = around(truth)
    np.testing.assert_allclose(measured.curve(), truth, rtol=0.05)
    np.testing.assert_allclose(measured.curve(10), truth[-10:], rtol=0.05)
    np.testing.assert_allclose(measured.curve(60)[20:], truth, rtol=0.05)
    monotone = measured.monotone()
    assert (np.diff(monotone) >= 0).all()
    np.testing.assert_allclose(monotone, truth / truth.max(), rtol=0.05)
    bent = influence.momentum(gamma=0.9, beta=0.8, steps=40)
    np.testing.assert_allclose(
        around(bent, spread=0.0).curve(fit="measured"), bent / bent.max(), rtol=1e-9
    )
    plan = dim.plan(
        dim.Budget(epsilon=4, delta=1e-5), examples=1000, parameters=5, influence=measured.curve()
    )
    assert plan.steps == 40


def test_noise_below_zero_is_left_out_of_fits() -> None:
    curve = influence.gradient_descent(gamma=0.9, steps=20)
    curve[3] = -curve[3]
    assert around(curve).exponential().gamma == pytest.approx(0.9, abs=0.01)
    with pytest.raises(dim.InputError, match="three steps"):
        around(-curve).exponential()


def test_private_data_only_if_told_to_and_then_marked() -> None:
    with pytest.raises(dim.InputError, match="not_private"):
        on_quadratic(0.0, source="private")
    marked = on_quadratic(0.0, source="private", not_private=True, repeats=3)
    assert not marked.private
    assert "NOT private" in marked.to_json()
    again = MeasuredInfluence.from_json(marked.to_json())
    assert not again.private
    np.testing.assert_array_equal(again.estimates, marked.estimates)
    for fit in ("exponential", "monotone", "measured"):
        plan = dim.plan(
            dim.Budget(epsilon=4, delta=1e-5),
            examples=N,
            parameters=D,
            influence=again.curve(fit=fit),
        )
        assert any("NOT private" in words for words in plan.assumptions)
        assert "NOT private" in plan.to_json()
    clean = on_quadratic(0.0, repeats=3).curve()
    plan = dim.plan(dim.Budget(epsilon=4, delta=1e-5), examples=N, parameters=D, influence=clean)
    assert "NOT private" not in plan.to_json()
    with pytest.raises(dim.InputError, match="not_private"):
        spectrum_of(linear(), regression(), source="private", loss=half_square, progress=False)


@pytest.mark.parametrize("steps", [13, [1, 13]])
def test_steps_beyond_the_run_are_told_in_whole_numbers(steps: Any) -> None:
    with pytest.raises(dim.InputError, match="at most 12, as the run has 12 steps"):
        on_quadratic(0.0, sigmas=[1.0] * 12, steps=steps)


def test_bad_input() -> None:
    for changes in ({"steps": [0]}, {"steps": [T + 1]}, {"repeats": 1}, {"perturbation": 0}):
        with pytest.raises(dim.InputError):
            on_quadratic(0.0, **changes)
    with pytest.raises(dim.InputError, match="finite in two runs"):
        on_quadratic(0.0, lr=1e200, repeats=2)


def test_reached_from_the_influence_room() -> None:
    assert dim.influence.measure is measure
    assert dim.influence.spectrum_of is spectrum_of


def test_lanczos_finds_a_known_spectrum() -> None:
    """All of it in as many steps as there are eigenvalues; the extremes long before."""
    truth = np.geomspace(1e-3, 7.0, 60)
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((60, 60)))[0]
    matrix = torch.tensor(basis * truth @ basis.T)
    start = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nodes, weights = lanczos(lambda v: matrix @ v, start, 25)
    assert nodes.max() == pytest.approx(7.0, rel=1e-6)
    assert weights.sum() == pytest.approx(1)
    unit = start / start.norm()
    for power in (1, 2, 5):
        moment = float(unit @ torch.linalg.matrix_power(matrix, power) @ unit)
        assert (weights * nodes**power).sum() == pytest.approx(moment, rel=1e-9)


def test_spectral_influence_is_the_quadratics() -> None:
    """64 starts: the density's moments err by about √(2/(64·12)) = 5%; five times that is 25%."""
    found = spectrum_of(
        linear(), regression(), source="auxiliary", loss=half_square, starts=64, progress=False
    )
    truth = eigenvalues()
    assert found.largest == pytest.approx(truth.max(), rel=1e-8)
    assert found.weights.sum() == pytest.approx(1)
    assert found.negative == 0
    want = influence.spectrum(truth, steps=T, step_size=LR * truth.max())
    np.testing.assert_allclose(found.influence(T, lr=LR), want, rtol=0.25)
    np.testing.assert_allclose(want / want[-1], exact(0.0) / exact(0.0)[-1], rtol=1e-9)
    with pytest.raises(dim.InputError, match="2/M"):
        found.influence(T, lr=3 / found.largest)


@pytest.mark.slow
def test_the_papers_network() -> None:
    """On Gaussian data log q_t is about a line for gradient descent, and bends with momentum."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 60, generator=generator)
    x *= 10 / x.norm(dim=1).max()
    y = torch.randint(0, 10, (1000,), generator=generator)
    plain, bent = (
        measure(
            network,
            (x, y),
            source="auxiliary",
            sigmas=[14.0] * 40,
            lr=0.1,
            clip=4.0,
            beta=beta,
            steps=9,
            repeats=3,
            progress=False,
        )
        for beta in (0.0, 0.9)
    )
    assert plain.exponential().gamma < 1
    assert plain.exponential().r_squared > 0.9
    assert plain.mean[-1] == plain.mean.max()
    theory = influence.momentum(gamma=plain.exponential().gamma, beta=0.9, steps=40)
    assert theory[-1] < theory[34] < theory[29]
    assert bent.mean[-1] < bent.mean[-2] < bent.mean[-3]

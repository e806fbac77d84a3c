"""Every method spends within its budget, leaks no more than that, and learns something."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import diminuendo as dim
from diminuendo import accounting
from diminuendo.budget import Budget, gaussian_delta
from diminuendo.compare import clips, descent, factors, mixed, whole
from diminuendo.compare.auditing import audit_method
from diminuendo.compare.methods import METHODS, correlated
from diminuendo.compare.models import Linear, Network
from diminuendo.compare.private import DeclaredSpending, Private
from diminuendo.compare.scaled import scaled_gradient

BUDGET = Budget(epsilon=3.0, delta=1e-5)
RUN = [key for key, method in METHODS.items() if method.run is not None]
GRADIENTS = [key for key in RUN if METHODS[key].releases == "gradients"]
MODELS = [key for key in RUN if METHODS[key].releases != "gradients"]


def data(examples: int = 120, features: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, examples, features, generator=generator)
    y = (x @ torch.randn(features, classes, generator=generator)).argmax(2)
    x = x / x.norm(dim=2, keepdim=True)
    return torch.cat([x, torch.ones(2, examples, 1)], dim=2) / (math.sqrt(2) * (1 + 1e-6)), y


def private(budget: Budget = BUDGET, model: Linear | Network | None = None) -> Private:
    x, y = data()
    return Private(model or Linear(7, 3), x, y, budget, seeds=[1, 2])


@pytest.mark.parametrize("key", RUN)
def test_a_method_learns_and_stays_within_its_budget(key: str) -> None:
    generous = Budget(epsilon=50.0, delta=1e-5)
    x, y = data()
    model = Linear(7, 3)
    best = 0.0
    for candidate in range(4):
        hidden = private(generous)
        run = METHODS[key].run
        assert run is not None
        theta = run(hidden, METHODS[key].candidate(candidate))
        assert theta.shape == (2, 21)
        assert 0 < hidden.claimed() <= generous.epsilon
        best = max(best, float(model.accuracy(theta, x, y).mean()))
    assert best > 0.55, "a guess is right in a third of the cases"


@pytest.mark.parametrize("key", [k for k in RUN if not METHODS[k].convex])
def test_a_method_runs_on_the_network(key: str) -> None:
    run = METHODS[key].run
    assert run is not None
    network = Network(7, 3, hidden=4)
    theta = run(private(model=network), METHODS[key].candidate(0))
    assert theta.shape == (2, network.parameters)
    assert bool(theta.isfinite().all())


@pytest.mark.parametrize("key", GRADIENTS)
def test_no_method_leaks_more_than_it_pays_for(key: str) -> None:
    """Seeded; by chance it would fail with probability 1e-7 for each method."""
    runs = 1 if METHODS[key].alone else 6
    found = audit_method(key, BUDGET, canaries=1500 // runs, runs=runs, confidence=1 - 1e-7)
    assert not found.exceeded
    assert found.noise_scale is not None
    assert found.noise_scale > 0.75
    if not METHODS[key].alone and METHODS[key].family != "variance reduction":
        assert found.noise_scale < 1.25, "and a present canary adds one unit"


@pytest.mark.parametrize("key", MODELS)
def test_no_model_tells_more_of_an_example_than_is_claimed(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded; by chance it would fail with probability 1e-7 for each method."""
    budget = Budget(epsilon=1.0, delta=1e-5)
    found = audit_method(key, budget, canaries=600, runs=1, confidence=1 - 1e-7)
    assert not found.exceeded
    assert found.attacked == METHODS[key].releases
    real = Private.noised

    def quiet(self: Private, sums: Tensor, bound: float, sigma: float, **more: Any) -> Tensor:
        return real(self, sums, bound, sigma / less, **more)

    less = 12 if METHODS[key].releases == "noised model" else 30
    monkeypatch.setattr(Private, "noised", quiet)
    assert audit_method(key, budget, canaries=600, runs=1, confidence=1 - 1e-7).exceeded


def test_the_audit_finds_a_method_with_half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Private.noised

    def halved(
        self: Private,
        sums: Tensor,
        bound: float,
        sigma: float,
        *,
        rate: float = 1.0,
        seen: bool = True,
    ) -> Tensor:
        noisy = real(self, sums, bound, sigma / 2, seen=False)
        if seen:
            self.show(noisy / bound, sigma, rate)
        return noisy

    monkeypatch.setattr(Private, "noised", halved)
    for key in ("uniform", "large-batches"):
        assert audit_method(key, BUDGET, canaries=240, runs=6, confidence=1 - 1e-7).exceeded


@pytest.mark.parametrize("key", ["correlated-prefix", "banded-prefix", "banded-influence"])
@pytest.mark.parametrize("candidate", [0, 1], ids=["first", "second"])
def test_the_audit_finds_correlated_noise_of_half_the_size(
    key: str, candidate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Private.noises
    monkeypatch.setattr(Private, "noises", lambda self, mixing: real(self, mixing) / 2)
    assert audit_method(
        key, BUDGET, candidate=candidate, canaries=240, runs=6, confidence=1 - 1e-7
    ).exceeded


def test_the_audit_finds_an_example_that_adds_twice_its_clip_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every one of its turns."""
    real = Private.clipped

    def twice(self: Private, theta: Tensor, rule: clips.Rule, *more: Any) -> Tensor:
        return 2 * real(self, theta, rule, *more)

    monkeypatch.setattr(Private, "clipped", twice)
    for key in ("banded-prefix", "banded-influence"):
        assert audit_method(key, BUDGET, canaries=240, runs=6, confidence=1 - 1e-7).exceeded


# The door


def test_nothing_is_released_beyond_the_budget() -> None:
    hidden = private()
    sigma = 1 / math.sqrt(BUDGET.R) * (1 + 1e-9)
    hidden.gradient(hidden.start(), clips.Flat(1.0), sigma)
    with pytest.raises(dim.BudgetRefused):
        hidden.count_below(hidden.start(), torch.ones(2), 10.0)
    assert hidden.claimed() <= BUDGET.epsilon


def test_sampled_steps_must_be_declared_and_fit() -> None:
    hidden = private()
    with pytest.raises(dim.InputError):
        hidden.gradient(hidden.start(), clips.Flat(1.0), 5.0, rate=0.1)
    with pytest.raises(dim.BudgetRefused):
        hidden.declare([0.5] * 50, [0.5] * 50)
    hidden.declare([5.0, 5.0], [0.1, 0.1])
    with pytest.raises(dim.BudgetRefused):
        hidden.gradient(hidden.start(), clips.Flat(1.0), 4.0, rate=0.1)
    for _ in range(2):
        hidden.gradient(hidden.start(), clips.Flat(1.0), 5.0, rate=0.1)
    with pytest.raises(dim.BudgetRefused):
        hidden.gradient(hidden.start(), clips.Flat(1.0), 5.0, rate=0.1)
    assert hidden.claimed() == accounting.epsilon([5.0, 5.0], 1e-5, 0.1)
    assert DeclaredSpending([], BUDGET).epsilon() == 0


@pytest.mark.parametrize("model", [Linear(7, 3), Network(7, 3, hidden=4)])
@pytest.mark.parametrize(
    "rule",
    [clips.Flat(0.3), clips.Automatic(0.3), clips.PerSample(0.3, 0.2), clips.PerLayer(0.3)],
    ids=lambda rule: type(rule).__name__,
)
def test_one_example_adds_no_more_than_the_bound(model: Linear | Network, rule: clips.Rule) -> None:
    """Against autograd: each example's clipped gradient alone, and their sum."""
    x, y = data(examples=8)
    theta = model.start([torch.Generator().manual_seed(s) for s in (1, 2)]) + 0.5
    hidden = Private(model, x, y, BUDGET, seeds=[1, 2])
    total = torch.zeros_like(theta)
    for i in range(8):
        one = Private(model, x[:, i : i + 1], y[:, i : i + 1], BUDGET, seeds=[1, 2])
        alone = one.clipped(theta, rule)
        assert float(alone.norm(dim=1).max()) <= 0.3 * (1 + 1e-5)
        total += alone
    torch.testing.assert_close(hidden.clipped(theta, rule), total, atol=1e-5, rtol=1e-4)
    leaf = theta.clone().requires_grad_()
    model.losses(leaf, x, y).mean(1).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    torch.testing.assert_close(hidden.mean_gradient(theta), leaf.grad, atol=1e-5, rtol=1e-4)


def test_scaled_gradients_are_clipped_in_their_own_coordinates() -> None:
    model = Network(7, 3, hidden=4)
    x, y = data(examples=5)
    theta = model.start([torch.Generator().manual_seed(s) for s in (1, 2)])
    generator = torch.Generator().manual_seed(3)
    shift = 0.1 * torch.randn(theta.shape, generator=generator)
    scale = 0.05 + torch.rand(theta.shape, generator=generator)
    expected = torch.zeros_like(theta)
    for i in range(5):
        one = Private(model, x[:, i : i + 1], y[:, i : i + 1], BUDGET, seeds=[1, 2])
        moved = (one.mean_gradient(theta) - shift) / scale
        expected += moved / (moved.norm(dim=1, keepdim=True) * (1 + 1e-4) + 1e-6).clamp(min=1.0)
    silent = Budget(epsilon=1e6, delta=1e-5)
    hidden = Private(model, x, y, silent, seeds=[1, 2])
    released = scaled_gradient(hidden, theta, shift, scale, 1e-2)
    torch.testing.assert_close(released, shift + scale * expected / 5, atol=2e-2, rtol=0)


def test_scaled_gradients_are_clipped_where_the_shift_takes_nearly_all_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gradient and its shift are a thousand units long, and their difference a little over 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(100, 1, 20, generator=generator)
    x = x / x.norm(dim=2, keepdim=True)
    y = torch.zeros(100, 1, dtype=torch.int64)
    hidden = Private(Linear(20, 10), x, y, BUDGET, seeds=range(100))
    theta = torch.randn(100, 200, generator=generator) * 3
    direction = torch.randn(100, 200, generator=generator)
    direction = direction / direction.norm(dim=1, keepdim=True)
    scale = torch.full_like(theta, 1e-3)
    shift = hidden.mean_gradient(theta) - 1.05 * scale * direction
    seen: list[Tensor] = []

    def noised(sums: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(sums)
        return sums

    monkeypatch.setattr(hidden, "noised", noised)
    scaled_gradient(hidden, theta, shift, scale, 10.0)
    assert float(seen[0].norm(dim=1).max()) <= 1


def test_the_clip_norm_reaches_its_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any noise: after 200 steps the wished share of norms is below the clip norm."""
    bounds: list[Tensor] = []
    real = Private.count_below

    def watched(self: Private, theta: Tensor, bound: Tensor, sigma: float) -> Tensor:
        bounds.append(bound)
        return real(self, theta, bound, sigma)

    monkeypatch.setattr(Private, "count_below", watched)
    hidden = private(Budget(epsilon=1e5, delta=1e-5))
    run = METHODS["quantile"].run
    assert run is not None
    theta = run(hidden, {"steps": 200, "lr": 0.5, "clip": 0.05, "quantile": 0.7})
    share = (hidden._norms(theta) <= bounds[-1].unsqueeze(1)).float().mean(1)
    np.testing.assert_allclose(share.numpy(), 0.7, atol=0.05)


# Convex losses


def without(x: Tensor, row: int) -> Tensor:
    changed = x.clone()
    changed[:, row] = 0.0
    return changed


@pytest.mark.parametrize("ridge", [0.01, 0.1])
def test_minimisers_of_neighbours_are_as_close_as_claimed(ridge: float) -> None:
    x, y = data(examples=40)
    tolerance = 1e-9
    both = [
        whole.minimise(Private(Linear(7, 3), rows, y, BUDGET, seeds=[1, 2]), ridge, tolerance)
        for rows in (x, without(x, 0))
    ]
    moved = float((both[0] - both[1]).norm(dim=1).max())
    assert 0 < moved <= math.sqrt(2) / (40 * ridge)


def test_bolt_on_moves_no_further_than_its_sensitivity() -> None:
    x, y = data(examples=40)
    ridge, passes, batch = 0.05, 4, 8
    final = []
    for rows in (x, without(x, 3)):
        hidden = Private(Linear(7, 3), rows, y, BUDGET, seeds=[1, 2])
        theta = hidden.start()
        rates = whole._bolt_on_rates(hidden, ridge, passes, batch)
        for t, rate in enumerate(rates):
            part = slice((t % 5) * batch, (t % 5 + 1) * batch)
            theta = theta - rate * (hidden.mean_gradient(theta, part) + ridge * theta)
        final.append(theta)
    bound = whole.bolt_on_sensitivity(rates, 5, ridge, math.sqrt(2) / batch)
    assert 0 < float((final[0] - final[1]).norm(dim=1).max()) <= bound
    assert bound <= 2 * math.sqrt(2) / (40 * ridge) * 1.5, "of the order of the paper's 2L/(γm)"


def test_the_last_iterate_of_a_linear_recursion_is_exact() -> None:
    """x ← c·x + s + z: the theorem's worst case, whose mean and variance are known."""
    c, steps = 0.9, 25
    mean = sum(c**k for k in range(steps))
    variance = sum(c ** (2 * k) for k in range(steps))
    assert whole.last_iterate_factor(c, steps) == pytest.approx(mean / math.sqrt(variance))
    assert whole.last_iterate_factor(c, 1) == pytest.approx(1.0)


def test_objective_perturbation_lies_between_gaussian_bounds() -> None:
    """With much regularisation and two classes: between the Gaussian mechanism and twice it."""
    for multiplier, epsilon in ((2.0, 1.5), (5.0, 0.7)):
        least = float(gaussian_delta(epsilon, 1 / multiplier))
        found = whole.objective_delta(epsilon, multiplier, 1e9, 1.0, 2)
        assert least <= found <= 2 * least * 1.02
    little = whole.objective_delta(1.5, 2.0, 2.0, 1.0, 2)
    assert little > whole.objective_delta(1.5, 2.0, 1e9, 1.0, 2), "the determinant costs"
    with pytest.raises(dim.InputError):
        whole.objective_multiplier(BUDGET, 1e-6, 1.0, 10)


def test_the_noise_that_hides_the_solver_is_negligible(monkeypatch: pytest.MonkeyPatch) -> None:
    scales: list[float] = []
    real = Private.noised

    def watched(self: Private, sums: Tensor, bound: float, sigma: float, **more: Any) -> Tensor:
        scales.append(bound * sigma)
        return real(self, sums, bound, sigma, **more)

    monkeypatch.setattr(Private, "noised", watched)
    whole.objective_perturbation(private(), 0.05)
    slope, hiding = scales
    assert hiding < 0.01 * slope / (120 * 0.05 + 120 * 0.5), "of what the slope itself does to θ"


def test_what_is_spared_for_the_solver_adds_up() -> None:
    spare = whole.Spare.of(BUDGET)
    small = BUDGET.delta / (100 * (2 + math.exp(BUDGET.epsilon)))
    from diminuendo.budget import gaussian_epsilon

    apart = gaussian_epsilon(spare.mu, small)
    assert spare.budget.epsilon + 2 * apart <= BUDGET.epsilon
    total = math.exp(apart) * spare.budget.delta + small * (
        1 + math.exp(apart + spare.budget.epsilon)
    )
    assert total <= BUDGET.delta * (1 + 1e-9)


# Correlated noise


def test_the_sensitivity_of_a_factor_is_reached_by_equal_gradients_only() -> None:
    generator = np.random.default_rng(1)
    matrix = np.tril(generator.random((6, 6))) + np.eye(6)
    bound = mixed.sensitivity(matrix)
    assert np.linalg.norm(matrix @ np.ones(6)) == pytest.approx(bound)
    for _ in range(200):
        g = generator.normal(size=(6, 4))
        g /= np.linalg.norm(g, axis=1, keepdims=True)
        assert np.linalg.norm(matrix @ g) <= bound
    with pytest.raises(dim.InputError):
        mixed.sensitivity(-matrix)
    with pytest.raises(dim.InputError):
        mixed.sensitivity(matrix.T)


def test_the_square_root_of_prefix_sums() -> None:
    root = correlated.banded_square_root(7, 7)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((7, 7))), atol=1e-12)
    banded = correlated.banded_square_root(7, 3)
    assert not banded[3:, 0].any()
    np.testing.assert_allclose(banded[:3], root[:3])


def test_correlated_noise_has_the_covariance_that_was_paid_for() -> None:
    """Released noise times M is white with σ (1,050 numbers a step, seeded)."""
    steps, sigma = 4, 2.0
    matrix = np.tril(0.5 ** np.abs(np.subtract.outer(np.arange(steps), np.arange(steps))))
    hidden = Private(
        Linear(7, 3),
        torch.zeros(50, 1, 7),
        torch.zeros(50, 1, dtype=torch.int64),
        Budget(epsilon=100, delta=1e-5),
        seeds=range(50),
    )
    noise = mixed.everybody(hidden, matrix, sigma)
    rule = clips.Flat(1.0)
    released = torch.stack(
        [noise.gradient(t, hidden.start(), rule) for t in range(steps)], dim=1
    ).numpy()
    white = np.einsum("ts,rsp->rtp", matrix, released).transpose(1, 0, 2).reshape(steps, -1)
    covariance = np.cov(white) / sigma**2
    np.testing.assert_allclose(covariance, np.eye(steps), atol=0.24)
    with pytest.raises(dim.UsageError):
        noise.gradient(0, hidden.start(), rule)


def turns(examples: int, steps: int, groups: int, matrix: NDArray[np.float64]) -> Tensor:
    """Sums that one example at a time adds to each step, without noise: (examples, steps)."""
    loud = Budget(epsilon=1e5, delta=1e-5)
    added = torch.zeros(examples, steps)
    for own in range(examples):
        x = torch.zeros(1, examples, 7)
        x[0, own, 0] = 1.0
        y = torch.zeros(1, examples, dtype=torch.int64)
        hidden = Private(Linear(7, 3), x, y, loud, seeds=[1])
        noise = mixed.in_turns(hidden, matrix, 1e-2, groups)
        for t in range(steps):
            gradient = noise.gradient(t, hidden.start(), clips.Flat(0.5))
            added[own, t] = gradient.norm() * examples / groups
    return added


def test_examples_take_turns_and_their_columns_share_no_row() -> None:
    steps, groups = 8, 4
    matrix = factors.best_factor(steps, groups, 0.9)
    added = turns(6, steps, groups, matrix)
    for own in range(6):
        mine = np.flatnonzero(added[own].numpy() > 0.2)
        np.testing.assert_array_equal(mine, np.arange(own % groups, steps, groups))
        gram = matrix[:, mine].T @ matrix[:, mine]
        np.testing.assert_allclose(gram - np.diag(np.diag(gram)), 0, atol=1e-15)
        paid = mixed.block_norms(matrix, groups)
        assert (np.sqrt(np.diag(gram)) <= paid).all()


def test_turns_are_charged_as_sampled_steps() -> None:
    matrix = factors.best_factor(20, 5, None)
    sigma = 3.0
    hidden = private(Budget(epsilon=50.0, delta=1e-5))
    mixed.in_turns(hidden, matrix, sigma, 5, 0.5)
    norms = mixed.block_norms(matrix, 5)
    assert hidden.claimed() == accounting.epsilon([sigma / n for n in norms], 1e-5, 0.5)
    with pytest.raises(dim.BudgetRefused):
        mixed.in_turns(private(), matrix, 0.1, 5)
    with pytest.raises(dim.InputError, match="bands"):
        mixed.in_turns(private(), matrix, 30.0, 4)
    with pytest.raises(dim.InputError):
        mixed.in_turns(private(), matrix, 30.0, 1)


@pytest.mark.parametrize("gamma", [0.8, 0.95])
def test_a_factor_for_the_final_loss_beats_the_one_for_prefix_sums(gamma: float) -> None:
    """And both beat independent noise, and the square root of prefix sums, at their own aim."""
    steps, band = 40, 5
    blocks = steps // band
    square = correlated.banded_square_root(steps, band)
    square = square / np.linalg.norm(square, axis=0) / math.sqrt(blocks)
    prefix, final = factors.prefix_error(steps), factors.final_loss(steps, gamma)
    for_prefix, for_final = (factors.best_factor(steps, band, g) for g in (None, gamma))
    for own in (for_prefix, for_final):
        norms = np.array(mixed.block_norms(own, band))
        assert float(np.sum(norms**2)) == pytest.approx(1.0)
        np.testing.assert_allclose(
            np.linalg.norm(own, axis=0), np.repeat(norms, band), rtol=1e-9, err_msg="all alike"
        )
    assert factors.final_noise(prefix, for_prefix) < factors.final_noise(prefix, square)
    assert factors.final_noise(final, for_final) < 0.95 * factors.final_noise(final, for_prefix)
    alone = np.eye(steps) / math.sqrt(blocks)
    assert factors.final_noise(prefix, for_prefix) < factors.final_noise(prefix, alone)


def test_correlation_cannot_beat_the_lemma_for_one_influence_curve() -> None:
    """Cauchy and Schwarz: ‖wᵀM⁻¹‖·‖M·1‖ ≥ Σw, which the lemma's diagonal reaches."""
    w = 0.8 ** np.arange(9, -1, -1.0)
    lemma = np.diag(np.sqrt(w))
    generator = np.random.default_rng(2)

    def final_noise(matrix: NDArray[np.float64]) -> float:
        return float(
            np.linalg.norm(w @ np.linalg.inv(matrix)) * np.linalg.norm(matrix @ np.ones(10))
        )

    assert final_noise(lemma) == pytest.approx(w.sum())
    for _ in range(50):
        other = np.tril(generator.random((10, 10))) + np.diag(generator.random(10) + 0.2)
        assert final_noise(other) >= w.sum() * (1 - 1e-9)


def test_second_moments_have_the_noise_that_was_paid_for() -> None:
    """Standard deviation σB²/N on the diagonal, and σB²/√2N off it, around the exact moments."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, 50, 4, generator=generator)
    x = 0.5 * x / x.norm(dim=2, keepdim=True)
    y = torch.zeros(400, 50, dtype=torch.int64)
    secret = Private(Linear(4, 2), x, y, BUDGET, seeds=range(400), largest_norm=0.5)
    released = torch.stack(list(secret.second_moments(sigma=4.0)))
    assert torch.equal(released, released.transpose(1, 2))
    errors = (released - x.transpose(1, 2) @ x / 50) * 50 / (4.0 * 0.5**2)
    diagonal = errors.diagonal(dim1=1, dim2=2)
    above = errors[:, *torch.triu_indices(4, 4, 1)]
    assert float(diagonal.std()) == pytest.approx(1.0, abs=0.07)
    assert float(above.std()) == pytest.approx(math.sqrt(0.5), abs=0.05)
    assert float(errors.mean()) == pytest.approx(0.0, abs=0.05)
    assert [step.noise_multiplier for step in secret.granted()[0]] == [4.0]


@pytest.mark.parametrize("length", [0.3, 1.0, 7.0])
def test_one_example_moves_the_second_moments_no_further_than_the_bound(
    length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its features are: the sum changes by at most B² in the Frobenius norm."""
    x, y = data()
    x[:, 5] *= length / x[:, 5].norm(dim=1, keepdim=True)
    sums: list[Tensor] = []

    def noised(_: Private, given: Tensor, bound: float, *__: Any, **___: Any) -> Tensor:
        assert bound == 1.0
        sums.append(given)
        return given

    monkeypatch.setattr(Private, "noised", noised)
    for rows in (x, without(x, 5)):
        list(Private(Linear(7, 3), rows, y, BUDGET, seeds=[1, 2]).second_moments(sigma=4.0))
    moved = [float((sums[r] - sums[2 + r]).norm()) for r in range(2)]
    assert moved == pytest.approx([min(length, 1.0) ** 2] * 2, rel=1e-4)


def test_second_moments_of_rows_that_replicas_share_are_summed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And each replica draws its own noise, as if the rows were its own."""
    x, y = data()
    rows, labels = x[:1].expand(2, -1, -1), y[:1].expand(2, -1)
    alone = Private(Linear(7, 3), rows.contiguous(), labels, BUDGET, seeds=[1, 2])
    expected = list(alone.second_moments(sigma=4.0))
    assert not torch.equal(expected[0], expected[1])
    sums: list[int] = []
    real = Private._moments_of

    def counted(self: Private, replica: int) -> Tensor:
        sums.append(replica)
        return real(self, replica)

    monkeypatch.setattr(Private, "_moments_of", counted)
    found = list(Private(Linear(7, 3), rows, labels, BUDGET, seeds=[1, 2]).second_moments(4.0))
    assert sums == [0]
    torch.testing.assert_close(found, expected)


def test_second_moments_are_paid_for_before_anybody_looks() -> None:
    secret = private()
    secret.second_moments(sigma=4.0)
    assert [step.noise_multiplier for step in secret.granted()[0]] == [4.0]


@pytest.mark.parametrize("together", [False, True])
def test_turned_features_give_the_gradients_of_the_turned_rows(together: bool) -> None:
    """The rows themselves are not copied: a linear model's weights and sums are turned."""
    x, y = data()
    if together:
        x, y = x[:1].expand(2, -1, -1), y[:1].expand(2, -1)
    half = torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(4))
    matrices = (half + half.transpose(1, 2)) / 20
    secret = Private(Linear(7, 3), x, y, BUDGET, seeds=[1, 2])
    turned = secret.turned([matrices[0].matmul, matrices[1].matmul])
    assert turned._x is secret._x
    plain = Private(Linear(7, 3), x @ matrices, y, BUDGET, seeds=[1, 2])
    theta = torch.randn(2, 21, generator=torch.Generator().manual_seed(5))
    norms = plain._norms(theta)
    torch.testing.assert_close(turned._norms(theta), norms)
    clip = clips.Flat(float(norms.median()))  # half of the examples are clipped
    torch.testing.assert_close(turned.gradient(theta, clip, 4.0), plain.gradient(theta, clip, 4.0))
    torch.testing.assert_close(turned.mean_gradient(theta), plain.mean_gradient(theta))
    torch.testing.assert_close(turned.accuracy(theta, 4.0), plain.accuracy(theta, 4.0))
    assert secret.claimed() == plain.claimed(), "the same budget pays"


def test_features_are_turned_for_models_of_one_layer() -> None:
    with pytest.raises(dim.UsageError, match="one layer"):
        private(model=Network(7, 3)).turned([torch.eye(7).matmul] * 2)


def test_a_model_of_whitened_features_becomes_one_of_the_given_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is returned scores the given features as training saw the shortened ones."""
    x, y = data()
    x[:, :, 0] += 0.3
    x = x / (1.2 * x.norm(dim=2).max())
    secret = Private(Linear(7, 3), x, y, Budget(epsilon=200.0, delta=1e-5), seeds=[1, 2])
    trained: dict[str, Any] = {}
    real = descent.descend

    def watched(turned: Private, *more: Any) -> Tensor:
        trained["model"], trained["theta"] = turned.model, real(turned, *more)
        trained["lengths"] = turned._lengths
        return torch.as_tensor(trained["theta"])

    monkeypatch.setattr(descent, "descend", watched)
    run = METHODS["uniform-whitened"].run
    assert run is not None
    theta = run(secret, {"lr": 2.0, "clip": 0.1, "steps": 5})
    assert float(trained["lengths"].norm()) < 0.8 * float(x.norm()), "a direction was shortened"
    model = Linear(7, 3)
    expected = trained["model"].outputs(trained["theta"], x)
    assert torch.allclose(model.outputs(theta, x), expected, atol=1e-5)
    again = Private(Linear(7, 3), x, y, Budget(epsilon=200.0, delta=1e-5), seeds=[1, 2])
    assert torch.equal(run(again, {"lr": 2.0, "clip": 0.1, "steps": 5}), theta), "repeats itself"

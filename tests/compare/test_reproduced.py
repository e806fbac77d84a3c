"""What methods' papers say of them, as far as it can be checked in seconds."""

from __future__ import annotations

import math

import pytest
import torch

from diminuendo.budget import Budget
from diminuendo.compare import clips, descent
from diminuendo.compare.data import TASKS
from diminuendo.compare.methods import METHODS
from diminuendo.compare.methods.reported import CHECKED, NOT_COMPARED, REPORTED
from diminuendo.compare.models import Linear
from diminuendo.compare.private import Private


def accuracies(key: str, choices: list[dict[str, float]], epsilon: float = 3.0) -> list[float]:
    """Mean test accuracy on 1,000 embedded digits over three seeds, for each choice of settings."""
    pool = TASKS["mnist"].load(None)
    seeds = [1, 2, 3]
    x, y = pool.draw(1000, seeds)
    model, run = Linear(pool.features, 10), METHODS[key].run
    assert run is not None
    found = []
    for settings in choices:
        budget = Budget(epsilon=epsilon, delta=1e-5)
        theta = run(Private(model, x, y, budget, seeds=seeds), settings)
        test = pool.test_x.expand(3, -1, -1), pool.test_y.expand(3, -1)
        found.append(float(model.accuracy(theta, *test).mean()))
    return found


def test_objective_perturbation_is_better_than_output_perturbation() -> None:
    """Chaudhuri, Monteleoni and Sarwate 2011: for every regularisation (3.5 to 4.5 points)."""
    ridges = [{"ridge": value} for value in (0.01, 0.03, 0.1)]
    objective, output = accuracies("objective", ridges, 1.0), accuracies("output", ridges, 1.0)
    assert all(one > other + 0.01 for one, other in zip(objective, output, strict=True))


def test_automatic_clipping_needs_no_clip_norm() -> None:
    """Bu et al. 2023: C can be taken into the learning rate, and nearly as much is reached with
    one number less to tune."""
    lengths = (9.0, 18.0, 36.0, 72.0)
    flat = [
        {"lr": length / clip, "clip": clip, "steps": 40}
        for length in lengths
        for clip in (0.05, 0.2, 0.8)
    ]
    automatic = [{"lr": length, "clip": 1.0, "steps": 40} for length in lengths]
    reached = accuracies("auto-s", automatic)
    assert max(reached) > max(accuracies("uniform", flat)) - 0.025
    halved = [{"lr": 2 * length, "clip": 0.5, "steps": 40} for length in lengths]
    assert accuracies("auto-s", halved) == pytest.approx(reached, abs=2e-3)


def test_automatic_clipping_is_flat_clipping_of_long_gradients() -> None:
    norms = [torch.tensor([[5.0, 20.0, 300.0]])]
    flat, automatic = clips.Flat(0.5).factors(norms)[0], clips.Automatic(0.5).factors(norms)[0]
    torch.testing.assert_close(automatic, flat, rtol=0.01 / 5, atol=0)


def test_the_corrected_second_moment_is_that_of_the_gradient() -> None:
    """Tang, Shpilevskiy and Lécuyer 2024: with much noise Adam's step is g/(noise), the corrected
    one is g/|g|. 4,000 coordinates, 300 steps, seeded."""
    generator = torch.Generator().manual_seed(1)
    gradient, deviation = 0.5, 3.0
    corrected = descent.adam(1.0, noise_variance=lambda _: deviation**2, floor=1e-8)
    plain = descent.adam(1.0)
    for t in range(300):
        noisy = gradient + deviation * torch.randn(1, 4000, generator=generator)
        steps = corrected(t, noisy), plain(t, noisy)
    expected = gradient / math.hypot(gradient, deviation)
    assert float(steps[1].mean()) == pytest.approx(expected, rel=0.1)
    assert float(steps[0].median()) > 2 * float(steps[1].median())


def test_every_method_says_what_its_paper_reports() -> None:
    assert set(REPORTED) | set(CHECKED) <= set(METHODS)
    for method in METHODS.values():
        assert method.reported
        if method.key not in REPORTED:
            assert method.reported == NOT_COMPARED

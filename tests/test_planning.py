"""plan(...) puts the parts together and keeps what it promised."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import diminuendo as dim
from diminuendo import bounds, influence, schedules
from diminuendo.accounting import renyi
from diminuendo.planning import SCHEDULES

BUDGET = dim.Budget(epsilon=4, delta=1e-8)
LARGE = {"examples": 100_000, "parameters": 1000}


def test_paper_setting() -> None:
    plan = dim.plan(BUDGET, examples=1000, parameters=71010, clip=4, gamma=0.98, steps=100)
    assert plan.steps == 100
    assert BUDGET.R * (1 - 1e-9) <= math.fsum(1 / plan.sigmas**2) <= BUDGET.R
    assert 4 * (1 - 1e-6) <= plan.epsilon <= 4
    np.testing.assert_allclose(
        plan.sigmas,
        schedules.optimal(influence.gradient_descent(gamma=0.98, steps=100), BUDGET.R),
    )
    alpha = 71010 * 16 / (2 * BUDGET.R * 1000**2)
    assert plan.alpha == pytest.approx(alpha)
    assert plan.erub == pytest.approx(
        bounds.gradient_descent_dynamic(gamma=0.98, alpha=alpha, steps=100), rel=1e-8
    )
    assert plan.erub_uniform == pytest.approx(
        bounds.gradient_descent_uniform(gamma=0.98, alpha=alpha, steps=100), rel=1e-8
    )


def test_auto_steps_compare_each_schedule_at_its_best() -> None:
    plan = dim.plan(BUDGET, alpha=1e-5, kappa=20, examples=1000)
    assert (plan.steps, plan.uniform_steps) == (163, 108)
    assert plan.erub == pytest.approx(0.0153579, rel=1e-5)
    assert plan.erub_uniform == pytest.approx(0.0254430, rel=1e-5)


def test_kappa_and_gamma_say_the_same() -> None:
    one = dim.plan(BUDGET, **LARGE, kappa=50)
    two = dim.plan(BUDGET, **LARGE, gamma=1 - 1 / 50)
    np.testing.assert_array_equal(one.sigmas, two.sigmas)
    assert one.erub == two.erub
    assert one.digest != two.digest


def test_spectrum_and_curve() -> None:
    eigenvalues = np.linspace(0.2, 2, 30)
    plan = dim.plan(BUDGET, **LARGE, spectrum=eigenvalues)
    q = influence.spectrum(eigenvalues, steps=plan.steps)
    np.testing.assert_allclose(plan.sigmas, schedules.optimal(q, BUDGET.R))
    longer = dim.plan(BUDGET, **LARGE, spectrum=eigenvalues, steps=plan.steps + 1)
    shorter = dim.plan(BUDGET, **LARGE, spectrum=eigenvalues, steps=plan.steps - 1)
    assert plan.erub <= min(longer.erub, shorter.erub)
    assert any("M = 2 (from the spectrum)" in words for words in plan.assumptions)
    curve = dim.plan(BUDGET, **LARGE, influence=[1, 2, 4, 8])
    assert curve.steps == 4
    np.testing.assert_allclose(curve.sigmas, schedules.optimal([1, 2, 4, 8], BUDGET.R))


def test_momentum_uses_its_own_curve_and_the_theorems_step() -> None:
    plan = dim.plan(BUDGET, **LARGE, kappa=5, momentum=0.5)
    eta0 = bounds.admissible_step(beta=0.5, kappa=5)
    q = influence.momentum(gamma=1 - eta0 / 10, beta=0.5, steps=plan.steps)
    np.testing.assert_allclose(plan.sigmas, schedules.optimal(q, BUDGET.R), rtol=1e-9)
    assert plan.erub == pytest.approx(
        bounds.momentum_dynamic(
            gamma=1 - eta0 / 10, beta=0.5, eta0=eta0, alpha=plan.alpha, steps=plan.steps
        ),
        rel=1e-8,
    )
    assert plan.erub < plan.erub_uniform


def test_without_facts_the_rate_is_said_to_be_a_guess() -> None:
    for steps in ("auto", 80):
        plan = dim.plan(BUDGET, **LARGE, steps=steps)
        assert any("It is a guess: measure" in words for words in plan.assumptions)
    assert plan.sigmas[0] / plan.sigmas[-1] == pytest.approx(3, rel=0.02)
    assert dim.plan(BUDGET, **LARGE, steps=5, momentum=0.9).steps == 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_lands_on_the_budget(schedule: str) -> None:
    plan = dim.plan(BUDGET, **LARGE, kappa=20, steps=77, schedule=schedule)
    assert BUDGET.R * (1 - 1e-9) <= math.fsum(1 / plan.sigmas**2) <= BUDGET.R
    assert plan.noise_ratio >= dim.plan(BUDGET, **LARGE, kappa=20, steps=77).noise_ratio


def test_custom_schedules() -> None:
    one = dim.plan(BUDGET, **LARGE, steps=3, schedule=[3, 2, 1])
    two = dim.plan(BUDGET, **LARGE, steps=3, schedule=lambda t: 4 - t)
    assert one == two
    assert one.schedule == "custom"
    assert one.sigmas[0] == pytest.approx(3 * one.sigmas[2])


@given(
    epsilon=st.floats(0.05, 20),
    delta=st.floats(1e-12, 1e-5),
    steps=st.integers(1, 50),
    gamma=st.floats(0, 0.999),
    clip=st.floats(0.01, 100),
    relation=st.sampled_from(["add-remove", "replace-one"]),
    conversion=st.sampled_from(["exact", "zcdp", "zcdp-tight"]),
    schedule=st.sampled_from(SCHEDULES),
)
def test_json_both_ways_bit_for_bit(**given_: object) -> None:
    fields = dict(given_)
    budget = dim.Budget(
        **{
            k: fields.pop(k)
            for k in ("epsilon", "delta", "relation", "conversion")  # type: ignore[arg-type]
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = dim.plan(budget, examples=1000, parameters=10, **fields)  # type: ignore[arg-type]
    again = dim.Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    assert again.sigmas.tobytes() == plan.sigmas.tobytes()
    assert plan.epsilon <= budget.epsilon


def test_a_plan_cannot_be_changed() -> None:
    plan = dim.plan(BUDGET, **LARGE, kappa=20)
    with pytest.raises(AttributeError):
        plan.epsilon = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan.sigmas[0] = 1.0


def tampered(**changes: object) -> str:
    data = json.loads(dim.plan(BUDGET, **LARGE, kappa=20, steps=10).to_json())
    return json.dumps({**data, **changes})


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("{", dim.InputError, "valid JSON"),
        ("[]", dim.InputError, "diminuendo.plan"),
        ("{}", dim.InputError, "diminuendo.plan"),
        (tampered(version=3), dim.SchemaError, "version 1 or 2.*Plan again"),
        (tampered(epsilon=0.1), dim.InputError, "digest"),
        (tampered(extra=1), dim.InputError, "Differing: .*extra"),
        (tampered(sigmas=[1.0]), dim.InputError, "length of sigmas"),
        (tampered(sigmas="abc"), dim.InputError, "sigmas"),
        (tampered(budget={"epsilon": 4}), dim.InputError, "right types"),
    ],
)
def test_other_files_are_refused(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        dim.Plan.from_json(text)


def test_a_file_that_understates_its_epsilon_is_refused() -> None:
    plan = dim.plan(BUDGET, **LARGE, kappa=20, steps=10)
    lying = dim.Plan(
        **{**{name: getattr(plan, name) for name in plan.__dataclass_fields__}, "epsilon": 1.0}
    )
    with pytest.raises(dim.InputError, match="as accounted"):
        dim.Plan.from_json(lying.to_json())


def test_events_gather_equal_steps() -> None:
    plan = dim.plan(BUDGET, **LARGE, steps=8, schedule="step", kappa=20)
    assert [event.count for event in plan.events] == [2, 2, 2, 2]
    assert sum(event.count for event in plan.events) == plan.steps


def test_summary_can_be_read() -> None:
    plan = dim.plan(BUDGET, **LARGE, kappa=20)
    text = str(plan)
    for part in ("steps", "█", "ε = ", "ERUB", "uniform", "Assumptions", "a public guess"):
        assert part in text


def test_subsampled_plan_is_certified_and_on_target() -> None:
    budget = dim.Budget(epsilon=2, delta=1e-5)
    plan = dim.plan(
        budget, examples=10_000, parameters=100, gamma=0.98, steps=100, sampling_rate=0.02
    )
    assert 2 * (1 - 1e-4) <= plan.epsilon <= 2
    assert plan.epsilon == dim.epsilon(plan.sigmas, 1e-5, 0.02)
    assert plan.noise_ratio < 1
    assert dim.Plan.from_json(plan.to_json()) == plan


def test_subsampled_plan_beats_every_other_price() -> None:
    """σ near 1: the 1/σ² rule is worse than uniform, and no Rényi order reaches the true price."""
    budget, rate = dim.Budget(epsilon=2, delta=1e-5), 0.02
    plan = dim.plan(budget, examples=10_000, parameters=1, gamma=0.98, steps=60, sampling_rate=rate)
    q = influence.gradient_descent(gamma=0.98, steps=60)
    best = np.sum(q * plan.sigmas**2)
    rule = dim.calibrate(schedules.optimal_shape(q), budget, rate)
    uniform = dim.calibrate(np.ones(60), budget, rate)
    assert np.sum(q * rule**2) > np.sum(q * uniform**2) > best
    for order in (2, 4, 8):
        spent = float(np.sum(renyi.divergence(order, plan.sigmas, rate)))

        def price(s: np.ndarray, order: int = order) -> np.ndarray:
            return renyi.divergence(order, s, rate)

        other = dim.calibrate(schedules.priced(q, price, spent), budget, rate)
        assert np.sum(q * other**2) >= best * (1 - 1e-4)


def test_subsampled_plan_is_a_local_optimum() -> None:
    budget, rate = dim.Budget(epsilon=2, delta=1e-5), 0.05
    plan = dim.plan(budget, examples=10_000, parameters=1, gamma=0.9, steps=12, sampling_rate=rate)
    q = influence.gradient_descent(gamma=0.9, steps=12)
    best = np.sum(q * plan.sigmas**2)
    rng = np.random.default_rng(2)
    for _ in range(6):
        kicked = plan.sigmas * np.exp(0.1 * rng.standard_normal(12))
        assert np.sum(q * dim.calibrate(kicked, budget, rate) ** 2) >= best * (1 - 1e-3)


def test_momentum_bound_is_the_same_fact_from_kappa_and_gamma() -> None:
    """γ = 1 − 1/κ: what differs is the schedule, not the theorem for uniform noise."""
    one = dim.plan(BUDGET, **LARGE, kappa=20, momentum=0.9, steps=500, schedule="uniform")
    two = dim.plan(BUDGET, **LARGE, gamma=0.95, momentum=0.9, steps=500, schedule="uniform")
    assert one.erub == pytest.approx(two.erub, rel=1e-9)


def test_numpy_scalars_are_numbers() -> None:
    given: dict[str, Any] = {
        "examples": np.int64(100_000),
        "parameters": np.int64(10),
        "kappa": np.float32(20),
        "momentum": np.float32(0.5),
        "steps": np.int32(9),
    }
    plan = dim.plan(BUDGET, **given)
    assert dim.Plan.from_json(plan.to_json()) == plan


@pytest.mark.filterwarnings("ignore::diminuendo.PlanWarning")
def test_tiny_eigenvalues_do_no_harm() -> None:
    for tiny in (1e-7, 1e-9, 1e-17):
        assert dim.plan(BUDGET, **LARGE, spectrum=[1, 0.5, tiny], steps=100).steps == 100


@pytest.mark.parametrize(("gamma", "steps", "rate"), [(0.95, 60, 0.05), (0.9, 150, 0.3)])
def test_steep_influences_are_followed_under_sampling(
    gamma: float, steps: int, rate: float
) -> None:
    budget = dim.Budget(epsilon=2, delta=1e-5)
    plan = dim.plan(
        budget, examples=10**4, parameters=1, gamma=gamma, steps=steps, sampling_rate=rate
    )
    q = influence.gradient_descent(gamma=gamma, steps=steps)
    for power in (0.0, 0.125, 0.25):
        other = dim.calibrate(q**-power, budget, rate)
        assert np.sum(q * plan.sigmas**2) <= np.sum(q * other**2) * (1 + 1e-3)


def test_a_bound_that_says_nothing_is_warned_about_only_where_it_decides() -> None:
    facts: dict[str, Any] = {"examples": 1000, "parameters": 71010, "clip": 4, "gamma": 0.98}
    with pytest.warns(dim.PlanWarning, match="at 1 or above it says nothing"):
        dim.plan(BUDGET, **facts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dim.plan(BUDGET, **facts, steps=100).erub > 1


def test_warnings() -> None:
    with pytest.warns(dim.PlanWarning, match="above 1/examples"):
        dim.plan(dim.Budget(epsilon=4, delta=1e-3), examples=10_000, parameters=1, kappa=20)
    with pytest.warns(dim.PlanWarning, match="far more than"):
        dim.plan(BUDGET, **LARGE, kappa=20, steps=5000)


BAD = [
    ({"examples": 0}, "examples"),
    ({"examples": 1.5}, "examples"),
    ({"parameters": 0}, "parameters"),
    ({"parameters": None}, "parameters"),
    ({"clip": 0}, "clip"),
    ({"clip": math.nan}, "clip"),
    ({"clip": math.inf}, "clip"),
    ({"steps": 0}, "steps"),
    ({"steps": "many"}, "steps"),
    ({"kappa": 0.5}, "kappa"),
    ({"gamma": 1.0}, "gamma"),
    ({"gamma": -0.1}, "gamma"),
    ({"kappa": 20, "gamma": 0.95}, "They say the same thing"),
    ({"kappa": 20, "spectrum": [1]}, "They say the same thing"),
    ({"influence": [1, 2, 3], "steps": 4}, r"length of influence.*\(4\), got 3"),
    ({"influence": []}, "influence"),
    ({"influence": [1, -1]}, r"influence\[1\]"),
    ({"spectrum": [0.0]}, "spectrum"),
    ({"spectrum": [-1.0, 1.0]}, r"spectrum\[0\]"),
    ({"spectrum": [1.0], "momentum": 0.9}, "momentum"),
    ({"spectrum": [2.0], "smoothness": 1.0}, "smoothness"),
    ({"momentum": 1.0}, "momentum"),
    ({"smoothness": -1}, "smoothness"),
    ({"gap": 0}, "gap"),
    ({"alpha": 0}, "alpha"),
    ({"step_size": 1.5}, "step_size"),
    ({"schedule": "cosine"}, "schedule"),
    ({"schedule": [1, 2], "steps": 3}, "length of shape"),
    ({"fall": 0.5}, "fall"),
    ({"fall": 0.5, "schedule": "uniform"}, "fall"),
    ({"step_size": 0.5}, "step_size"),
    ({"step_size": 0.5, "momentum": 0.9, "kappa": 5}, "step_size"),
    ({"momentum": 7.0, "influence": [1, 2]}, "momentum"),
    ({"alpha": 1e-5, "gap": -1}, "gap"),
    ({"alpha": 1e-5, "parameters": -5}, "parameters"),
    ({"steps": 10**12}, "steps"),
    ({"examples": 10**400}, "examples"),
    ({"clip": 1e200}, "clip"),
    ({"kappa": 1e8, "alpha": 1e-20}, "steps"),
    ({"fall": 0, "schedule": "linear"}, "fall"),
    ({"sampling_rate": 0}, "sampling_rate"),
    ({"sampling_rate": 1.5}, "sampling_rate"),
]


@pytest.mark.parametrize(("change", "said"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_input(change: dict[str, object], said: str) -> None:
    arguments = {**LARGE, **change}
    with pytest.raises(dim.InputError, match=said) as caught:
        dim.plan(BUDGET, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("Expected ")


@settings(max_examples=20)
@given(st.sampled_from(list(itertools.product((1e-4, 1.0, 100.0), (1e-15, 1e-8, 0.1)))))
def test_plans_at_the_edges_of_budgets(pair: tuple[float, float]) -> None:
    epsilon, delta = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = dim.plan(
            dim.Budget(epsilon=epsilon, delta=delta), examples=1000, parameters=10, kappa=20
        )
    assert plan.epsilon <= epsilon
    assert np.isfinite(plan.erub)


def test_scaling_the_noise_keeps_the_shape_and_costs_less() -> None:
    made = dim.plan(dim.Budget(epsilon=2, delta=1e-5), examples=1000, alpha=1e-4, kappa=10)
    scaled = made.with_noise_scaled(1.5)
    assert np.array_equal(scaled.sigmas, made.sigmas * 1.5)
    assert scaled.epsilon == pytest.approx(dim.epsilon(scaled.sigmas, 1e-5), rel=1e-9)
    assert scaled.epsilon < made.epsilon
    assert scaled.erub == pytest.approx(2.25 * made.erub)
    assert dim.Plan.from_json(scaled.to_json()) == scaled
    with pytest.raises(dim.InputError, match="factor"):
        made.with_noise_scaled(0.9)
    with pytest.warns(DeprecationWarning, match="with_noise_scaled"):
        assert made.louder(1.5) == scaled


def test_a_pair_of_numbers_is_a_budget() -> None:
    pair: Any = (2, 1e-5)
    budget = dim.Budget(epsilon=2, delta=1e-5)
    assert dim.plan(pair, **LARGE, kappa=20) == dim.plan(budget, **LARGE, kappa=20)
    assert np.array_equal(dim.calibrate([1, 2], pair), dim.calibrate([1, 2], budget))
    wrong: tuple[Any, ...] = (2, (2,), "2", None, (2, 1e-5, 3))
    for value in wrong:
        with pytest.raises(dim.InputError, match=r"a Budget, or a pair \(epsilon, delta\)"):
            dim.plan(value, **LARGE, kappa=20)
        with pytest.raises(dim.InputError, match="a Budget, or a pair"):
            dim.calibrate([1, 2], value)


def test_a_rate_for_each_step() -> None:
    rates = np.linspace(0.05, 0.4, 12)
    budget = dim.Budget(epsilon=2, delta=1e-5)
    made = dim.plan(budget, examples=500, alpha=1e-5, gamma=0.9, sampling_rate=rates)
    assert made.steps == 12
    assert np.array_equal(made.rates, rates)
    assert [event.sampling_rate for event in made.events] == rates.tolist()
    assert made.epsilon == dim.epsilon(made.sigmas, 1e-5, rates) <= 2
    assert made.epsilon > 2 * (1 - 1e-4)
    again = dim.Plan.from_json(made.to_json())
    assert again == made
    assert np.array_equal(again.sampling_rate, rates)
    assert "0.05 to 0.4" in made.summary()
    weight = 0.9 ** np.arange(11, -1, -1.0) / rates**2
    uniform = dim.calibrate(np.ones(12), budget, rates)
    assert np.sum(weight * made.sigmas**2) < np.sum(weight * uniform**2)
    assert made.noise_ratio < 1
    assert made.epsilon_after(0) == 0
    assert made.epsilon_after(5) == dim.epsilon(made.sigmas[:5], 1e-5, rates[:5])


def test_equal_rates_are_one_rate() -> None:
    budget = dim.Budget(epsilon=2, delta=1e-5)
    options: dict[str, Any] = {"examples": 500, "alpha": 1e-5, "gamma": 0.9, "schedule": "uniform"}
    one = dim.plan(budget, steps=5, sampling_rate=0.1, **options)
    assert dim.plan(budget, sampling_rate=[0.1] * 5, **options) == one
    assert '"sampling_rate": 0.1,' in one.to_json()
    full = dim.plan(budget, steps=5, **options)
    assert dim.plan(budget, sampling_rate=[1.0] * 5, **options) == full


@pytest.mark.parametrize(
    ("rates", "steps"),
    [([0.1, 0.2], 3), ([0.1, 1.2], 2), ([0.1, 0.0], 2), ([], 2), ([[0.1, 0.2]], 2), (["a"], 1)],
)
def test_bad_rates(rates: Any, steps: int) -> None:
    with pytest.raises(dim.InputError, match="sampling_rate"):
        dim.plan(
            dim.Budget(epsilon=2, delta=1e-5),
            examples=500,
            alpha=0.01,
            gamma=0.9,
            steps=steps,
            sampling_rate=rates,
        )

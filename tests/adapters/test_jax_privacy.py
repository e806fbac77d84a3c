"""A plan as JAX-Privacy's execution plan: its noise, its samples and its event."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import diminuendo as dim
from diminuendo.adapters.dp_accounting import from_dp_event
from diminuendo.adapters.jax_privacy import execution_plan, noise_multipliers
from diminuendo.errors import InputError


def plan(**options: Any) -> dim.Plan:
    return dim.plan(
        dim.Budget(epsilon=2, delta=1e-6, relation=options.pop("relation", "add-remove")),
        examples=500,
        parameters=20,
        clip=3.0,
        steps=8,
        gamma=0.8,
        **options,
    )


def test_noise_multipliers_are_never_below_the_plan_s() -> None:
    sigmas = noise_multipliers(plan(sampling_rate=0.1))
    assert sigmas.dtype == np.float32
    ours = plan(sampling_rate=0.1).sigmas
    assert (sigmas.astype(np.float64) >= ours).all()
    np.testing.assert_allclose(sigmas, ours, rtol=3e-7)


def exported(**options: Any) -> tuple[dim.Plan, Any]:
    pytest.importorskip("jax_privacy", reason="JAX-Privacy is not installed")
    made = plan(**options)
    return made, execution_plan(made, noise_seed=1)


def test_the_event_is_the_plan_s() -> None:
    made, theirs = exported(sampling_rate=0.1)
    assert from_dp_event(theirs.dp_event) == made.events


def test_the_noise_has_the_planned_deviation_in_every_step() -> None:
    """100,000 coordinates a step: a deviation is off by 3% with probability below 1e-10."""
    made, theirs = exported(sampling_rate=0.1)
    transform = theirs.noise_addition_transform
    zeros = np.zeros(100_000, np.float32)
    state = transform.init(zeros)
    previous = None
    for sigma in made.sigmas:
        noise, state = transform.update(zeros, state)
        assert float(np.std(np.asarray(noise))) == pytest.approx(sigma * made.clip, rel=0.03)
        assert previous is None or not np.array_equal(noise, previous)
        previous = noise


@pytest.mark.filterwarnings("ignore:optax:DeprecationWarning")
def test_gradients_are_clipped_and_summed() -> None:
    made, theirs = exported(sampling_rate=0.1)
    import jax.numpy as jnp

    def loss(parameters: Any, batch: Any) -> Any:
        return (parameters * batch).sum()

    gradient = theirs.clipped_grad(loss)
    batch = jnp.asarray([[30.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(gradient(jnp.ones(2), batch), [made.clip, 1.0], rtol=1e-5)
    import dp_accounting

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    assert gradient.sensitivity(relation) == pytest.approx(made.clip)


def test_samples_are_the_plan_s() -> None:
    made, theirs = exported(sampling_rate=0.1)
    batches = list(theirs.batch_selection_strategy.batch_iterator(made.examples, 0))
    assert len(batches) == made.steps
    sizes = [len(batch) for batch in batches]
    assert 50 - 6 * 45**0.5 < np.mean(sizes) < 50 + 6 * 45**0.5
    assert len(set(sizes)) > 1


def test_without_a_seed_keys_differ() -> None:
    made, _ = exported()
    noises = []
    for _ in range(2):
        transform = execution_plan(made).noise_addition_transform
        zeros = np.zeros(4, np.float32)
        noises.append(np.asarray(transform.update(zeros, transform.init(zeros))[0]))
    assert not np.array_equal(noises[0], noises[1])


@pytest.mark.parametrize(
    "options", [{"sampling_rate": [0.1] * 4 + [0.2] * 4}, {"relation": "replace-one"}]
)
def test_what_it_has_no_counterpart_for_is_refused(options: dict[str, Any]) -> None:
    pytest.importorskip("jax_privacy", reason="JAX-Privacy is not installed")
    with pytest.raises(InputError, match="the plan"):
        execution_plan(plan(**options))

"""A plan as what JAX-Privacy runs: noise multipliers, event and execution plan.

    from diminuendo.adapters.jax_privacy import execution_plan

A noise schedule is a diagonal noising matrix, so that JAX-Privacy's own privatizer adds the
planned noise. The plan's ε holds there for real arithmetic: noise is drawn by JAX in floating
point, and what counts the steps is the loop that uses it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diminuendo import _extras
from diminuendo.adapters.dp_accounting import to_dp_event
from diminuendo.errors import InputError
from diminuendo.planning import Plan


def noise_multipliers(plan: Plan) -> NDArray[np.float32]:
    """σ_1 … σ_T in float32, none below the plan's: JAX-Privacy's unit is ours, std over clip."""
    rounded = plan.sigmas.astype(np.float32)
    low = rounded.astype(np.float64) < plan.sigmas
    rounded[low] = np.nextafter(rounded[low], np.float32(np.inf))
    return rounded


def execution_plan(plan: Plan, *, noise_seed: int | None = None) -> Any:
    """A JAX-Privacy `DPExecutionPlan` that takes the plan's steps.

    clipped_grad              sums gradients clipped to plan.clip, and divides by nothing: divide
                              what comes out of the noise by plan.examples × plan.sampling_rate
    batch_selection_strategy  Poisson samples at plan.sampling_rate, plan.steps of them
    noise_addition_transform  adds noise with standard deviation σ_t × plan.clip in step t
    dp_event                  what that releases, for dp-accounting

    noise_seed  only for tests and experiments: without it the noise's key has 64 bits from the
                operating system, where JAX-Privacy's default has 31

    For add-remove neighbours and one sampling rate.
    """
    with _extras.needed("jax_privacy", extra=None, purpose="Exporting to JAX-Privacy"):
        from jax_privacy import batch_selection, clipping, noise_addition
        from jax_privacy.matrix_factorization import streaming_matrix
    import jax

    if not isinstance(plan.sampling_rate, float) or plan.budget.relation != "add-remove":
        raise InputError(
            "one with a single sampling rate, for add-remove neighbours",
            name="the plan",
            value=f"{plan.budget.relation}, rates of {plan.sampling_rate!r}",
        )
    clipped = functools.partial(clipping.clipped_grad, l2_clip_norm=plan.clip)
    key = (
        jax.random.wrap_key_data(np.array([secrets.randbits(32) for _ in range(2)], np.uint32))
        if noise_seed is None
        else jax.random.key(noise_seed)
    )
    kind = _kind()
    parts = {
        "clipped_grad": clipped,
        "batch_selection_strategy": batch_selection.CyclicPoissonSampling(
            sampling_prob=plan.sampling_rate,
            iterations=plan.steps,
            partition_type=batch_selection.PartitionType.INDEPENDENT,
        ),
        "noise_addition_transform": noise_addition.matrix_factorization_privatizer(
            streaming_matrix.diagonal(jax.numpy.asarray(noise_multipliers(plan))),
            stddev=plan.clip,
            prng_key=key,
        ),
        "dp_event": to_dp_event(plan),
    }
    if "neighboring_relation" in {field.name for field in dataclasses.fields(kind)}:
        import dp_accounting

        parts["neighboring_relation"] = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    return kind(**parts)


def _kind() -> Any:
    """`DPExecutionPlan`, which has moved between versions."""
    try:
        module = importlib.import_module("jax_privacy.execution_plan")
    except ModuleNotFoundError:
        module = importlib.import_module("jax_privacy.experimental.execution_plan")
    return module.DPExecutionPlan

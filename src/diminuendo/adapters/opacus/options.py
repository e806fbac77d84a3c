"""The arguments of `make_private`: what each means here, and what is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from diminuendo import _validate
from diminuendo.adapters.opacus.run import Clipping
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.training import Flat, PerLayer
from diminuendo.training.clipping import Engine

Factors = Sequence[float] | Callable[[int], float]
"""What σ is multiplied by in step t = 1, 2, …"""

_MODES = ("hooks", "functorch", "ew", "ghost")


class Wanted(TypedDict):
    """What a plan must be for, by the data loader and the epochs."""

    examples: int
    clip: float
    steps: int
    sampling_rate: float


def check(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    batch_first: bool,
    poisson_sampling: bool,
    grad_sample_mode: str,
) -> None:
    """Refuse what the claim would not cover, or what has no counterpart here."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "a DataLoader of a map-style Dataset",
            name="data_loader",
            value=type(loader).__name__,
            remedy="An iterable dataset cannot be Poisson-sampled.",
        )
    if len(loader) == 0:
        raise InputError(
            "at least 1",
            name="the number of batches of data_loader",
            value=0,
            remedy="With drop_last=True a dataset smaller than batch_size has none.",
        )
    _check_sampler(loader)
    for name, value in (("batch_first", batch_first), ("poisson_sampling", poisson_sampling)):
        if not value:
            raise InputError("True", name=name, value=value, remedy=_WHY[name])
    _validate.choice("grad_sample_mode", grad_sample_mode, _MODES, remedy=_WHY["mode"])
    if isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__name__ in (
        "DifferentiallyPrivateDistributedDataParallel",
        "FSDPModule",
    ):
        raise InputError(
            "the model itself",
            name="module",
            value=type(module).__name__,
            remedy="In a torch.distributed group ranks share each batch and sum before noise is "
            "added; no wrapper is needed.",
        )
    for name, part, inside in (
        ("module", module, "_module"),
        ("optimizer", optimizer, "original_optimizer"),
    ):
        if type(part).__module__.split(".")[0] == "opacus":
            raise InputError(
                "one that Opacus has not made private",
                name=name,
                value=type(part).__name__,
                remedy=f"Give what is inside ({name}.{inside}).",
            )


def _check_sampler(loader: DataLoader[Any]) -> None:
    """A Poisson sample takes the place of the whole dataset in some order, and of nothing else.

    A loader that draws from a part of its dataset, or weighs it, means other data than would be
    trained on.
    """
    order = loader.sampler
    plain = type(order) is SequentialSampler or (
        type(order) is RandomSampler and not order.replacement and len(order) == examples(loader)
    )
    if not plain or type(loader.batch_sampler) is not BatchSampler:
        raise InputError(
            "batches of the whole dataset, in order or shuffled",
            name="what data_loader draws",
            value=type(loader.batch_sampler if plain else order).__name__,
            remedy="Poisson sampling takes its place. For a part of the data give a loader of "
            "torch.utils.data.Subset(dataset, indices), with a batch_size.",
        )
    if loader.worker_init_fn is not None:
        warnings.warn(
            "worker_init_fn of the data loader is not called: batches are drawn by another.",
            UserWarning,
            stacklevel=4,
        )


def examples(loader: DataLoader[Any]) -> int:
    """The number of examples of the loader's dataset."""
    dataset: Any = loader.dataset
    return len(dataset)


_WHY = {
    "batch_first": "The examples are the rows of a batch.",
    "poisson_sampling": "The claim is for Poisson samples; batches that are shuffled cost more.",
    "mode": "Gradients are computed by this library's engine, which knows these names for the one "
    "way it has.",
}


def factors(schedule: Any) -> Callable[[int], float]:
    """What σ is multiplied by in step t = 1, 2, …, as a function of t."""
    if schedule is None:
        return lambda step: 1.0  # noqa: ARG005
    if callable(schedule):
        given = schedule
        return lambda step: _validate.positive("schedule(t)", given(step))
    if isinstance(schedule, (str, Plan)):
        raise InputError(
            "a function of the step or a sequence of numbers",
            name="schedule",
            value=schedule if isinstance(schedule, str) else "a Plan",
            remedy="make_private does not know how many steps there will be; "
            "make_private_with_epsilon does, and takes it.",
        )
    numbers = _validate.vector("schedule", np.asarray(schedule)).tolist()
    return lambda step: float(numbers[min(step, len(numbers)) - 1])


def clip_rule(clipping: str, norm: float | Sequence[float], module: nn.Module) -> Clipping:
    """The clip of all steps: flat, or layer by layer."""
    _validate.choice(
        "clipping",
        clipping,
        ["flat", "per_layer"],
        remedy="Norms that follow the gradients (adaptive) would have to be paid for.",
    )
    if clipping == "flat":
        return Flat(_validate.positive("max_grad_norm", norm))
    if not isinstance(norm, Sequence):
        return PerLayer(_validate.positive("max_grad_norm", norm))
    norms = _validate.vector("max_grad_norm", list(norm)).tolist()
    with Engine(module) as engine:
        names, layers = engine.names, engine.layers
    if len(norms) != len(names):
        raise InputError(
            f"one for each of the {len(names)} trained parameters",
            name="max_grad_norm",
            value=f"{len(norms)} numbers",
        )
    of = dict(zip(names, norms, strict=True))
    # A layer's parameters are clipped together here, to the norm that they have together there.
    return PerLayer([math.hypot(*(of[name] for name in layer)) for layer in layers])


def reduction(value: str) -> Literal["mean", "sum"]:
    """What the loop's loss is over examples."""
    return "mean" if _validate.choice("loss_reduction", value, ["mean", "sum"]) == "mean" else "sum"


def seed(generator: torch.Generator | None) -> int | None:
    """A seed drawn from a generator that was given; the run is then not private."""
    if generator is None:
        return None
    warnings.warn(
        "With noise_generator the noise can be drawn again, and this run is NOT private: its ε "
        "says what it would cost without. Leave it out of runs that count.",
        UserWarning,
        stacklevel=3,
    )
    return int(torch.randint(2**49, (1,), generator=generator, device=generator.device))


def trained(module: nn.Module) -> int:
    """The number of trained parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def checked_plan(given: Plan, epsilon: float, delta: float, wanted: Wanted) -> Plan:
    """A plan that was made elsewhere, if it is for this training and within (ε, δ)."""
    for name, value in wanted.items():
        if getattr(given, name) != value:
            raise InputError(f"{value!r}", name=f"the plan's {name}", value=getattr(given, name))
    if (
        given.epsilon > epsilon
        or given.budget.delta > delta
        or given.budget.relation != "add-remove"
    ):
        raise InputError(
            f"within ({epsilon:g}, {delta:g}), for add-remove neighbours",
            name="the plan's budget",
            value=(given.epsilon, given.budget.delta, given.budget.relation),
        )
    return given

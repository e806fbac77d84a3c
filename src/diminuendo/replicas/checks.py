"""Whether data, model and loss fit together: tried on two examples before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo.errors import InputError
from diminuendo.replicas.batch import Loss, cross_entropy
from diminuendo.replicas.layers import layers_of
from diminuendo.training.sampling import as_trained, precision_of

Pair = tuple[Tensor, Tensor]


def checked_pair(data: Any, model: nn.Module, loss: Loss, name: str) -> Pair:
    """(inputs, targets) as tensors that the model and the loss accept, or an `InputError`."""
    pair = as_pair(data, precision_of(model), name)
    check_pair(pair, model, loss, name)
    return pair


def as_pair(pair: Any, precision: torch.dtype, name: str) -> Pair:
    """(inputs, targets) of equal length as tensors; floating-point arrays get this precision."""
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise InputError("a pair (inputs, targets)", name=name, value=type(pair).__name__)
    x, y = (as_trained(part, precision) for part in pair)
    if x.dim() < 2 or len(x) == 0 or y.dim() < 1 or len(x) != len(y):
        raise InputError(
            "inputs (N, …) and targets (N, …) of at least one example",
            name=name,
            value=(tuple(x.shape), tuple(y.shape)),
        )
    return x, y


def check_pair(pair: Pair, model: nn.Module, loss: Loss, name: str) -> None:
    """Raise an `InputError` unless the model takes the inputs and the loss gives a number for each
    example. The model is left as it was.
    """
    x, y = pair
    precision = precision_of(model)
    if x.is_floating_point() and x.dtype is not precision:
        raise InputError(
            f"of the model's precision ({precision})",
            name=f"the inputs of {name}",
            value=x.dtype,
            remedy="Convert the one or the other, as by x.to(…).",
        )
    where = next(model.parameters()).device
    some, targets = x[:2].to(where), y[:2].to(where)
    with _evaluation_mode(model):
        try:
            outputs = model(some.flatten(1) if layers_of(model) is not None else some)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InputError(
                "inputs that the model accepts",
                name=f"the inputs of {name}",
                value=(tuple(x.shape), str(x.dtype)),
                remedy=f"({_first_line(error)})",
            ) from None
        if loss is cross_entropy and y.dim() == 1 and getattr(outputs, "ndim", 0) == 2:
            _check_labels(y, outputs, name)
        try:
            losses = loss(outputs, targets)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InputError(
                "targets that the loss accepts",
                name=f"the targets of {name}",
                value=(tuple(y.shape), str(y.dtype)),
                remedy=f"({_first_line(error)})",
            ) from None
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (len(some),):
        raise InputError(
            f"one number for each example: of shape ({len(some)},) for {len(some)} examples",
            name="the loss",
            value=shape,
            remedy='PyTorch\'s losses do so with reduction="none"; targets of another shape than '
            "the outputs may be the cause, too.",
        )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """For a call that leaves random generators, buffers and modes as they were."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model.eval()
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _check_labels(y: Tensor, outputs: Tensor, name: str) -> None:
    classes = outputs.shape[-1]
    if y.dtype is not torch.int64:
        raise InputError(
            f"labels from 0 to {classes - 1} of type int64",
            name=f"the targets of {name}",
            value=y.dtype,
            remedy="Convert them by y.long().",
        )
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise InputError(
            f"labels from 0 to {classes - 1}, as the model has {classes} outputs",
            name=f"the targets of {name}",
            value="labels outside this range",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]

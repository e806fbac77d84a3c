"""Trying a model out before anything is paid: does an example's loss depend on other examples?

Some rows of a batch are replaced, others kept; a model that mixes nothing gives the kept rows what
it gave them before. Random numbers are drawn anew from the same state in every pass, so that
dropout does not hide anything. What is compared are values: whatever reaches them is seen,
differentiable or not. (What mixes in the backward pass alone is seen by the engine's own probe, by
gradients.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.sampling import precision_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""From a model's outputs and the targets to one loss for each example."""

_Values = Callable[..., Sequence[Tensor]]
"""From the inputs to tensors that have a row for each example."""

# What a row may change by, relative to 1 + its size: kernels may round differently where shapes
# depend on the data.
_LOOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOOSE_HALF = 2e-2
_SIZES = 6
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)


class Shapes:
    """Which shapes of batches have been tried: a new one is tried before it is paid for.

    Sizes count as new where they have another number of binary digits, or are the size of
    something else in the model or the data: there a dimension can be taken for another.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[object] = set()
        self._sizes = {size for part in model.parameters() for size in part.shape}

    def new(self, rows: Tensor, training: bool) -> bool:
        """Whether nothing like this batch was tried before; from now on it was."""
        size, shape = rows.shape[0], rows.shape[1:]
        same = size in self._sizes or size in shape
        key = (shape, rows.dtype, training, size if same else size.bit_length())
        if size < 2 or key in self._seen:
            return False
        self._seen.add(key)
        return True

    def others(self, rows: Tensor) -> list[int]:
        """Smaller sizes at which to try the same rows: 2, 3, and those of other dimensions."""
        wanted = {2, 3} | self._sizes | set(rows.shape[1:])
        return sorted(size for size in wanted if 1 < size < rows.shape[0])[:_SIZES]


def refuse_mixing(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, sizes: Sequence[int] = ()
) -> None:
    """An example's loss must not depend on other examples, or clipping bounds nothing.

    Tried on the whole batch and on its first rows, so many as `sizes` says; where the model draws
    random numbers of its own, in evaluation mode. The model is left as it was.
    """
    modes = [(module, module.training) for module in model.modules()]

    def losses(x: Tensor, y: Tensor) -> list[Tensor]:
        return [loss(model(x), y)]

    def with_other_parameters(x: Tensor, y: Tensor) -> list[Tensor]:
        return [loss(functional_call(model, others, (x,)), y)]

    try:
        for size in (*sizes, len(x)):
            inputs = (x[:size], y[:size])
            answers = _responds(losses, inputs)
            if answers is None:
                model.eval()
                answers = _responds(losses, inputs)
                _restore(modes)
        if answers is False:  # a last layer of zeros answers to nothing
            others = {name: p + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
            if _responds(with_other_parameters, inputs) is False:
                raise other_batch()
    except DiminuendoError:
        raise
    except _ERRORS as error:
        raise InputError(
            "what the model and the loss take",
            name="the first examples",
            value=f"x of shape {tuple(x.shape[1:])}, y of shape {tuple(y.shape[1:])}",
            remedy=f"(x {x.dtype}, y {y.dtype}, the model {precision_of(model)}.) {error}",
        ) from error
    finally:
        _restore(modes)


def refuse_mixing_calls(model: nn.Module, args: Any, kwargs: dict[str, Any], size: int) -> None:
    """The same for a call of the model in one's own loop: seen are its outputs, not the losses.

    Rows are replaced in the first tensor of the call that has so many.
    """
    rows = first_rows(args, kwargs, size)
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    place = next((i for i, leaf in enumerate(leaves) if leaf is rows), None)
    if rows is None or place is None:
        return

    def outputs(others: Tensor) -> list[Tensor]:
        replaced = [*leaves[:place], others, *leaves[place + 1 :]]
        given, named = _pytree.tree_unflatten(replaced, spec)
        out = _pytree.tree_leaves(model(*given, **named))
        return [part for part in out if _has_rows(part, size)]

    try:
        _responds(outputs, (rows.detach(),))
    except DiminuendoError:
        raise
    except _ERRORS:
        return  # the call itself will say so


def first_rows(args: Any, kwargs: dict[str, Any], size: int) -> Tensor | None:
    """The first tensor with so many rows among the arguments of a call."""
    if args and _has_rows(args[0], size):  # nearly always, and to flatten takes longer
        first: Tensor = args[0]
        return first
    return next(
        (leaf for leaf in _pytree.tree_leaves((args, kwargs)) if _has_rows(leaf, size)), None
    )


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def other_batch() -> InputError:
    """The error of losses that have nothing to do with the batch that was drawn."""
    return InputError(
        "computed from the batch that was drawn",
        name="the losses",
        value="those of other examples",
        remedy="The claim is for the plan's own sample: compute them from this batch, whole and "
        "alone.",
    )


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, mode in modes:
        module.training = mode


@torch.no_grad()
def _responds(values: _Values, inputs: tuple[Tensor, ...]) -> bool | None:
    """Whether rows that are replaced change; raises where rows that are kept do.

    None where nothing can be said: passes differ anyway, or there is nothing to replace rows by.
    """
    size, responded = inputs[0].shape[0], None
    with _same_randomness(inputs[0].device) as rewind:
        base, again = (_passed(values, inputs, rewind) for _ in range(2))
        if _changed(base, again, torch.ones(size, dtype=torch.bool)):
            return None
        for keep in _kept(size):
            for replaced in _replacements(inputs, keep):
                try:
                    other = _passed(values, replaced, rewind)
                except _ERRORS:  # not what the model takes
                    continue
                if _changed(base, other, keep):
                    raise InputError(
                        "the same whatever the other examples of the batch are",
                        name="the loss of an example",
                        value="a loss that differs",
                        remedy="The model or the loss mixes examples (by a mean over the batch, "
                        'say: a loss needs reduction="none"), so that clipping would not bound '
                        "what one of them adds.",
                    )
                if not all(map(torch.equal, inputs, replaced)):
                    responded = responded or _differs(base, other)
    return responded


def _differs(base: list[Tensor], other: list[Tensor]) -> bool:
    return not all(map(torch.equal, base, other))


def _passed(
    values: _Values, inputs: tuple[Tensor, ...], rewind: Callable[[], None]
) -> list[Tensor]:
    rewind()
    answers = values(*[part.clone() for part in inputs])
    return [part.clone() if part.dim() else part.reshape(1) for part in answers]


def _kept(size: int) -> Iterator[Tensor]:
    """A random half of the rows, and the other half."""
    generator = torch.Generator()  # its own: the user's random numbers stay as they are
    generator.seed()
    keep = torch.zeros(size, dtype=torch.bool, device="cpu")
    keep[torch.randperm(size, generator=generator, device="cpu")[: size // 2]] = True
    yield keep
    yield ~keep


def _replacements(inputs: tuple[Tensor, ...], keep: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Other rows of the batch in place of those not kept; then random ones far from them."""
    rolled = [part.roll(1, 0) for part in inputs]
    yield tuple(_where(keep, part, other) for part, other in zip(inputs, rolled, strict=True))
    x = inputs[0]
    if x.is_floating_point() and x.numel():
        scale = x.float().std(correction=0).nan_to_num(1.0).clamp(min=1e-3, max=1e3)
        far = (torch.randn(x.shape, device=x.device) * scale + 100 * scale).to(x.dtype)
        yield (
            _where(keep, x, far),
            *[
                _where(keep, part, other)
                for part, other in zip(inputs[1:], rolled[1:], strict=True)
            ],
        )


def _where(keep: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    return torch.where(keep.to(rows.device).view(-1, *[1] * (rows.dim() - 1)), rows, others)


def _changed(base: list[Tensor], other: list[Tensor], keep: Tensor) -> bool:
    """Whether rows that were kept and finite have other values."""
    if [part.shape for part in base] != [part.shape for part in other]:
        return True
    for before, after in zip(base, other, strict=True):
        kept = keep.to(before.device) if len(before) == len(keep) else slice(None)
        rows, now = before[kept], after[kept]
        if not rows.is_floating_point():
            if not torch.equal(rows, now):
                return True
            continue
        loose = _LOOSE.get(_coarsest(rows), _LOOSE_HALF)
        off = (now.double() - rows.double()).abs() > loose * (1 + rows.double().abs())
        if bool((rows.isfinite() & (off | ~now.isfinite())).any()):
            return True
    return False


def _coarsest(part: Tensor) -> torch.dtype:
    device = part.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else part.dtype


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[Callable[[], None]]:
    """A function that sets the generators back to where they were; in the end they are there."""
    cuda = [device] if device.type == "cuda" else []
    numbers, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  a model may use them
    with torch.random.fork_rng(cuda):
        start = torch.get_rng_state()
        starts = [torch.cuda.get_rng_state(each) for each in cuda]

        def rewind() -> None:
            random.setstate(numbers)
            np.random.set_state(arrays)  # noqa: NPY002
            torch.set_rng_state(start)
            for each, state in zip(cuda, starts, strict=True):
                torch.cuda.set_rng_state(state, each)

        try:
            yield rewind
        finally:
            rewind()

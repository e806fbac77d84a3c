"""Rows of a batch that are kept while others are replaced, and what becomes of them.

Nothing here knows what is computed from the rows: `probe` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What a row may change by, relative to its size and that of its column (1 at most): kernels may
# round differently where shapes depend on the data. And what a gradient may, relative to its size.
_LOOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOOSE_HALF = 2e-2
_LOOSEST = 0.2
_LOOSE_GRADIENT = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOOSE_GRADIENT_HALF = 1e-1
# How much more for sums in another order or by other kernels, which half precision may round last.
_REORDERED, _REORDERED_GPU = 20.0, 100.0
# What a model may raise that is tried in another mode or on other rows than its own.
ERRORS = (
    RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError,
)  # fmt: skip


def has_rows(leaf: Any, size: int) -> bool:
    """Whether it is a tensor with this many rows."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def near(parameter: Tensor) -> Tensor:
    """A parameter a tenth away; where it is zero, one as large as layers begin with."""
    whole = parameter.detach()
    generator = torch.Generator(whole.device)  # its own: the user's random numbers stay as they are
    generator.seed()
    size = whole.float().square().mean().sqrt().nan_to_num(0.0)
    fan = max(whole[0].numel(), 1) if whole.dim() > 1 else 1
    scale = torch.where(size > 0, 0.1 * size, fan**-0.5)
    noise = torch.randn(whole.shape, generator=generator, device=whole.device)
    return (whole + (noise * scale).to(whole.dtype)).requires_grad_(True)


def gradient(
    answers: Sequence[Tensor], keep: Tensor, leaves: Sequence[Tensor], of: int
) -> list[Tensor]:
    """That of the kept rows, in a sum with fixed random weights; empty where there is none.

    The weights are the first ones of ``of`` rows. Of large gradients there is a part. The graph
    behind the answers is gone afterwards.
    """
    total: Tensor | None = None
    for part in answers:
        if not (part.requires_grad and part.is_floating_point() and has_rows(part, len(keep))):
            continue
        generator = torch.Generator(part.device).manual_seed(0)
        shape = (of, *part.shape[1:])
        weights = torch.randn(shape, generator=generator, device=part.device)[: len(part)]
        kept = keep.to(part.device)
        term = (part[kept] * weights[kept]).sum()
        total = term if total is None else total + term
    if total is None:
        return []
    try:
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    except ERRORS:  # a backward pass that cannot be asked for single gradients
        return []
    return [_some(grad.to_dense() if grad.is_sparse else grad) for grad in grads]


# Entries of all parameters together whose gradients are looked at, and of those that always are.
_LOOKED_AT, _SMALL = 1 << 26, 1 << 14


def some_of(parameters: list[Tensor]) -> list[Tensor]:
    """All parameters of most models; of large ones the small parameters, and others spread evenly.

    Gradients of all of them would take as much memory as a training step.
    """
    total = sum(parameter.numel() for parameter in parameters)
    every = -(-total // _LOOKED_AT)
    large = [place for place, p in enumerate(parameters) if p.numel() > _SMALL]
    skipped = {place for turn, place in enumerate(large) if turn % every}
    return [parameter for place, parameter in enumerate(parameters) if place not in skipped]


# Entries of a gradient that are compared: of larger ones every so many.
_ENTRIES = 1 << 20


def _some(grad: Tensor) -> Tensor:
    if grad.numel() <= _ENTRIES:
        return grad
    return grad.reshape(-1)[:: grad.numel() // _ENTRIES | 1].clone()


def moved(before: list[Tensor], after: list[Tensor], *, reordered: bool = False) -> bool:
    """Whether gradients of kept rows are others now.

    What is replaced may overflow, and zero times infinity reaches every row: only finite
    gradients tell.

    reordered  the rows were added up in another order, or without others, so that more rounding is
               allowed for; no less than float32's, which many a model of float64 computes norms in
    """
    if len(before) != len(after):
        return False
    sizes = [float(grad.abs().max()) if grad.numel() else 0.0 for grad in before]
    largest = max([size for size in sizes if math.isfinite(size)], default=0.0)
    for grad, now, size in zip(before, after, sizes, strict=True):
        if not math.isfinite(size) or not bool(now.isfinite().all()):
            continue
        loose = _LOOSE_GRADIENT.get(_coarsest(grad), _LOOSE_GRADIENT_HALF)
        if reordered:
            loose = max(loose, _LOOSE_GRADIENT[torch.float32])
            more = _REORDERED if grad.device.type == "cpu" else _REORDERED_GPU
            loose = min(more * loose, _LOOSEST)
        # some gradients are zero but for roundings (of a bias before a softmax, say)
        allowed = loose * (size + 1e-3 * largest)
        if grad.numel() and float((now.double() - grad.double()).abs().max()) > allowed:
            return True
    return False


def differs(base: list[Tensor], other: list[Tensor]) -> bool:
    """Whether any tensor is not its counterpart, bit for bit."""
    return not all(map(torch.equal, base, other))


def halves(size: int) -> list[Tensor]:
    """A random half of the rows, and the other half."""
    generator = torch.Generator()  # its own: the user's random numbers stay as they are
    generator.seed()
    keep = torch.zeros(size, dtype=torch.bool, device="cpu")
    keep[torch.randperm(size, generator=generator, device="cpu")[: size // 2]] = True
    return [keep, ~keep]


def other_places(size: int) -> Tensor:
    """A random order in which each of two or more rows has another place than its own."""
    generator = torch.Generator()  # its own: the user's random numbers stay as they are
    generator.seed()
    circle = torch.randperm(size, generator=generator, device="cpu")
    order = torch.empty_like(circle)
    order[circle] = circle.roll(1)
    return order


def replacements(inputs: tuple[Tensor, ...], keep: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Other rows of the batch in place of those not kept; then random ones far from them.

    Those in the first tensor of floats, and in all.
    """
    rolled = [_where(keep, part, part.roll(1, 0)) for part in inputs]
    yield tuple(rolled)
    floats = [i for i, part in enumerate(inputs) if part.is_floating_point() and part.numel()]
    for places in [floats[:1], floats] if len(floats) > 1 else [floats[:1]] if floats else []:
        others = list(rolled)
        for place in places:
            others[place] = _where(keep, inputs[place], _far(inputs[place]))
        yield tuple(others)


def _far(rows: Tensor) -> Tensor:
    scale = rows.float().std(correction=0).nan_to_num(1.0).clamp(min=1e-3, max=1e3)
    return (torch.randn(rows.shape, device=rows.device) * scale + 100 * scale).to(rows.dtype)


def _where(keep: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    return torch.where(keep.to(rows.device).view(-1, *[1] * (rows.dim() - 1)), rows, others)


def changed(
    base: list[Tensor], other: list[Tensor], keep: Tensor, *, resized: bool = False
) -> bool:
    """Whether rows that were kept and finite have other values.

    resized  the batches have other sizes, so that a library may have used other kernels: more
             rounding is allowed for, no less than float32's, which many a model of float64 computes
             norms in, on a GPU as much as TF32 brings; and whole numbers, which may come from a
             comparison of rounded ones, are left out
    """
    if [part.shape for part in base] != [part.shape for part in other]:
        return True
    for before, after in zip(base, other, strict=True):
        kept = keep.to(before.device) if len(before) == len(keep) else slice(None)
        rows, now = before[kept], after[kept]
        if not rows.is_floating_point():
            if not resized and not torch.equal(rows, now):
                return True
            continue
        loose = _LOOSE.get(_coarsest(rows), _LOOSE_HALF)
        if resized:
            loose = max(loose, _LOOSE[torch.float32])
            loose = min((10 if rows.device.type == "cpu" else 100) * loose, _LOOSEST)
        exact = rows.double()
        size = exact.nan_to_num(0.0, 0.0, 0.0).abs().mean(0).clamp(max=1.0)
        off = (now.double() - exact).abs() > loose * (size + exact.abs())
        if bool((rows.isfinite() & (off | ~now.isfinite())).any()):
            return True
    return False


def _coarsest(part: Tensor) -> torch.dtype:
    device = part.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else part.dtype


class Randomness:
    """The generators that a model may draw from, as they were in the beginning."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        self._own = [
            part
            for module in model.modules()
            for part in vars(module).values()
            if isinstance(part, torch.Generator)
        ]
        self._numbers, self._arrays = _global_states()
        self._states = self._tensors()

    def _tensors(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(each) for each in self._cuda]
        return [torch.get_rng_state(), *cuda, *(each.get_state() for each in self._own)]

    def rewind(self) -> None:
        """Set them back."""
        random.setstate(self._numbers)
        np.random.set_state(self._arrays)  # noqa: NPY002
        torch.set_rng_state(self._states[0])
        rest = iter(self._states[1:])
        for each in self._cuda:
            torch.cuda.set_rng_state(next(rest), each)
        for generator in self._own:
            generator.set_state(next(rest))

    def drawn(self) -> bool:
        """Whether anything was drawn since then."""
        numbers, arrays = _global_states()
        if numbers != self._numbers or not all(map(np.array_equal, arrays, self._arrays)):
            return True
        return not all(map(torch.equal, self._tensors(), self._states))


def _global_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002  a model may use them


@contextmanager
def same_randomness(model: nn.Module, device: torch.device) -> Iterator[Randomness]:
    """Generators that can be set back to where they were; in the end they are there."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        randomness = Randomness(model, device)
        try:
            yield randomness
        finally:
            randomness.rewind()

"""Trying a model out before anything is paid: does an example's loss depend on other examples?

Some rows of a batch are replaced, others kept; a model that mixes nothing gives the kept rows what
it gave them before. Random numbers are drawn anew from the same state in every pass, so that
dropout does not hide anything. Values are compared, so that whatever reaches them is seen,
differentiable or not; and the gradients of the kept rows, for what reaches the backward pass alone
(a factor without a gradient whose effect on the value is taken away again). All of it twice: with
the model's parameters and with others near them. The engine must not record these passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.kept import (
    ERRORS,
    Randomness,
    changed,
    differs,
    gradient,
    halves,
    has_rows,
    moved,
    near,
    other_places,
    replacements,
    same_randomness,
    some_of,
)
from diminuendo.training.sampling import precision_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""From a model's outputs and the targets to one loss for each example."""

_Call = Callable[..., Any]
"""The model, or something that is called like it."""

_Values = Callable[[_Call, Sequence[Tensor]], Sequence[Tensor]]
"""From a model and its inputs to tensors that have a row for each example."""

_SIZES = 6


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

    Tried on the whole batch and on its first rows, so many as `sizes` says. The model is left as
    it was.
    """

    def losses(call: _Call, inputs: Sequence[Tensor]) -> list[Tensor]:
        found = loss(call(inputs[0]), inputs[1])
        if not isinstance(found, Tensor):
            raise InputError(
                "a tensor with one loss for each example", name="what loss gives", value=found
            )
        return [found]

    trial = _Trial(model, losses)
    try:
        for size in (*sizes, len(x)):
            answered = trial.answers((x[:size], y[:size]))
        if answered is False:
            raise other_batch()
        trial.refuse_places((x, y))
    except DiminuendoError:
        raise
    except ERRORS as error:
        raise InputError(
            "what the model and the loss take",
            name="the first examples",
            value=f"x of shape {tuple(x.shape[1:])}, y of shape {tuple(y.shape[1:])}",
            remedy=f"(x {x.dtype}, y {y.dtype}, the model {precision_of(model)}.) {error}",
        ) from error


def refuse_mixing_calls(model: nn.Module, args: Any, kwargs: dict[str, Any], size: int) -> None:
    """The same for a call of the model in one's own loop: seen are its outputs, not the losses.

    Rows are replaced in every tensor of the call that has so many; where the number of rows is the
    size of another dimension, too, in the first alone, and in all if that is refused. Where the
    rows are put in another order, a tensor with several times as many may be a constant or hold
    several for each example, such as the pieces of pictures: refused is what fits neither.
    """
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if has_rows(leaf, size)]
    # others than the first may then be a mask or positions that all examples share
    doubtful = len(places) > 1 and any(
        isinstance(leaf, Tensor) and size in leaf.shape[1:] for leaf in leaves
    )

    others = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] not in (1, size)
    ]

    def outputs(call: _Call, inputs: Sequence[Tensor]) -> list[Tensor]:
        replaced = list(leaves)
        for place, rows in zip(places, inputs, strict=False):
            replaced[place] = rows
        for place, blocks in zip(others, inputs[len(places) :], strict=False):
            replaced[place] = blocks.flatten(0, 1)
        given, named = _pytree.tree_unflatten(replaced, spec)
        out = _pytree.tree_leaves(call(*given, **named))
        found = [part for part in out if has_rows(part, len(inputs[0]))]
        return [torch.view_as_real(part) if part.is_complex() else part for part in found]

    if not places:
        return
    rows = tuple([leaves[place].detach() for place in places])
    trial = _Trial(model, outputs)
    try:
        try:
            trial.answers(rows[:1] if doubtful else rows)
        except DiminuendoError:
            if not doubtful:
                raise
            trial.answers(rows)
        if not doubtful:
            _refuse_places_of_calls(trial, rows, [leaves[other].detach() for other in others])
    except DiminuendoError:
        raise
    except ERRORS:
        return  # the call itself will say so


def _refuse_places_of_calls(
    trial: _Trial, rows: tuple[Tensor, ...], others: Sequence[Tensor]
) -> None:
    try:
        trial.refuse_places(rows)
    except DiminuendoError:
        size = len(rows[0])
        if not others:
            raise
        if all(len(other) % size == 0 for other in others):
            trial.refuse_places(
                (*rows, *(other.reshape(size, -1, *other.shape[1:]) for other in others))
            )


def first_rows(args: Any, kwargs: dict[str, Any], size: int) -> Tensor | None:
    """The first tensor with so many rows among the arguments of a call."""
    if args and has_rows(args[0], size):  # nearly always, and to flatten takes longer
        first: Tensor = args[0]
        return first
    return next(
        (leaf for leaf in _pytree.tree_leaves((args, kwargs)) if has_rows(leaf, size)), None
    )


def other_batch() -> InputError:
    """The error of losses that have nothing to do with the batch that was drawn."""
    return InputError(
        "computed from the batch that was drawn",
        name="the losses",
        value="those of other examples",
        remedy="The claim is for the plan's own sample: compute them from this batch, whole and "
        "alone.",
    )


class _Pass(NamedTuple):
    """What one pass gave: values with a row for each example, and the gradient of some."""

    values: list[Tensor]
    gradient: list[Tensor]


class _Trial:
    """Passes of a model with its parameters, and with others near them.

    The others are there for layers of zeros, behind which nothing is seen.
    """

    def __init__(self, model: nn.Module, values: _Values) -> None:
        self._model, self._values = model, values
        self._own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._near: dict[str, Tensor] = {}
        self._leaves: list[Tensor] = []
        self._call: _Call = model

    def answers(self, inputs: tuple[Tensor, ...]) -> bool | None:
        """Whether rows that are replaced change; raises where rows that are kept do.

        None where nothing can be said: passes differ anyway, in evaluation mode too, or there is
        nothing to replace rows by.
        """
        self._call, self._leaves = self._model, some_of(list(self._own.values()))
        own = self._in_some_mode(inputs)
        torch.clear_autocast_cache()  # copies of all parameters
        self._near = {name: near(p) for name, p in self._own.items()}
        self._call, self._leaves = self._call_near, some_of(list(self._near.values()))
        try:
            nearby = self._in_some_mode(inputs)
        except DiminuendoError:
            raise
        except ERRORS:  # not every model takes other parameters
            nearby = None
        finally:
            self._near, self._leaves = {}, []  # as much memory as the model itself
            torch.clear_autocast_cache()
        if own or nearby:
            return True
        return None if None in (own, nearby) else False

    def refuse_places(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise where a row, or its gradient, changes with its place, or with how many others there
        are: what lies before it, and how much, is drawn.

        Only where nothing is random, if need be in evaluation mode: masks go by the places in a
        batch and by its size.
        """
        self._call, self._leaves = self._model, some_of(list(self._own.values()))
        modes = [(module, module.training) for module in self._model.modules()]
        try:
            with torch.enable_grad(), same_randomness(self._model, inputs[0].device) as start:
                if not self._refuse_as_it_is(inputs, start):
                    self._model.eval()
                    self._refuse_as_it_is(inputs, start)
        except DiminuendoError:
            raise
        except ERRORS:  # not every model takes any size and order
            return
        finally:
            self._leaves = []
            for module, mode in modes:
                module.training = mode

    def _refuse_as_it_is(self, inputs: tuple[Tensor, ...], start: Randomness) -> bool:
        """False where something is drawn, even if it leaves all as it is, or passes differ."""
        everything = torch.ones(len(inputs[0]), dtype=torch.bool)
        whole = self._passed(inputs, start.rewind, everything)
        if start.drawn():
            return False
        again = self._passed(inputs, _go_on, everything)
        if changed(whole.values, again.values, everything):
            return False
        steady = not moved(whole.gradient, again.gradient)
        self._refuse_other_order(inputs, whole, steady)
        self._refuse_fewer(inputs, whole, steady)
        return True

    def _refuse_other_order(self, inputs: tuple[Tensor, ...], whole: _Pass, steady: bool) -> None:
        order = other_places(len(inputs[0]))
        everything = torch.ones(len(order), dtype=torch.bool)
        placed = tuple([part[order.to(part.device)] for part in inputs])
        other = self._passed(placed, _go_on, everything, back=order.argsort())
        if changed(whole.values, other.values, everything, resized=True) or (
            steady and moved(whole.gradient, other.gradient, reordered=True)
        ):
            raise _placed()

    def _refuse_fewer(self, inputs: tuple[Tensor, ...], whole: _Pass, steady: bool) -> None:
        size = len(inputs[0])
        half = size // 2
        first = torch.arange(size) < half
        among = self._passed(inputs, _go_on, first)
        alone = tuple([part[:half] for part in inputs])
        fewer = self._passed(alone, _go_on, first[:half], of=size)
        rows = [part[:half] if has_rows(part, size) else part for part in whole.values]
        if [part.shape for part in rows] != [part.shape for part in fewer.values]:
            return
        if changed(rows, fewer.values, first[:half], resized=True) or (
            steady and moved(among.gradient, fewer.gradient, reordered=True)
        ):
            raise _placed()

    def _call_near(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._near, args, kwargs)

    def _in_some_mode(self, inputs: tuple[Tensor, ...]) -> bool | None:
        answered = self._responds(inputs)
        if answered is not None:
            return answered
        modes = [(module, module.training) for module in self._model.modules()]
        try:
            self._model.eval()
            return self._responds(inputs)
        finally:
            for module, mode in modes:
                module.training = mode

    def _responds(self, inputs: tuple[Tensor, ...]) -> bool | None:
        size, responded = inputs[0].shape[0], None
        keeps = halves(size)
        with torch.enable_grad(), same_randomness(self._model, inputs[0].device) as start:
            steady = True  # a backward pass that is never the same tells nothing
            bases = []
            for keep in keeps:
                base, again = (self._passed(inputs, start.rewind, keep) for _ in range(2))
                if changed(base.values, again.values, torch.ones(size, dtype=torch.bool)):
                    return None
                steady = steady and not moved(base.gradient, again.gradient)
                bases.append(base)
            for keep, base in zip(keeps, bases, strict=True):
                for replaced in replacements(inputs, keep):
                    try:
                        other = self._passed(replaced, start.rewind, keep)
                    except ERRORS:  # not what the model takes
                        continue
                    if changed(base.values, other.values, keep) or (
                        steady and moved(base.gradient, other.gradient)
                    ):
                        raise _mixing()
                    if not all(map(torch.equal, inputs, replaced)):
                        responded = responded or differs(base.values, other.values)
        return responded

    def _passed(
        self,
        inputs: tuple[Tensor, ...],
        rewind: Callable[[], None],
        keep: Tensor,
        back: Tensor | None = None,
        of: int | None = None,
    ) -> _Pass:
        """``back`` puts the rows of the answers in the order of other passes; ``of`` says of how
        many rows in other passes these are the first."""
        rewind()
        answers = self._values(self._call, [part.clone() for part in inputs])
        if back is not None:
            answers = [
                part[back.to(part.device)] if has_rows(part, len(back)) else part
                for part in answers
            ]
        copies = [part.detach().clone() for part in answers]
        values = [part if part.dim() else part.reshape(1) for part in copies]
        return _Pass(values, gradient(answers, keep, self._leaves, of or len(keep)))


def _go_on() -> None:
    """Random numbers that follow those of the pass before."""


def _mixing() -> InputError:
    return _differs(
        "The model or the loss mixes examples (by a mean over the batch, say: a loss needs "
        'reduction="none"), so that clipping would not bound what one of them adds.'
    )


def _placed() -> InputError:
    return _differs(
        "It changes with its place in the batch, or with how many others there are (by positions "
        "along the wrong dimension, or a division by the number of rows, say), so that clipping "
        "would not bound what one example more changes in all of them."
    )


def _differs(remedy: str) -> InputError:
    return InputError(
        "the same whatever the other examples of the batch are",
        name="the loss of an example, and its gradient,",
        value="one that differs",
        remedy=remedy,
    )

"""A mean loss whose `backward()` is a private step: the losses behind the mean are kept.

A private step needs one loss per example, and most training loops have one number for the whole
batch. Undoing the mean in the gradients would not be exact, and some means cannot be undone: one
over class weights, say, in which an example's share depends on the others. So nothing is undone
here. What a model returns is marked (`Tracked`), marks follow PyTorch's operations, and where an
operation takes the mean or the sum over examples, the losses before it are kept beside the result
(`Reduced`). `loss.backward()` then hands them on. Whether each of them belongs to one example is
for the gradient engine to find out, as ever.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree

from diminuendo.errors import UsageError


@dataclass(frozen=True)
class Reduced:
    """The losses behind a mean or a sum over examples.

    losses   one for each example, shape (N,)
    kind     which of the two it is
    numbers  the constants by which the loop multiplied it, in order
    """

    losses: Tensor
    kind: Literal["mean", "sum"]
    numbers: tuple[float, ...] = ()


Step = Callable[[Reduced], None]
"""What `loss.backward()` does with the losses."""


class Tracked(Tensor):
    """What a private model returned, or what was computed from it, with its gradient."""

    take_step: Step | None = None
    reduced: Reduced | None = None
    reason: str = ""
    """Why a mean has no losses behind it that could be used, where that is known."""
    written: int = -1
    """The version of the tensor that `reduced` belongs to."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.backward:
                return _backward(*args, **named)
            if func is Tensor.__format__:
                return format(args[0].detach().as_subclass(Tensor), *args[1:])
            found = _RULES[func](func, args, named) if func in _RULES else None
            result = func(*args, **named) if found is None else found[0]
            return _marked(result, _step_of(args, named), found)


_Found = tuple[Tensor, "Reduced | None", str]
"""What an operation gives, the losses behind it, and if there are none the reason."""


def track(outputs: Any, take_step: Step) -> Any:
    """The outputs of a model with every tensor that has a gradient marked, in its structure."""
    return _marked(outputs, take_step, None)


def _marked(result: Any, take_step: Step | None, found: _Found | None) -> Any:
    def mark(part: Any) -> Any:
        if not isinstance(part, Tensor) or not part.requires_grad or isinstance(part, Tracked):
            return part
        marked = part.as_subclass(Tracked)
        marked.take_step = take_step
        if found is not None:
            marked.reduced, marked.reason = found[1:]
            marked.written = marked._version
        return marked

    if isinstance(result, Tensor):
        return mark(result)
    return _pytree.tree_map(mark, result)


def _step_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> Step | None:
    steps = [part.take_step for part in _pytree.tree_leaves((args, named)) if _is_tracked(part)]
    return steps[0] if steps and all(step == steps[0] for step in steps) else None


def _is_tracked(part: Any) -> bool:
    return isinstance(part, Tracked)


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    del retain_graph  # a private step needs the graph once, and frees it
    if gradient is not None or create_graph or inputs is not None:
        raise UsageError(
            "loss.backward() takes a private step and has no other arguments than retain_graph. "
            "Write the weights into the losses: (weights * losses).mean().backward()."
        )
    reduced, reason, take_step = None, "", None
    if isinstance(loss, Tracked):
        reduced, reason, take_step = loss.reduced, loss.reason, loss.take_step
        if reduced is not None and loss.written != loss._version:
            reduced, reason = None, "It was changed in place: write loss = loss * c, not loss.mul_."
    if take_step is None:
        reduced, reason = None, "Losses of two private models do not go into one number."
    if reduced is None or take_step is None:
        raise UsageError(
            "This loss is not a plain mean over examples, so that nobody knows what each of them "
            f"adds. {reason} Compute one loss per example (reduction='none', shape (N,)) and "
            "write losses.mean().backward().".replace("  ", " ")
        )
    take_step(reduced)


# Which operations reduce over examples, and what is behind them.

_Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], "_Found | None"]


def _whole(kind: Literal["mean", "sum"]) -> _Rule:
    """The rule of `mean()` or `sum()` over everything: rows first, then examples."""

    def rule(
        func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> _Found | None:
        x = args[0]
        if not _is_tracked(x):
            return None
        if x.dim() == 0:
            same = len(args) == 1 and not named and x.written == x._version
            return (func(x), x.reduced, x.reason) if same else None
        dim = args[1] if len(args) == 2 and not named else named.get("dim")
        alone = x.dim() == 1 and dim in (0, -1, (0,), [0])
        if len(args) > 1 + alone or named.keys() - {"dim"} or not (dim is None or alone):
            return None
        rows = x.as_subclass(Tensor).flatten(1) if x.dim() > 1 else None
        losses = x.as_subclass(Tensor) if rows is None else getattr(rows, kind)(1)
        return func(x), Reduced(losses, kind), ""

    return rule


@lru_cache(maxsize=64)
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _criterion(
    func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> _Found | None:
    """The rule of PyTorch's losses: the same with reduction="none" is behind it."""
    bound = _signature(func).bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given["reduction"]
    if reduction not in ("mean", "sum", "batchmean"):
        return None
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return func(*args, **named), None, "Write reduction= in place of size_average= and reduce=."
    if reduction == "mean" and func in _WEIGHTED and given.get("weight") is not None:
        # The mean divides by the weights of the whole batch.
        return (
            func(*args, **named),
            None,
            "With weight= the mean divides by the weights of all examples that were drawn.",
        )
    terms = func(**{**given, "reduction": "none"})
    whole = {**given, "reduction": reduction}
    if terms.dim() == 0:
        return None
    rows = terms.flatten(1) if terms.dim() > 1 else terms.unsqueeze(1)
    if reduction == "mean":
        return func(**whole), Reduced(rows.sum(1) / _counted(func, given, rows), "mean"), ""
    return func(**whole), Reduced(rows.sum(1), "mean" if reduction == "batchmean" else "sum"), ""


def _counted(func: Callable[..., Any], given: Mapping[str, Any], rows: Tensor) -> Tensor | int:
    """By how many terms an example's own mean divides: those that are not ignored."""
    size = rows.shape[1]
    target = given.get("target")
    if size == 1 or func not in (functional.cross_entropy, functional.nll_loss):
        return size
    assert isinstance(target, Tensor)
    if target.is_floating_point():
        return size
    counted: Tensor = target.flatten(1) != given["ignore_index"]
    return counted.sum(1).clamp(min=1)


def _arithmetic(
    func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> _Found | None:
    """The rule of sums, multiples and the negative of reduced losses."""
    if named or len(args) > 2 or all(_kept(part) is None for part in args):
        return None
    name = _ARITHMETIC[func]
    one, other = args[0], args[-1]
    if name == "neg":
        reduced = _times(_kept(one), -1)
    elif name == "add":
        reduced = _sum(one, other)
    elif name == "sub":
        reduced = _sum(one, _negative(other))
    elif name == "rsub":
        reduced = _sum(other, _negative(one))
    elif name == "div":
        reduced = _divided(one, other)
    else:
        own, number = (one, other) if _is_tracked(one) else (other, one)
        reduced = _times(_kept(own), number)
    reason = "" if reduced else "It holds something that is no mean over examples."
    result = func(*args)
    if result is one:  # in place
        result.reduced, result.reason, result.written = reduced, reason, result._version
    return result, reduced, reason


def _kept(part: Any) -> Reduced | None:
    current = isinstance(part, Tracked) and part.written == part._version
    return part.reduced if current else None


def _negative(part: Any) -> Any:
    """The negative of a term as far as `_sum` looks at it."""
    kept = _kept(part)
    return part if kept is None else _times(kept, -1)


def _sum(one: Any, other: Any) -> Reduced | None:
    if _is_number(one) or _is_number(other):  # a constant has no gradient
        term = other if _is_number(one) else one
        return term if isinstance(term, Reduced) else _kept(term)
    mine = one if isinstance(one, Reduced) else _kept(one)
    theirs = other if isinstance(other, Reduced) else _kept(other)
    if mine is None or theirs is None or mine.kind != theirs.kind:
        return None
    if mine.losses.shape != theirs.losses.shape:
        return None
    numbers = (*mine.numbers, *theirs.numbers)
    return Reduced(mine.losses + theirs.losses, mine.kind, numbers)


def _times(own: Reduced | None, number: Any) -> Reduced | None:
    if own is None or not _is_number(number):
        return None
    return Reduced(own.losses * number, own.kind, (*own.numbers, float(number)))


def _divided(one: Any, number: Any) -> Reduced | None:
    own = _kept(one)
    if own is None or not _is_number(number) or number == 0:
        return None
    if own.kind == "sum" and number == len(own.losses):
        return replace(own, kind="mean")
    return Reduced(own.losses / number, own.kind, (*own.numbers, 1 / number))


def _is_number(part: Any) -> bool:
    plain = isinstance(part, (int, float)) and not isinstance(part, bool)
    return plain and math.isfinite(part)


_WEIGHTED = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.l1_loss,
    functional.huber_loss,
    functional.multi_margin_loss,
}
_CRITERIA: tuple[Callable[..., Any], ...] = (
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
    functional.poisson_nll_loss,
    functional.gaussian_nll_loss,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
    functional.margin_ranking_loss,
    functional.cosine_embedding_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.triplet_margin_loss,
)
_ARITHMETIC: dict[Callable[..., Any], str] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_), "add"),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.sub_), "sub"),
    Tensor.__rsub__: "rsub",
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.mul_), "mul"),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.div_), "div"),
    **dict.fromkeys((torch.neg, Tensor.neg, Tensor.neg_), "neg"),
}
_RULES: dict[Callable[..., Any], _Rule] = {
    **dict.fromkeys((torch.mean, Tensor.mean), _whole("mean")),
    **dict.fromkeys((torch.sum, Tensor.sum), _whole("sum")),
    **dict.fromkeys(_CRITERIA, _criterion),
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
}

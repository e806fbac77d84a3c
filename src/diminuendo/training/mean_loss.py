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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from diminuendo.errors import UsageError
from diminuendo.training.criteria import CRITERIA, behind, refuse_crossed
from diminuendo.training.reduced import Kind, Reduced, is_number

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
            refuse_crossed((args, named), result)
            return _marked(result, _step_of(args, named), found)


class Reductions(TorchFunctionMode):
    """Within, means and sums over everything, and PyTorch's losses, keep the losses behind them.

    For a training step that calls parts of a model as it likes, so that there is no one output to
    `track`. Nothing else is marked: what happens inside the model stays as it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if func in CRITERIA or (func in _WHOLE and len(args) == 1 and not named):
            args, named = _marked((args, named), _no_step, None)
        return func(*args, **named)


def kept_losses(loss: Tensor) -> tuple[Reduced | None, str]:
    """The losses behind a mean or a sum, or None and the reason where it is known."""
    if not isinstance(loss, Tracked):
        return None, ""
    if loss.reduced is not None and loss.written != loss._version:
        return None, "It was changed in place: write loss = loss * c, not loss.mul_."
    return loss.reduced, loss.reason


def _no_step(reduced: Reduced) -> None:
    del reduced
    raise UsageError("This loss belongs to a training step: return it, and do not go backwards.")


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
    reduced, reason = kept_losses(loss)
    take_step = loss.take_step if isinstance(loss, Tracked) else None
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


def _whole(kind: Kind) -> _Rule:
    """The rule of `mean()` or `sum()` over everything: rows first, then examples."""

    def rule(
        func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> _Found | None:
        x = args[0]
        if not _is_tracked(x):
            return None
        if x.dim() == 0:
            if len(args) > 1 or named:
                return None
            # Of one example, any number is a loss of its own.
            alone = None if x.reason else Reduced(x.as_subclass(Tensor).reshape(1), kind)
            return func(x), _kept(x) or alone, x.reason
        dim = args[1] if len(args) == 2 and not named else named.get("dim")
        row = x.dim() == 1 and dim in (0, -1, (0,), [0])
        if len(args) > 1 + row or named.keys() - {"dim"} or not (dim is None or row):
            return None
        rows = x.as_subclass(Tensor).flatten(1) if x.dim() > 1 else None
        losses = x.as_subclass(Tensor) if rows is None else getattr(rows, kind)(1)
        return func(x), Reduced(losses, kind), ""

    return rule


def _arithmetic(
    func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> _Found | None:
    """The rule of sums, multiples and the negative of reduced losses."""
    if named or len(args) > 2 or all(_kept(part) is None for part in args):
        return None
    reduced = _combined(_ARITHMETIC[func], args[0], args[-1])
    reason = "" if reduced else "It holds something that is no mean over examples."
    result = func(*args)
    if result is args[0]:  # in place
        result.reduced, result.reason, result.written = reduced, reason, result._version
    return result, reduced, reason


def _combined(name: str, one: Any, other: Any) -> Reduced | None:
    mine, theirs = _kept(one), _kept(other)
    if name == "neg":
        return mine and mine.times(-1)
    if name == "sub":
        theirs = theirs and theirs.times(-1)
    if name == "rsub":
        mine = mine and mine.times(-1)
    if name in ("add", "sub", "rsub"):
        if mine is None or theirs is None:  # a constant has no gradient
            return (mine if is_number(other) else None) or (theirs if is_number(one) else None)
        return mine.plus(theirs)
    if name == "div":
        return mine.over(other) if mine and is_number(other) and other != 0 else None
    if theirs is not None and is_number(one):
        return theirs.times(one)
    return mine.times(other) if mine and is_number(other) else None


def _kept(part: Any) -> Reduced | None:
    current = isinstance(part, Tracked) and part.written == part._version
    return part.reduced if current else None


_ARITHMETIC: dict[Callable[..., Any], str] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_), "add"),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.sub_), "sub"),
    Tensor.__rsub__: "rsub",
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.mul_), "mul"),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.div_), "div"),
    **dict.fromkeys((torch.neg, Tensor.neg, Tensor.neg_), "neg"),
}
_WHOLE: dict[Callable[..., Any], _Rule] = {
    **dict.fromkeys((torch.mean, Tensor.mean), _whole("mean")),
    **dict.fromkeys((torch.sum, Tensor.sum), _whole("sum")),
}
_RULES: dict[Callable[..., Any], _Rule] = {
    **_WHOLE,
    **dict.fromkeys(CRITERIA, behind),
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
}

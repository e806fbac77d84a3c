"""From the mean loss that a training step returns back to one loss for each example, exactly.

Within `Means` a loss with `reduction="mean"`, and the mean of a tensor with a row for each example,
gives the scalar that it always gives; the rows of which it is the mean are remembered beside it.
Sums of such scalars and multiples by numbers are means of rows as well. What is returned at the end
is looked up: either it is the mean of known rows, or nothing is known and the caller refuses.
Whether row i belongs to example i alone is not decided here: the engine and the guard test the
losses.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from diminuendo.errors import InputError

_LOSSES = {
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cosine_embedding_loss,
    F.cross_entropy,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.margin_ranking_loss,
    F.mse_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.nll_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
    F.triplet_margin_loss,
}
_MEANS = {torch.mean, Tensor.mean}
_SAME = {Tensor.float, Tensor.double, Tensor.clone, Tensor.contiguous, Tensor.to, Tensor.squeeze}
_LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "radd": operator.add,
    "iadd": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "rmul": operator.mul,
    "div": operator.truediv,
    "truediv": operator.truediv,
}
_OFF = 1e-3
_KNOWN = (
    'Known are means by reduction="mean" or .mean(), their sums, and multiples by numbers. For '
    "another loss return one loss for each example, of shape (N,)."
)


class Means(TorchFunctionMode):
    """Remembers of which rows a scalar is the mean, while a training step runs on a batch.

    rows  the number of examples in the batch
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._why = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = dict(kwargs or {})
        if func in _LOSSES:
            return self._loss(func, args, given)
        result = func(*args, **given)
        if isinstance(result, Tensor) and result.dim() == 0:
            rows = self._rows_of(func, args, given)
            if rows is None:
                self._known.pop(id(result), None)  # changed in place, it is no mean any more
            else:
                self._known[id(result)] = (result, rows)
        return result

    def losses(self, returned: Any) -> Tensor:
        """One loss for each example behind what a training step returned; raises where unknown."""
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(loss, Tensor):
            if loss.dim() == 1:
                return loss
            if id(loss) in self._known:
                return self._known[id(loss)][1]
        raise InputError(
            "the mean of one loss per example, or these losses themselves",
            name="what training_step returns",
            value=tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__,
            remedy=self._why or _KNOWN,
        )

    def _loss(self, func: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]) -> Any:
        bound = _signature(func).bind(*args, **given)
        bound.apply_defaults()
        options = bound.arguments
        result = func(*args, **given)
        by_batch = options["reduction"] == "batchmean"
        if not isinstance(result, Tensor) or result.dim() or (
            options["reduction"] != "mean" and not by_batch
        ):  # fmt: skip
            return result
        options["reduction"] = "none"
        each = func(*bound.args, **bound.kwargs)
        if not each.dim() or each.shape[0] != self._rows:
            return result
        rows = each.flatten(1).sum(1) if by_batch else _row_means(each)
        with torch.no_grad():
            off = (rows.mean() - result).abs() > _OFF * result.abs().clamp(min=_OFF)
        if bool(off) or options.get("weight") is not None:
            self._why = (
                f"{func.__name__} divides by weights, or by the number of labels that are not "
                "ignored, in the whole batch: that is no mean of one loss per example. Return one "
                'loss for each example, of shape (N,): reduction="none", and the mean within each.'
            )
            return result
        self._known[id(result)] = (result, rows)
        return result

    def _rows_of(
        self, func: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]
    ) -> Tensor | None:
        if func in _MEANS:
            whole = args[0] if args else given.get("input")
            plain = len(args) == 1 and not given
            if plain and isinstance(whole, Tensor) and whole.dim() and len(whole) == self._rows:
                return _row_means(whole)
            return None
        known = [self._known[id(part)][1] if id(part) in self._known else part for part in args]
        if all(part is before for part, before in zip(known, args, strict=True)):
            return None
        if func in _SAME:
            changed = func(*known, **given) if func is not Tensor.squeeze else known[0]
            return changed if isinstance(changed, Tensor) else None
        combine = _LINEAR.get(getattr(func, "__name__", "").strip("_"))
        if combine is None or len(known) != 2 or given or not all(map(self._may_join, args)):
            return None
        numbers = [isinstance(part, Number) for part in args]
        if (combine is operator.mul and not any(numbers)) or (
            combine is operator.truediv and not numbers[1]
        ):
            return None  # a product of means is no mean of products
        joined: Tensor = combine(known[0], known[1])
        return joined

    def _may_join(self, part: Any) -> bool:
        return isinstance(part, Number) or id(part) in self._known


def _row_means(each: Tensor) -> Tensor:
    return each if each.dim() == 1 else each.flatten(1).mean(1)


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)

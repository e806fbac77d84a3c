"""PyTorch's losses: the same with reduction="none" is behind their mean, with some exceptions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree

from diminuendo.errors import UsageError
from diminuendo.training.reduced import Reduced

_WEIGHTED = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.l1_loss,
    functional.huber_loss,
    functional.multi_margin_loss,
}
CRITERIA: frozenset[Callable[..., Any]] = frozenset(
    {
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
    }
)


@lru_cache(maxsize=64)
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def behind(
    func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Reduced | None, str] | None:
    """The value of a criterion, the losses behind it, and if there are none the reason.

    None where it reduces nothing: reduction="none".
    """
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
    refuse_crossed(given, terms)
    whole = {**given, "reduction": reduction}
    if terms.dim() == 0:
        terms = terms.reshape(1)
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


def refuse_crossed(given: Any, result: Any) -> None:
    """Raise where (N, 1) met (N,) and became (N, N): each example with the labels of all others.

    No gradient flows between them there, so that nobody else would see it.
    """
    if not isinstance(result, Tensor) or result.dim() != 2 or len(result) != result.shape[1]:
        return
    size = len(result)
    shapes = {tuple(part.shape) for part in _pytree.tree_leaves(given) if isinstance(part, Tensor)}
    if size > 1 and {(size, 1), (size,)} <= shapes:
        raise UsageError(
            f"Tensors of shapes ({size}, 1) and ({size},) became one of shape ({size}, {size}): "
            "every example would meet the labels of all others. Give both the same shape: "
            "outputs.squeeze(1), or labels.unsqueeze(1)."
        )

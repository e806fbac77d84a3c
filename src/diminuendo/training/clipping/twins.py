"""Tensors made of parameters that may have been spread over the examples, or over something else.

``table.expand(n, -1, -1)`` looks the same whether n counts examples or the rows of a picture of
which there are as many; so do constants, ``eye.expand(n, -1, -1)``, that parameters meet. They are
taken for the former, and what is computed is computed a second time as if they were not: the *twin*
is made of parameters alone. Where such a tensor meets the batch with its examples in another place,
its twin is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from diminuendo.training.clipping.marks import ELEMENTWISE, FACTORIES, Operation
from diminuendo.training.clipping.rows import TAG, One, Rows

_TWIN = "_twin"
# Operations whose operands have the examples at the same place, counted from the last dimension.
_ALIGNING = ELEMENTWISE | {
    "cat", "concat", "concatenate", "stack", "matmul", "__matmul__", "bmm", "baddbmm",
    "masked_fill", "scaled_dot_product_attention",
}  # fmt: skip
# Operations none of whose arguments but the first can hold examples.
_WEIGHTED = {
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "layer_norm", "rms_norm", "group_norm", "embedding", "bilinear",
}  # fmt: skip
# To do these twice would draw other random numbers.
_RANDOM = {
    "normal", "bernoulli", "poisson", "binomial", "multinomial", "rrelu", "gumbel_softmax",
    "scaled_dot_product_attention", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh",
    "rnn_relu",
}  # fmt: skip


def remember(tensor: Tensor, other: Tensor) -> None:
    """Call ``other`` the twin of ``tensor`` until either is written on."""
    setattr(tensor, _TWIN, (other, other._version, tensor._version))


def twin(tensor: Tensor) -> Tensor | None:
    """The twin of a tensor, if it has one."""
    known = getattr(tensor, _TWIN, None)
    if known is None or (known[0]._version, tensor._version) != known[1:]:
        return None
    found: Tensor = known[0]
    return found


def repeats(op: Operation) -> bool:
    """Whether an operation may be done twice."""
    random = op.name in _RANDOM or "dropout" in op.name
    return not (random or op.name in FACTORIES)


def aligned(
    op: Operation, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[Tensor]
) -> tuple[Sequence[Any], dict[str, Any]] | None:
    """The arguments, with twins for tensors whose examples are not where the batch has them;
    None where there is no such tensor."""
    whole = next((leaf for leaf in leaves if _sure(leaf)), None)
    if whole is None:
        return None
    changed = {}
    for leaf in leaves:
        best, other = leaf, twin(leaf)
        while other is not None and _apart(op, args, whole, leaf, best):
            best, other = other, twin(other)
        if best is not leaf:
            changed[id(leaf)] = best
    return _replaced(args, kwargs, changed) if changed else None


def _apart(op: Operation, args: Sequence[Any], whole: Tensor, leaf: Tensor, best: Tensor) -> bool:
    """Whether ``best``, in the place of ``leaf``, cannot have its examples where it is said to."""
    if not isinstance(getattr(best, TAG, None), Rows):
        return False
    if op.name in _WEIGHTED:
        return bool(args) and leaf is not args[0]
    if op.name in ("matmul", "mm", "__matmul__") and leaf is args[-1] and leaf.dim() == 2:
        return True
    if op.name == "einsum":
        return _letter(args, leaf, best) != _letter(args, whole, whole)
    return op.name in _ALIGNING and _place(best) != _place(whole)


def _letter(args: Sequence[Any], leaf: Tensor, best: Tensor) -> str | int:
    """The letter of the dimension of the examples, or its place among the dots from their end."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    text = str(args[0]).replace(" ", "").replace("...", ".").partition("->")[0]
    dim = getattr(best, TAG).dim
    for labels, operand in zip(text.split(","), operands, strict=False):
        if operand is leaf and 0 <= dim < leaf.dim():
            first, _, rest = labels.partition(".")
            if dim < len(first):
                return first[dim]
            behind = leaf.dim() - dim
            return rest[-behind] if behind <= len(rest) else behind - len(rest)
    return -1


def swapped(
    args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[Tensor]
) -> tuple[Sequence[Any], dict[str, Any]] | None:
    """The arguments with all twins; None where something belongs to the batch for sure."""
    if any(_sure(leaf) for leaf in leaves):
        return None
    changed = {id(leaf): other for leaf in leaves if (other := twin(leaf)) is not None}
    return _replaced(args, kwargs, changed) if changed else None


def _sure(leaf: Tensor) -> bool:
    """Whether the tensor belongs to the batch without doubt."""
    rows = getattr(leaf, TAG, None)
    return type(rows) in (Rows, One) and twin(leaf) is None


def _place(leaf: Tensor) -> int | None:
    """The dimension of the examples, counted from the last; None without one."""
    rows = getattr(leaf, TAG, None)
    return leaf.dim() - rows.dim if type(rows) is Rows and rows.dim >= 0 else None


def _replaced(
    args: Sequence[Any], kwargs: dict[str, Any], changed: dict[int, Tensor]
) -> tuple[Sequence[Any], dict[str, Any]]:
    given: tuple[Sequence[Any], dict[str, Any]] = pytree.tree_map(
        lambda part: changed.get(id(part), part), (tuple(args), kwargs)
    )
    return given

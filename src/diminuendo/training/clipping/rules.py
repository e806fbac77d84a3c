"""What every operation does to the place of the examples, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from diminuendo.training.clipping import choosing, reshaping
from diminuendo.training.clipping.rows import TAG, One, Pieces, Rows, default, guess

Rule = Callable[[Sequence[Any], dict[str, Any], Tensor, Rows, Tensor, int], Rows]
"""(args, kwargs, source, its rows, output, number of the output) -> the output's rows."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
            "view_as",
            "reshape_as",
            "_unsafe_view",
            "ravel",
            "squeeze_",
            "unsqueeze_",
        ),
        reshaping.reshaped,
    ),
    "permute": reshaping.permuted,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "transpose_"), reshaping.transposed),
    **dict.fromkeys(("t", "T", "t_"), reshaping.flipped),
    **dict.fromkeys(("mT", "mH", "adjoint"), reshaping.last_two),
    **dict.fromkeys(("movedim", "moveaxis"), reshaping.moved),
    **dict.fromkeys(
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "max",
            "min",
            "any",
            "all",
            "argmax",
            "argmin",
            "logsumexp",
            "prod",
            "std",
            "var",
            "std_mean",
            "var_mean",
            "nanmedian",
            "median",
            "mode",
            "nansum",
            "nanmean",
            "count_nonzero",
            "aminmax",
        ),
        reshaping.reduced,
    ),
    **dict.fromkeys(
        ("norm", "linalg_norm", "linalg_vector_norm", "quantile", "nanquantile", "kthvalue"),
        reshaping.measured,
    ),
    "diagonal": reshaping.diagonal,
    **dict.fromkeys(
        ("diag_embed", "fold", "pairwise_distance", "view_as_complex", "view_as_real"),
        reshaping.kept,
    ),
    "as_strided": reshaping.strided,
    "unfold": reshaping.unfolded,
    **dict.fromkeys(("matmul", "mm", "mv", "__matmul__"), reshaping.multiplied),
    "tensordot": reshaping.contracted,
    **dict.fromkeys(("gru", "lstm", "rnn_tanh", "rnn_relu"), reshaping.recurrent),
    "multi_head_attention_forward": reshaping.attended,
    "stack": choosing.stacked,
    "select": choosing.taken,
    **dict.fromkeys(("narrow", "narrow_copy"), choosing.narrowed),
    **dict.fromkeys(("vstack", "row_stack"), choosing.piled(0)),
    **dict.fromkeys(("hstack", "column_stack"), choosing.piled(1)),
    "dstack": choosing.piled(2),
    "select_scatter": choosing.scattered,
    "__setitem__": choosing.put,
    **dict.fromkeys(("cat", "concat", "concatenate"), choosing.joined),
    **dict.fromkeys(
        ("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split"),
        choosing.split,
    ),
    "unbind": choosing.unbound,
    "index_select": choosing.selected,
    **dict.fromkeys(("repeat", "tile"), choosing.repeated),
    "repeat_interleave": choosing.interleaved,
    "einsum": reshaping.equation,
    "__getitem__": choosing.got,
    "masked_select": choosing.masked,
    **dict.fromkeys(("nonzero", "argwhere"), choosing.found),
    "embedding": choosing.looked_up,
    "one_hot": choosing.looked_up,
    **dict.fromkeys(
        (
            "index_add",
            "index_add_",
            "index_put",
            "index_put_",
            "index_copy",
            "index_copy_",
            "scatter",
            "scatter_",
            "scatter_add",
            "scatter_add_",
            "scatter_reduce",
            "scatter_reduce_",
            "masked_scatter",
            "masked_scatter_",
            "copy_",
        ),
        choosing.written,
    ),
}

# After these a tensor may hold more than one example though each argument holds one.
_JOINING = {choosing.joined, choosing.stacked}


def follow(
    rule: Rule | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    source: Tensor,
    rows: Rows,
    out: Tensor,
    nr: int,
) -> Rows:
    """Where an output holds its examples, by the rule of its operation if there is one."""
    if type(rows) is One and rule not in _JOINING:
        if _several(rows, (*args, *kwargs.values())):
            return guess(out, rows.examples)
        return rows.over(out.shape)
    if type(rows) is Pieces and not rows.fits(source):  # nothing is known of its examples
        return rows
    if rule is not None:
        return rule(args, kwargs, source, rows, out, nr)
    return default(source, rows, out)


def _several(rows: One, given: Sequence[Any]) -> bool:
    """Whether an operation was given a list with tensors of other single examples, to pad them."""
    lists = [part for part in given if isinstance(part, (list, tuple))]
    tags = [getattr(leaf, TAG, None) for part in lists for leaf in part]
    return any(type(tag) is One and tag.example != rows.example for tag in tags)

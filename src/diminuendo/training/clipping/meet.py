"""Where a tensor made of parameters meets a tensor of the batch.

Only such an operation is made per example: elementwise ones see the tensor spread over the examples
(:mod:`~diminuendo.training.clipping.lift`), products with a matrix are kept as such
(:mod:`~diminuendo.training.clipping.product`), normalisations are taken apart into both, and all
others are repeated (:mod:`~diminuendo.training.clipping.replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.choosing import indexed
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.lift import RowsPiece, lift, padding_of
from diminuendo.training.clipping.marks import ELEMENTWISE, Made, Operation
from diminuendo.training.clipping.product import product
from diminuendo.training.clipping.replay import replayed
from diminuendo.training.clipping.rows import TAG, One, Rows

if TYPE_CHECKING:
    from diminuendo.training.clipping.watch import Watch

_NOT_DIFFERENTIABLE = {
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "less", "__eq__", "__ne__", "__gt__", "__ge__",
    "__lt__", "__le__", "isclose", "bucketize", "searchsorted", "argmax", "argmin", "argsort",
}  # fmt: skip


def meet(
    watch: Watch,
    func: Callable[..., Any],
    op: Operation,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    source: Tensor,
    rows: Rows,
) -> Any:
    """The result of an operation on tensors made of parameters and tensors of the batch."""
    name = op.name
    if name in _NOT_DIFFERENTIABLE:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        if name in ELEMENTWISE and not (op.inplace and watch.made_of(args[0]) is not None):
            return _elementwise(watch, func, op, args, kwargs, source, rows)
        rule = _RULES.get(name)
        if rule is not None:
            result = rule(watch, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return replayed(watch, func, op, args, kwargs, source, rows)


def _elementwise(
    watch: Watch,
    func: Callable[..., Any],
    op: Operation,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    source: Tensor,
    rows: Rows,
) -> Any:
    operands = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
    shape = args[0].shape if op.inplace else _broadcast(*operands)
    aligned = _aligned(rows, source, shape)
    lifted = {
        id(part): lift(watch, part, shape, aligned) for part in operands if watch.made_of(part)
    }
    fixed = [lifted.get(id(part), part) for part in args]
    return func(*fixed, **{key: lifted.get(id(part), part) for key, part in kwargs.items()})


def _broadcast(*operands: Tensor) -> torch.Size:
    """The shape that the operands have together."""
    shapes = [operand.shape for operand in operands]
    longest = max(shapes, key=len)
    sizes = list(longest)
    for shape in shapes:
        for place in range(1, len(shape) + 1):
            if sizes[-place] == 1:
                sizes[-place] = shape[-place]
    return torch.Size(sizes)


def _aligned(rows: Rows, source: Tensor, shape: torch.Size) -> Rows:
    """Where the examples of ``source`` are once it is spread over ``shape``."""
    if type(rows) is One:
        return rows.over(shape)
    return rows.moved(rows.dim + len(shape) - source.dim())


def _written(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``x[index] = P``."""
    target, index, value = args
    rows = watch.rows_of(target)
    if rows is None or not watch.made_of(value):
        raise EngineError(
            f"{watch.tape.title(watch.made_of(target))} is written on with examples; write the "
            "examples first, or join both with torch.cat"
        )
    with torch.no_grad():
        part = target[index]
    place = indexed(target, rows, index, part)
    return func(target, index, lift(watch, value, part.shape, place), **kwargs)


def _filled(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``x.masked_fill(mask, P)`` for a number P."""
    x, mask, value = (*args, *kwargs.values())
    rows = watch.rows_of(x)
    if rows is None or func.__name__.endswith("_"):
        return NotImplemented
    shape = _broadcast(x, mask)
    aligned = _aligned(rows, x, shape)
    return torch.where(mask, lift(watch, value, shape, aligned), x)


def _joined(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``cat`` and ``stack``: what is made of parameters already has a row for each example."""
    parts = args[0] if args else kwargs["tensors"]
    found = next(((part, rows) for part in parts if (rows := watch.settle(part)) is not None), None)
    if found is None or found[1].dim < 0:
        return NotImplemented
    whole, rows = found
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if type(rows) is One:  # what is learned belongs to the only example there is
        known = {
            tag.example if type(tag) is One else -1 for tag in map(watch.rows_of, parts) if tag
        }
        if len(known) > 1:
            return NotImplemented
    elif func.__name__ != "stack" and dim % whole.dim() == rows.dim:
        return NotImplemented
    fixed = [
        lift(watch, part, part.shape, _aligned(rows, part, part.shape))
        if watch.made_of(part)
        else part
        for part in parts
    ]
    return func(fixed, *args[1:], **{key: v for key, v in kwargs.items() if key != "tensors"})


def _attention(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Attention with a learned bias on its scores, or of learned queries, keys or values.

    Repeating it would draw another dropout, so what is learned is spread over the examples.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, bias, dropout, causal, scale, shared = _named(names, args, kwargs)
    found = next(((part, rows) for part in (q, k, v) if (rows := watch.settle(part))), None)
    if found is None or not 0 <= found[1].dim < found[0].dim() - 2:
        return NotImplemented
    dim, size = found[1].dim, found[0].shape[found[1].dim]
    if any(part.dim() != found[0].dim() or part.shape[dim] not in (1, size) for part in (q, k, v)):
        return NotImplemented

    def spread(part: Tensor, *last: int) -> Tensor:
        if watch.made_of(part) is None:
            return part
        shape = [*q.shape[:-2], *last] if last else list(part.shape)
        shape[dim] = size
        return lift(watch, part, torch.Size(shape), found[1])

    if bias is not None:
        bias = spread(bias, q.shape[-2], k.shape[-2])
    more = {} if shared is None else {"enable_gqa": shared}
    return func(
        spread(q), spread(k), spread(v), bias, dropout or 0.0, bool(causal), scale=scale, **more
    )


def _named(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    known = dict(zip(names, args, strict=False))
    known.update(kwargs)
    return [known.get(name) for name in names]


def _linear(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    x, weight, bias = _named(("input", "weight", "bias"), args, kwargs)
    return product(watch, func, x, weight, bias, flipped=False)


def _matmul(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    x, weight = (*args, *kwargs.values())[:2]
    if func.__name__ == "__rmatmul__":
        x, weight = weight, x
    return product(watch, torch.matmul, x, weight, None, flipped=True)


def _addmm(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    del func
    if set(kwargs) & {"alpha", "beta", "out"} or len(args) != 3:
        return NotImplemented
    bias, x, weight = args
    if isinstance(watch.made_of(bias), Made) and bias.dim() != 1:
        return NotImplemented

    def whole(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight)

    return product(watch, whole, x, weight, bias, flipped=True)


def _embedding(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    indices, weight, padding, most, _, by_count, _ = _named(
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        args,
        kwargs,
    )
    rows = watch.settle(indices)
    if rows is None or not rows.fits(indices) or not isinstance(weight, nn.Parameter):
        return NotImplemented
    if most is not None or by_count:
        raise EngineError(
            "an embedding with max_norm or scale_grad_by_freq depends on the whole batch; use "
            "neither"
        )
    del func
    out = F.embedding(indices, weight.detach().requires_grad_(), padding)
    made = watch.made_of(weight)
    assert made is not None
    piece = RowsPiece(watch.tape.title(made), weight, indices, padding_of(padding, weight), rows)
    return watch.tape.watch_op(piece, out, True)


def _scaled(
    watch: Watch,
    plain: Tensor,
    source: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
) -> Tensor:
    """``plain * weight + bias`` after a normalisation, spread over the examples."""
    rows = watch.settle(source)
    assert rows is not None
    for part, multiply in ((weight, True), (bias, False)):
        if part is None:
            continue
        fixed = part
        if watch.made_of(part) is not None:
            fixed = _shaped(watch, part, shape)
            fixed = lift(watch, fixed, plain.shape, rows)
        else:
            fixed = part.reshape(shape)
        plain = plain * fixed if multiply else plain + fixed
    return plain


def _shaped(watch: Watch, part: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(part.shape) == tuple(shape):
        return part
    made = watch.made_of(part)
    assert made is not None
    view = part.reshape(tuple(shape))
    setattr(view, TAG, Made(made.params, ("reshape", (part, {}))))
    return view


def _layer_norm(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    x, shape, weight, bias, eps = _named(
        ("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs
    )
    if watch.rows_of(x) is None:
        return NotImplemented
    if func.__name__ == "rms_norm":
        eps, bias = bias if bias is not None else eps, None
        plain = F.rms_norm(x, shape, None, eps)
    else:
        plain = F.layer_norm(x, shape, None, None, 1e-5 if eps is None else eps)
    return _scaled(watch, plain, x, weight, bias, shape)


def _group_norm(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    del func
    x, groups, weight, bias, eps = _named(
        ("input", "num_groups", "weight", "bias", "eps"), args, kwargs
    )
    if watch.rows_of(x) is None:
        return NotImplemented
    plain = F.group_norm(x, groups, None, None, 1e-5 if eps is None else eps)
    return _scaled(watch, plain, x, weight, bias, (-1, *[1] * (x.dim() - 2)))


def _batch_norm(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    names = (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    )
    x, mean, var, weight, bias, training, momentum, eps = _named(names, args, kwargs)
    if watch.rows_of(x) is None or func.__name__ != "batch_norm":
        return NotImplemented
    plain = F.batch_norm(
        x, mean, var, None, None, bool(training), momentum or 0.1, 1e-5 if eps is None else eps
    )
    return _scaled(watch, plain, x, weight, bias, (-1, *[1] * (x.dim() - 2)))


_RULES: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "__matmul__", "__rmatmul__"), _matmul),
    "addmm": _addmm,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "__setitem__": _written,
    "masked_fill": _filled,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
}

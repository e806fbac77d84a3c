"""Where a tensor made of parameters meets a tensor of the batch.

Only such an operation is made per example. The tensor P made of parameters enters it without its
history; a piece waits for the gradients that come back and turns them into one gradient of P for
each example: exact for elementwise operations, which see P spread over the examples (``lift``),
for products with a matrix, and by a replay of the single operation for everything else. Where P is
not a parameter itself, its gradients go on through P's own graph, all examples in one call
(:func:`returned`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from diminuendo.training.clipping.contract import Factor, upcast
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.layers.embedding import EmbeddingPiece
from diminuendo.training.clipping.layers.linear import LinearPiece
from diminuendo.training.clipping.layers.norm import DirectPiece
from diminuendo.training.clipping.marks import Made, Operation, tensors
from diminuendo.training.clipping.rows import TAG, Rows, default, indexed
from diminuendo.training.clipping.tape import Piece

if TYPE_CHECKING:
    from diminuendo.training.clipping.watch import Watch

_ELEMENTWISE = {
    "add", "sub", "subtract", "rsub", "__rsub__", "mul", "multiply", "div", "divide",
    "true_divide", "__rdiv__", "__rtruediv__", "pow", "__pow__", "__rpow__", "float_power",
    "where", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "fmax", "fmin", "atan2",
    "hypot", "copysign", "logaddexp", "xlogy", "remainder", "fmod", "__radd__", "__rmul__",
    "__add__", "__sub__", "__mul__", "__truediv__", "copy", "clamp",
}  # fmt: skip
_NOT_DIFFERENTIABLE = {
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "less", "__eq__", "__ne__", "__gt__", "__ge__",
    "__lt__", "__le__", "isclose", "bucketize", "searchsorted", "argmax", "argmin", "argsort",
}  # fmt: skip


class MetPiece(DirectPiece):
    """Gradients for each example of tensors made of parameters.

    Those of parameters themselves are ``values``; the others wait in ``returning``, each beside
    its tensor, for the way back through the tensors' own graph.
    """

    def __init__(self, path: str, made: Sequence[Made], examples: int) -> None:
        params: dict[int, nn.Parameter] = {}
        for mark in made:
            params.update(mark.params)
        super().__init__(path, list(params.values()), examples)
        self.returning: list[tuple[Tensor, Tensor]] = []

    def take(self, target: Tensor, gradients: Tensor) -> None:
        """Take the gradients ``(N, *shape)`` of a tensor made of parameters."""
        if not isinstance(target, nn.Parameter):
            self.returning.append((target, gradients))
            return
        if target.dim() == 0:
            gradients = gradients.reshape(self.examples, 1)
        known = self.values.get(id(target))
        gradients = upcast(gradients)
        self.values[id(target)] = gradients if known is None else known + gradients

    def instantiate(self, param: nn.Parameter) -> Tensor:
        value = super().instantiate(param)
        return value.reshape(self.examples, 1) if param.dim() == 0 else value

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        return super().weighted_sum(param, factors).reshape(param.shape)

    def release(self) -> None:
        super().release()
        self.returning = []


class Placed(Piece):
    """A piece whose output has the shape ``shape`` and its examples where ``rows`` says."""

    rows: Rows
    shape: torch.Size

    def by_example(self, position: int, grad: Tensor) -> Tensor:  # noqa: ARG002
        return self.placed(grad).flatten(1)

    def placed(self, grad: Tensor) -> Tensor:
        """The output's gradient as ``(N, k, *rest)``; it may come in the shape of another view."""
        return self.rows.grouped(grad.reshape(self.shape))


class LiftPiece(Placed, MetPiece):
    """A tensor made of parameters, spread over the examples of a tensor of shape ``shape``."""

    def __init__(
        self, path: str, target: Tensor, made: Made, shape: torch.Size, rows: Rows
    ) -> None:
        super().__init__(path, [made], rows.examples)
        self.target, self.shape, self.rows = target, shape, rows

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        shape, dim = self.target.shape, self.rows.dim
        aligned = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
        grad = upcast(grad).reshape(self.shape)
        if aligned[dim] == 1:
            others = [d for d, size in enumerate(aligned) if size == 1 and d != dim]
            grad = grad.sum(others, keepdim=True) if others else grad
            front = grad.movedim(dim, 0)
            each = self.rows.summed(front.reshape(front.shape[0], -1))
            self.take(self.target, each.reshape(self.examples, *shape))
        else:
            grad = grad.sum_to_size(shape)
            self.take(self.target, scattered(grad, self.rows, dim - len(self.shape) + len(shape)))
        return True


def scattered(grad: Tensor, rows: Rows, dim: int) -> Tensor:
    """``(N, *shape)``: for each example the gradient ``grad`` at its own rows, zero elsewhere."""
    front = grad.movedim(dim, 0)
    size = front.shape[0]
    owners = rows.owners(size).to(grad.device)
    full = front.new_zeros(rows.examples, *front.shape)
    full[owners, torch.arange(size, device=grad.device)] = front
    return full.movedim(1, dim + 1)


class RowsPiece(Placed, EmbeddingPiece):
    """A lookup whose examples are where ``rows`` says."""

    def __init__(
        self, path: str, weight: nn.Parameter, indices: Tensor, padding: int | None, rows: Rows
    ) -> None:
        super().__init__(path, weight, rows.grouped(indices), padding)
        self.rows, self.shape = rows, torch.Size((*indices.shape, weight.shape[1]))

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        return super().receive([None if g is None else self.placed(g) for g in grads])


class ProductPiece(Placed, LinearPiece):
    """``x W^T + b``, or ``x W`` if ``flipped``, with the examples of x where ``rows`` says."""

    def __init__(
        self,
        path: str,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        inputs: Tensor,
        out: Tensor,
        rows: Rows,
        flipped: bool,
    ) -> None:
        super().__init__(path, weight, bias, inputs)
        self.examples, self.rows, self.shape = rows.examples, rows, out.shape
        self.flipped = flipped

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        if self.rows.dim or self.rows.owner is not None:
            grads = [None if g is None else self.placed(g) for g in grads]
            if self.inputs is not None:
                self.inputs = self.rows.grouped(self.inputs)
        return super().receive(grads)

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        total = super().weighted_sum(param, factors)
        return total.t() if self.flipped and param is self.weight else total

    def add_weighted(
        self, total: Tensor, param: nn.Parameter, factors: Tensor, scale: float
    ) -> None:
        if self.flipped and param is self.weight:
            if self.grads is None or self._products is not None or self.inputs is None:
                total.add_(self.weighted_sum(param, factors), alpha=scale)
                return
            total = total.t()
        super().add_weighted(total, param, factors, scale)

    def instantiate(self, param: nn.Parameter) -> Tensor:
        value = super().instantiate(param)
        return value.mT if self.flipped and param is self.weight else value

    def factor(self, param: nn.Parameter) -> Factor | None:
        known = super().factor(param)
        if known is None or not self.flipped:
            return known
        return Factor(known.cols, known.rows)


class MatrixPiece(Placed, MetPiece):
    """``x W^T`` or ``x W`` with W made of parameters."""

    def __init__(
        self,
        path: str,
        target: Tensor,
        made: Made,
        inputs: Tensor,
        out: Tensor,
        rows: Rows,
        flipped: bool,
    ) -> None:
        super().__init__(path, [made], rows.examples)
        self.target, self.rows, self.flipped, self.shape = target, rows, flipped, out.shape
        self.inputs = self.save(inputs)

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        u = upcast(self.placed(grad)).flatten(1, -2)
        v = upcast(self.rows.grouped(self.inputs)).flatten(1, -2)
        self.take(self.target, torch.bmm(v.mT, u) if self.flipped else torch.bmm(u.mT, v))
        return True


def lift(watch: Watch, target: Tensor, shape: torch.Size, rows: Rows) -> Tensor:
    """A tensor made of parameters, spread over ``shape``, as a tensor of the batch."""
    made = watch.made_of(target)
    assert made is not None
    offset = len(shape) - target.dim()
    path = watch.tape.title(made)
    own = rows.dim - offset
    along = own >= 0 and target.shape[own] != 1
    if not 0 <= rows.dim < len(shape) or (along and target.shape[own] != shape[rows.dim]):
        raise EngineError(
            f"lost sight of the examples where {path} meets the batch (shapes "
            f"{tuple(target.shape)} and {tuple(shape)}); keep the example as the first dimension"
        )
    piece: Any = None
    if along and made.maker is not None and made.maker[0] == "embedding":
        piece = _looked_up(path, made.maker[1], target, rows.moved(own), shape)
    if piece is None:
        piece = LiftPiece(path, target, made, shape, rows)
    out = watch.tape.watch_op(piece, target.detach().requires_grad_().expand(shape), True)
    setattr(out, TAG, rows)
    return out


def _looked_up(
    path: str, call: Sequence[Any], target: Tensor, rows: Rows, shape: torch.Size
) -> RowsPiece | None:
    """A lookup of constant indices that turn out to be one row for each example."""
    indices, weight, padding, *_ = (*call[:-1], None, None, None)
    padding = call[-1].get("padding_idx", padding)
    if (
        shape == target.shape
        and isinstance(weight, nn.Parameter)
        and isinstance(indices, Tensor)
        and rows.dim < indices.dim()
        and rows.fits(indices)
    ):
        return RowsPiece(path, weight, indices, _padding(padding, weight), rows)
    return None


def _padding(padding: int | None, weight: Tensor) -> int | None:
    return None if padding is None or padding == -1 else padding % weight.shape[0]


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
        if name in _ELEMENTWISE and not (op.inplace and watch.made_of(args[0]) is not None):
            return _elementwise(watch, func, op, args, kwargs, source, rows)
        rule = _RULES.get(name)
        if rule is not None:
            result = rule(watch, func, args, kwargs)
            if result is not None:
                return result
        return _replayed(watch, func, op, args, kwargs, source, rows)


def _elementwise(
    watch: Watch,
    func: Callable[..., Any],
    op: Operation,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    source: Tensor,
    rows: Rows,
) -> Any:
    operands = list(tensors((args, kwargs), 2))
    if op.inplace:
        shape = args[0].shape
    else:
        shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    aligned = rows.moved(rows.dim + len(shape) - source.dim())
    lifted = {
        id(part): lift(watch, part, shape, aligned) for part in operands if watch.made_of(part)
    }
    return func(*_replaced(args, lifted), **_replaced(kwargs, lifted))


def _replaced(value: Any, by: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replaced(part, by) for key, part in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        parts = [_replaced(part, by) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _written(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``x[index] = P``."""
    target, index, value = args
    rows = watch.rows_of(target)
    if rows is None or not watch.made_of(value):
        raise EngineError(
            f"{watch.tape.title(watch.made_of(target))} is written on with examples; build "
            "the tensor the other way round, from the batch"
        )
    with torch.no_grad():
        shape = target[index].shape
    place = indexed(target, rows, index, len(shape))
    return func(target, index, lift(watch, value, shape, place), **kwargs)


def _filled(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``x.masked_fill(mask, P)`` for a number P."""
    x, mask, value = (*args, *kwargs.values())
    rows = watch.rows_of(x)
    if rows is None or func.__name__.endswith("_"):
        return None
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    aligned = rows.moved(rows.dim + len(shape) - x.dim())
    return torch.where(mask, lift(watch, value, shape, aligned), x)


def _joined(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``cat`` and ``stack``: what is made of parameters already has a row for each example."""
    parts = args[0] if args else kwargs["tensors"]
    found = next(((part, rows) for part in parts if (rows := watch.settle(part)) is not None), None)
    if found is None or found[1].dim < 0:
        return None
    whole, rows = found
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if func.__name__ != "stack" and dim % whole.dim() == rows.dim:
        return None
    fixed = [lift(watch, part, part.shape, rows) if watch.made_of(part) else part for part in parts]
    return func(fixed, *args[1:], **{key: v for key, v in kwargs.items() if key != "tensors"})


def _named(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    known = dict(zip(names, args, strict=False))
    known.update(kwargs)
    return [known.get(name) for name in names]


def _linear(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    x, weight, bias = _named(("input", "weight", "bias"), args, kwargs)
    return _product(watch, func, x, weight, bias, flipped=False)


def _matmul(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    x, weight = (*args, *kwargs.values())[:2]
    if func.__name__ == "__rmatmul__":
        x, weight = weight, x
    return _product(watch, torch.matmul, x, weight, None, flipped=True)


def _addmm(
    watch: Watch, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    del func
    if set(kwargs) & {"alpha", "beta", "out"} or len(args) != 3:
        return None
    bias, x, weight = args
    if isinstance(watch.made_of(bias), Made) and bias.dim() != 1:
        return None

    def whole(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight)

    return _product(watch, whole, x, weight, bias, flipped=True)


def _product(
    watch: Watch,
    func: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    flipped: bool,
) -> Tensor | None:
    rows = watch.settle(x)
    if rows is None or not rows.fits(x) or rows.dim >= x.dim() - 1 or weight.dim() != 2:
        return None
    if watch.rows_of(weight) is not None or (bias is not None and watch.rows_of(bias) is not None):
        return None
    made = [watch.made_of(weight), None if bias is None else watch.made_of(bias)]
    known = next(mark for mark in made if mark is not None)
    base, turned = _untransposed(weight)
    own = base if made[0] is not None and isinstance(base, nn.Parameter) else None
    own_bias = bias if made[1] is not None and isinstance(bias, nn.Parameter) else None
    path = watch.tape.title(known)
    fixed, shift = weight.detach(), None if bias is None else bias.detach()
    extra = [shift] if shift is not None else []
    rooted = not x.requires_grad
    if rooted:
        (extra[0] if extra else fixed).requires_grad_()
    simple = (made[0] is None or own is not None) and (made[1] is None or own_bias is not None)
    if simple:
        out = func(x, fixed, *extra)
        piece = ProductPiece(path, own, own_bias, x, out, rows, flipped != turned)
        return watch.tape.watch_op(piece, out, rooted)
    result = func(x, fixed, *extra)
    if made[0] is not None:
        matrix = MatrixPiece(path, weight, made[0], x, result, rows, flipped)
        result = watch.tape.watch_op(matrix, result, rooted and made[1] is None)
    if made[1] is not None and bias is not None:
        result = _with_bias_watched(watch, result, bias, made[1], rows, rooted)
    return result


def _with_bias_watched(
    watch: Watch, out: Tensor, bias: Tensor, made: Made, rows: Rows, last: bool
) -> Tensor:
    piece = LiftPiece(watch.tape.title(made), bias, made, out.shape, rows)
    return watch.tape.watch_op(piece, out, last)


def _untransposed(weight: Tensor) -> tuple[Tensor, bool]:
    """The parameter whose transpose this is, if it is one."""
    mark = getattr(weight, TAG, None)
    if isinstance(mark, Made) and mark.maker is not None and weight.dim() == 2:
        name, (base, *rest) = mark.maker
        numbers = [part for part in rest if isinstance(part, int)]
        if name in ("t", "T", "mT") or (
            name == "transpose" and sorted(numbers) in ([0, 1], [-2, -1])
        ):
            return base, True
    return weight, False


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
        return None
    if most is not None or by_count:
        raise EngineError(
            "an embedding with max_norm or scale_grad_by_freq depends on the whole batch; use "
            "neither"
        )
    del func
    out = F.embedding(indices, weight.detach().requires_grad_(), padding)
    made = watch.made_of(weight)
    assert made is not None
    piece = RowsPiece(watch.tape.title(made), weight, indices, _padding(padding, weight), rows)
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
        return None
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
        return None
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
        return None
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
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
}


class OperationPiece(MetPiece):
    """An operation that is replayed for the gradients of what is made of parameters."""

    eager = False

    def __init__(
        self,
        path: str,
        func: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        targets: dict[int, Made],
        rows: dict[int, Rows],
    ) -> None:
        examples = next(iter(rows.values())).examples
        super().__init__(path, list(targets.values()), examples)
        self.func, self.spec = func, spec
        self.targets, self.rows = sorted(targets), rows
        self.leaves = [
            leaf if k in targets or not isinstance(leaf, Tensor) else self.save(leaf)
            for k, leaf in enumerate(leaves)
        ]
        device = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
        self.autocast = (
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )
        self.outs: list[tuple[torch.Size, Rows]] = []
        self.seen: list[tuple[Tensor, int]] = []

    def _call(self, made: Sequence[Tensor], batch: dict[int, Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for k, leaf in batch.items():
            leaves[k] = leaf
        for k, leaf in zip(self.targets, made, strict=True):
            leaves[k] = leaf
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        device, enabled, dtype = self.autocast
        with torch.autocast(device, dtype, enabled):
            result = self.func(*args, **kwargs)
        return [out for out in tensors(result, 2) if out.is_floating_point()]

    def by_example(self, position: int, grad: Tensor) -> Tensor:
        return self.outs[position][1].grouped(grad).flatten(1)

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        if all(grad is None for grad in grads):
            return False
        wanted = [k for k, grad in enumerate(grads) if grad is not None]
        weights = [grad for grad in grads if grad is not None]
        made = [self.leaves[k].detach() for k in self.targets]
        with torch.enable_grad():
            values = self._by_blocks(made, wanted, weights)
            if values is None:
                values = self._by_masks(made, wanted, weights)
        for k, value in zip(self.targets, values, strict=True):
            self.take(self.leaves[k], value.detach())
        self.leaves, self.seen = [], []
        return True

    def _by_blocks(
        self, made: list[Tensor], wanted: list[int], weights: list[Tensor]
    ) -> list[Tensor] | None:
        """All examples at once, each with its own rows of the batch; None where the operation
        on an example alone is not what it was in the batch."""
        places = [*self.rows.values(), *(self.outs[k][1] for k in wanted)]
        owner = next((rows.owner for rows in places if rows.owner is not None), None)
        if owner is not None and any(rows.owner is not owner for rows in places):
            return None
        count = self.examples if owner is None else owner.numel()

        def cut(tensor: Tensor, rows: Rows) -> Tensor:
            front = tensor.movedim(rows.dim, 0)
            return front.reshape(count, -1, *front.shape[1:])

        keys = list(self.rows)

        def pull(batch: list[Tensor], weights: list[Tensor]) -> tuple[Any, list[Tensor]]:
            rows = {
                k: part.movedim(0, self.rows[k].dim) for k, part in zip(keys, batch, strict=True)
            }

            def forward(*made: Tensor) -> tuple[Tensor, ...]:
                outs = self._call(made, rows)
                return tuple(outs[k].movedim(self.outs[k][1].dim, 0) for k in wanted)

            outs, back = torch.func.vjp(forward, *made)
            return back(tuple(w.to(o.dtype) for w, o in zip(weights, outs, strict=True))), list(
                outs
            )

        try:
            if not all(rows.fits(self.leaves[k]) for k, rows in self.rows.items()):
                return None
            batch = [cut(self.leaves[k], rows) for k, rows in self.rows.items()]
            pieces = [cut(w, self.outs[k][1]) for k, w in zip(wanted, weights, strict=True)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values, outs = torch.func.vmap(pull)(batch, pieces)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return None
        for k, out in zip(wanted, outs, strict=True):
            seen, version = self.seen[k]
            if not _repeats(out, cut(seen, self.outs[k][1]), seen._version != version):
                return None
        if owner is None:
            return list(values)
        folded = Rows(self.examples, 0, owner)
        return [folded.summed(value) for value in values]

    def _by_masks(
        self, made: list[Tensor], wanted: list[int], weights: list[Tensor]
    ) -> list[Tensor]:
        """One example after the other: the operation as it was, with the gradients of the
        outputs of all other examples set to zero."""
        leaves = [part.requires_grad_() for part in made]
        outs = self._call(leaves, {k: self.leaves[k] for k in self.rows})
        chosen = [outs[k] for k in wanted]
        for k in wanted:
            seen, version = self.seen[k]
            if not _repeats(outs[k], seen, seen._version != version):
                raise EngineError(
                    f"the operation {getattr(self.func, '__name__', self.func)!s} on {self.path} "
                    "gives another result when it is repeated, so it is random (dropout within "
                    "an attention on learned tokens, for example); set its dropout to 0"
                )
        parts = [
            scattered(weight, self.outs[k][1], self.outs[k][1].dim)
            for k, weight in zip(wanted, weights, strict=True)
        ]
        each = []
        for i in range(self.examples):
            grads = torch.autograd.grad(
                chosen,
                leaves,
                [part[i].to(out.dtype) for part, out in zip(parts, chosen, strict=True)],
                retain_graph=True,
                allow_unused=True,
            )
            each.append(
                [
                    torch.zeros_like(p) if g is None else g
                    for g, p in zip(grads, leaves, strict=True)
                ]
            )
        return [torch.stack(column) for column in zip(*each, strict=True)]


def _repeats(out: Tensor, seen: Tensor, changed: bool) -> bool:
    """Whether ``out`` is what was seen, as far as that was not written over since."""
    if out.shape != seen.shape or changed:
        return out.shape == seen.shape
    loose = 1e-4 if out.dtype in (torch.float32, torch.float64) else 5e-2
    return torch.allclose(out, seen.to(out.dtype), loose, loose, True)


def _replayed(
    watch: Watch,
    func: Callable[..., Any],
    op: Operation,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    source: Tensor,
    rows: Rows,
) -> Any:
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    targets, places, fixed = {}, {}, list(leaves)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            made = watch.made_of(leaf)
            if made is not None:
                targets[k], fixed[k] = made, leaf.detach()
            elif (place := watch.settle(leaf)) is not None:
                places[k] = place
    path = watch.tape.title(next(iter(targets.values())))
    if op.inplace:
        raise EngineError(
            f"{path} takes part in '{op.name}_', which writes on a tensor of the batch; use the "
            "operation that returns a new tensor"
        )
    piece = OperationPiece(path, func, leaves, spec, targets, places)
    args, kwargs = pytree.tree_unflatten(fixed, spec)
    result = func(*args, **kwargs)
    parts, form = pytree.tree_flatten(result)
    several = sum(isinstance(out, Tensor) and out.is_floating_point() for out in parts) > 1
    watched = []
    for k, out in enumerate(parts):
        if isinstance(out, Tensor) and out.is_floating_point():
            place = (
                op.rule(args, kwargs, source, rows, out, len(watched))
                if op.rule is not None
                else default(source, rows, out)
            )
            piece.outs.append((out.shape, place))
            piece.seen.append((out.detach(), out._version))
            out = watch.tape.attach(out)
            # One output may be made of another: only what comes from outside counts for that one.
            parts[k] = torch.ops.aten._unsafe_view.default(out, out.shape) if several else out
            watched.append(parts[k])
    if watched:
        watch.tape.watch(piece, *watched)
    return pytree.tree_unflatten(parts, form)


def returned(pieces: Sequence[MetPiece], examples: int) -> MetPiece | None:
    """What waits in the pieces, taken back to the parameters in one call."""
    totals: dict[int, Tensor] = {}
    targets: dict[int, Tensor] = {}
    params: dict[int, nn.Parameter] = {}
    for piece in pieces:
        if not piece.returning:
            continue
        for target, value in piece.returning:
            key = id(target)
            targets[key] = target
            totals[key] = totals[key] + value if key in totals else value
        params.update({id(param): param for param in piece.params})
        piece.returning = []
        piece.params = tuple(param for param in piece.params if id(param) in piece.values)
    if not targets:
        return None
    whole = MetPiece("(parameters)", [Made(params)], examples)
    whole.engaged = whole.processed = True
    outs, inputs = list(targets.values()), list(params.values())
    weights = [totals[key].to(target.dtype) for key, target in targets.items()]
    for param, value in zip(inputs, _pulled(outs, inputs, weights, examples), strict=True):
        if value is not None:
            whole.take(param, value)
    return whole


def _pulled(
    outs: list[Tensor], inputs: list[nn.Parameter], weights: list[Tensor], examples: int
) -> list[Tensor | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(
                torch.autograd.grad(
                    outs,
                    inputs,
                    weights,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
            )
    except (RuntimeError, NotImplementedError):  # an operation that cannot be batched
        each = [
            torch.autograd.grad(
                outs, inputs, [w[i] for w in weights], retain_graph=True, allow_unused=True
            )
            for i in range(examples)
        ]
        return [
            None if column[0] is None else torch.stack([g for g in column if g is not None])
            for column in zip(*each, strict=True)
        ]

"""Products of a tensor of the batch with a matrix made of parameters, wherever they are written.

Linear layers have code of their own; this is for a weight that something else reads, a matrix that
is computed from parameters, and inputs whose examples are not simply the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.contract import Factor, upcast
from diminuendo.training.clipping.device import DeviceProduct, serves
from diminuendo.training.clipping.layers.linear import LinearPiece
from diminuendo.training.clipping.lift import LiftPiece, MetPiece, Placed
from diminuendo.training.clipping.marks import Made
from diminuendo.training.clipping.rows import TAG, Rows
from diminuendo.training.clipping.sums import Known, Product, Term
from diminuendo.training.clipping.sums import Rows as SumRows
from diminuendo.training.clipping.tape import WHOLE

if TYPE_CHECKING:
    from diminuendo.training.clipping.watch import Watch


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

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        if not self.flipped or param is not self.weight:
            return super().terms(param, factors)
        if self._pair is not None:
            return [(WHOLE, Known(lambda: self._rows_summed(factors)[0].t(), self.examples))]
        if self._products is not None:
            return [(WHOLE, SumRows(self._products.mT, factors))]
        assert self.inputs is not None
        kind = DeviceProduct if serves(self._u(), self.inputs) else Product
        return [(WHOLE, kind(self.inputs, self._u(), factors, self._terms))]

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
        self.target, self.rows, self.flipped, self.shape = (
            self.hold(target),
            rows,
            flipped,
            out.shape,
        )
        self.inputs = self.save(inputs)

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        u = upcast(self.placed(grad)).flatten(1, -2)
        v = upcast(self.rows.grouped(self.inputs)).flatten(1, -2)
        v = v.conj()
        self.take(self.target, torch.bmm(v.mT, u) if self.flipped else torch.bmm(u.mT, v))
        return True


def product(
    watch: Watch,
    func: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    flipped: bool,
) -> Any:
    """The product, watched; NotImplemented where it is not one of a batch with a matrix."""
    rows = watch.settle(x)
    if rows is None or not rows.fits(x) or rows.dim >= x.dim() - 1 or weight.dim() != 2:
        return NotImplemented
    if watch.rows_of(weight) is not None or (bias is not None and watch.rows_of(bias) is not None):
        return NotImplemented
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

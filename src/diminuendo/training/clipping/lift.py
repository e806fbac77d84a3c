"""Tensors made of parameters, spread over the examples, and their gradients for each example.

The tensor P enters the batch without its history; a piece waits for the gradient that comes back
and sums it to one gradient of P for each example. Where P is not a parameter itself, its gradients
go on through P's own graph, those of all examples in one call (:func:`returned`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._vmap_internals import _vmap
from torch.autograd.graph import GradientEdge, get_gradient_edge

from diminuendo.training.clipping.contract import upcast
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.layers.embedding import EmbeddingPiece
from diminuendo.training.clipping.layers.norm import DirectPiece
from diminuendo.training.clipping.marks import Made
from diminuendo.training.clipping.rows import TAG, Rows
from diminuendo.training.clipping.tape import Piece

if TYPE_CHECKING:
    from diminuendo.training.clipping.watch import Watch


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
        self.returning: list[tuple[GradientEdge, Tensor]] = []
        self._edges: dict[int, GradientEdge] = {}

    def hold(self, target: Tensor) -> Tensor:
        """Remember the graph of a tensor made of parameters as it is now.

        It may be written on in place afterwards, as when a part of a table is overwritten: its
        ``grad_fn`` is then another.
        """
        if not isinstance(target, nn.Parameter):
            self._edges[id(target)] = get_gradient_edge(target)
        return target

    def take(self, target: Tensor, gradients: Tensor) -> None:
        """Take the gradients ``(N, *shape)`` of a tensor made of parameters that it holds."""
        if gradients.is_sparse:
            gradients = gradients.to_dense()
        if not isinstance(target, nn.Parameter):
            self.returning.append((self._edges[id(target)], gradients.to(target.dtype)))
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
        self.returning, self._edges = [], {}


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
        self.target, self.shape, self.rows = self.hold(target), shape, rows

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
            each = self.rows.summed(front.reshape(len(front), self.target.numel()))
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
    out = watch.tape.watch_leaf(piece, target.detach().requires_grad_().expand(shape))
    setattr(out, TAG, rows)
    return out


def _looked_up(
    path: str, call: Sequence[Any], target: Tensor, rows: Rows, shape: torch.Size
) -> RowsPiece | None:
    """A lookup of constant indices that turn out to be one row for each example."""
    given: list[Any] = [*call[:-1], None, None, None]
    indices, weight, padding = given[0], given[1], call[-1].get("padding_idx", given[2])
    if (
        shape == target.shape
        and isinstance(weight, nn.Parameter)
        and isinstance(indices, Tensor)
        and rows.dim < indices.dim()
        and rows.fits(indices)
    ):
        return RowsPiece(path, weight, indices, padding_of(padding, weight), rows)
    return None


def padding_of(padding: int | None, weight: Tensor) -> int | None:
    """The row of an embedding that is not trained, counted from the front."""
    return None if padding is None or padding == -1 else padding % weight.shape[0]


def returned(pieces: Sequence[MetPiece], examples: int) -> MetPiece | None:
    """What waits in the pieces, taken back to the parameters in one call."""
    totals: dict[GradientEdge, Tensor] = {}
    params: dict[int, nn.Parameter] = {}
    for piece in pieces:
        if not piece.returning:
            continue
        for edge, gradients in piece.returning:
            totals[edge] = totals[edge] + gradients if edge in totals else gradients
        params.update({id(param): param for param in piece.params})
        piece.returning = []
        piece.params = tuple(param for param in piece.params if id(param) in piece.values)
    if not totals:
        return None
    whole = MetPiece("(parameters)", [Made(params)], examples)
    whole.engaged = whole.processed = True
    outs, inputs, weights = list(totals), list(params.values()), list(totals.values())
    for param, value in zip(inputs, _pulled(outs, inputs, weights, examples), strict=True):
        if value is not None:
            whole.take(param, value)
    return whole


def _pulled(
    outs: list[GradientEdge], inputs: list[nn.Parameter], weights: list[Tensor], examples: int
) -> list[Tensor | None]:
    """What ``torch.autograd.grad`` returns for each example.

    Not called by that name, because the watch would step aside for it, and not see what a
    checkpoint does again.
    """
    autograd = torch.autograd.Variable._execution_engine

    def pull(*rows: Tensor) -> Any:
        given = tuple(outs), rows, True, False, tuple(inputs), True, False
        return autograd.run_backward(*given)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batched: Any = _vmap(pull, 0, 0, allow_none_pass_through=True)
            return list(batched(*weights))
    except (RuntimeError, NotImplementedError):  # an operation that cannot be batched
        each = [pull(*(w[i] for w in weights)) for i in range(examples)]
        return [
            None if column[0] is None else torch.stack([g for g in column if g is not None])
            for column in zip(*each, strict=True)
        ]

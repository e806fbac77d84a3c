"""``nn.Embedding``: the gradient of example i adds the output gradient of each token to the row
of its index, ``G_i = sum_t onehot(index_it) B_it^T``, so

    ||G_i||^2 = sum_{s,t} [index_is = index_it] (B_is . B_it)

and the clipped sum is the usual scatter of ``c_i B``. Tokens at ``padding_idx`` do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.contract import Factor, gram_size, spread, upcast
from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.rounding import row_norm
from diminuendo.training.clipping.sums import Lookup, Term
from diminuendo.training.clipping.tape import WHOLE, Kind, Piece, Report, Tape


class EmbeddingPiece(Piece):
    """One lookup of indices ``(N, *)``."""

    heavy = ("grads", "_terms")

    def __init__(
        self,
        path: str,
        weight: nn.Parameter,
        indices: Tensor,
        padding_idx: int | None,
    ) -> None:
        super().__init__(path, (weight,), indices.shape[0])
        self.padding_idx = padding_idx
        self.indices = self.save(indices)
        self.grads: Tensor | None = None
        self._terms: Tensor | None = None

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        self.grads = upcast(grad).reshape(self.examples, -1, grad.shape[-1])
        self.indices = self.indices.reshape(self.examples, -1)
        self.tokens = self.indices.shape[1]
        return True

    def measure(self, wanted: set[int]) -> list[Report]:
        weight = self.params[0]
        if id(weight) not in wanted:
            return []
        factor = self.factor(weight)
        if factor.rows.shape[1] == 1:
            return [Report(id(weight), Kind.NORM, row_norm(factor.cols))]
        norms, self._terms = gram_size(factor.rows, factor.cols)
        return [Report(id(weight), Kind.NORM, norms)]

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        assert self.grads is not None
        scaled = self.grads * spread(factors, self.grads)
        padding = -1 if self.padding_idx is None else self.padding_idx
        total: Tensor = torch.ops.aten.embedding_dense_backward(
            scaled, self.indices, param.shape[0], padding, False
        )
        return total

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        factor = self.factor(param)
        return [(WHOLE, Lookup(factor.cols, factor.rows, factors, param.shape[0], self._terms))]

    def instantiate(self, param: nn.Parameter) -> Tensor:
        factor = self.factor(param).double()
        full = factor.cols.new_zeros(self.examples, *param.shape)
        index = factor.rows.unsqueeze(2).expand(-1, -1, param.shape[1])
        return full.scatter_add_(1, index, factor.cols)

    def bulk(self, param: nn.Parameter) -> Tensor:
        return self.factor(param).bulk()

    def factor(self, param: nn.Parameter) -> Factor:  # noqa: ARG002
        assert self.grads is not None
        cols = self.grads
        if self.padding_idx is not None:
            cols = cols.masked_fill((self.indices == self.padding_idx).unsqueeze(2), 0.0)
        return Factor(self.indices, cols)


def forward_of(module: nn.Embedding, tape: Tape, path: str) -> Callable[..., Tensor]:
    """The forward that replaces ``module.forward`` while the engine is attached."""

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:
        if self is not module or not tape.recording() or input.shape[:1] == (0,):
            return nn.Embedding.forward(self, input)
        if input.dim() < 1:
            raise EngineError(
                f"{place(path)} got a single index; expected indices of shape (examples, ...)"
            )
        weight = cast(nn.Parameter, self.weight)
        out = F.embedding(input, weight.detach().requires_grad_(), self.padding_idx)
        return tape.watch_op(EmbeddingPiece(path, weight, input, self.padding_idx), out, True)

    return forward

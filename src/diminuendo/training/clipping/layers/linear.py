"""``nn.Linear``: inputs ``(N, *, d_in)``.

With A the inputs ``(N, T, d_in)`` and B the output gradients ``(N, T, d_out)``, example i has
the weight gradient ``B_i^T A_i`` and the bias gradient ``sum_t B_it``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.contract import (
    Factor,
    product_square_norm,
    product_weighted,
    square_norm,
    upcast,
    weighted,
)
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.tape import Piece, Tape, kept_rows, trained


class LinearPiece(Piece):
    """One application of ``x -> x W^T + b``; a frozen W or b is passed as None."""

    def __init__(
        self,
        path: str,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        inputs: Tensor,
    ) -> None:
        super().__init__(path, (weight, bias), inputs.shape[0])
        self.weight, self.bias = weight, bias
        self.inputs = self.save(inputs) if weight is not None else None
        self.grads: Tensor | None = None
        self._products: Tensor | None = None
        self._totals: Tensor | None = None

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        self.grads = upcast(grad).reshape(self.examples, -1, grad.shape[-1])
        if self.inputs is not None:
            self.inputs = upcast(self.inputs).reshape(self.examples, -1, self.inputs.shape[-1])
        return True

    def square_norms(self, wanted: Callable[[nn.Parameter], bool]) -> list[tuple[int, Tensor]]:
        u, v = self._u(), self.inputs
        weight = self.weight if self.weight is not None and wanted(self.weight) else None
        bias = self.bias if self.bias is not None and wanted(self.bias) else None
        result = []
        if u.shape[1] == 1 and weight is not None and bias is not None and v is not None:
            out = square_norm(u)
            result.append((id(weight), out * square_norm(v)))
            result.append((id(bias), out))
            return result
        if weight is not None and v is not None:
            squares, self._products = product_square_norm(u, v)
            result.append((id(weight), squares))
        if bias is not None:
            result.append((id(bias), square_norm(self._per_example_bias())))
        if self._products is not None and (self.bias is None or self._totals is not None):
            self.inputs = self.grads = None  # the products replace them
        return result

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        if param is self.weight:
            if self._products is not None:
                return weighted(factors, self._products)
            assert self.inputs is not None
            return product_weighted(self._u(), self.inputs, factors)
        return weighted(factors, self._per_example_bias())

    def instantiate(self, param: nn.Parameter) -> Tensor:
        if param is self.weight:
            if self._products is not None:
                return self._products
            assert self.inputs is not None
            return torch.bmm(self._u().mT, self.inputs)
        return self._per_example_bias()

    def factor(self, param: nn.Parameter) -> Factor | None:
        if param is not self.weight or self.inputs is None:
            return None
        return Factor(self._u(), self.inputs)

    def purge(self, keep: Tensor) -> None:
        for name in ("inputs", "grads", "_products", "_totals"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, kept_rows(tensor, keep))

    def _u(self) -> Tensor:
        assert self.grads is not None
        return self.grads

    def _per_example_bias(self) -> Tensor:
        if self._totals is None:
            u = self._u()
            self._totals = u.flatten(1) if u.shape[1] == 1 else u.sum(1)
        return self._totals


def linear(
    tape: Tape,
    path: str,
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
) -> Tensor:
    """``x W^T + b`` that leaves a :class:`LinearPiece` on the tape."""
    if x.dim() < 2:
        raise EngineError(
            f"'{path}' got an input of shape {tuple(x.shape)}; expected (examples, ..., "
            f"{weight.shape[1]}): add the example dimension in front"
        )
    shape = x.shape
    flat = x if x.dim() == 2 else x.reshape(-1, shape[-1])
    out = F.linear(flat, weight.detach(), None if bias is None else bias.detach())
    out = tape.attach(out)
    piece = LinearPiece(path, trained(weight), trained(bias), x)
    tape.watch(piece, out)
    if x.dim() == 2:
        return out
    # An alias that autograd does not count as a view: free to be changed in place later.
    viewed: Tensor = torch.ops.aten._unsafe_view(out, [*shape[:-1], out.shape[-1]])
    return viewed


def forward_of(module: nn.Linear, tape: Tape, path: str) -> Callable[..., Tensor]:
    """The forward that replaces ``module.forward`` while the engine is attached."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if self is not module or not tape.recording() or input.shape[0] == 0:
            return nn.Linear.forward(self, input)
        return linear(tape, path, input, cast(nn.Parameter, self.weight), self.bias)

    return forward

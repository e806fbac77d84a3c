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

from diminuendo.training.clipping import kernels, products
from diminuendo.training.clipping.contract import (
    Factor,
    Size,
    add_product_weighted,
    instantiating_pays,
    product_size,
    product_weighted,
    upcast,
    weighted,
)
from diminuendo.training.clipping.device import DeviceProduct, keeps_half, serves
from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.rounding import TF32, above, coarse, row_norm, to_tf32
from diminuendo.training.clipping.sums import Column, Known, Product, Rows, Term
from diminuendo.training.clipping.tape import (
    WHOLE,
    Kind,
    Piece,
    Report,
    Tape,
    kept_rows,
    trained,
)

# Products for which a GPU takes float64 wherever float32 would do.
_FEW = 1 << 28


class LinearPiece(Piece):
    """One application of ``x -> x W^T + b``; a frozen W or b is passed as None."""

    heavy = ("inputs", "grads", "_products", "_totals", "_terms")

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
        self._terms: Tensor | None = None
        self._product: Product | None = None
        self._pair: tuple[Tensor, Tensor] | None = None
        """On a GPU, the norms of one token's gradients and of its products."""
        self._summed: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        self.tokens = grad.shape[:-1].numel() // self.examples
        half = keeps_half(grad, self.tokens)
        self.grads = self._by_tokens(grad if half else upcast(grad))
        if self.inputs is not None:
            # autocast rounded the inputs to the type of the gradients before it multiplied
            v = self.inputs.to(grad.dtype) if half else upcast(self.inputs)
            self.inputs = self._by_tokens(v)
            if self.grads.dim() == 2 and kernels.serves(self.grads):
                self._measure_pair()
            elif coarse(self.grads):  # so that the hardware has nothing left to round
                self.grads, self.inputs = to_tf32(self.grads), to_tf32(self.inputs)
        return True

    def _measure_pair(self) -> None:
        u, v = self._u(), self.inputs
        assert v is not None
        rounded = coarse(u)
        slack = above(3) * (1 + 1.01 * TF32 if rounded else 1.0)
        lengths = above(u.shape[1]), above(v.shape[1])
        self.grads, self.inputs, *norms = kernels.row_pair(u, v, (*lengths, slack), rounded=rounded)
        self._pair = norms[0], norms[1]

    def _by_tokens(self, tensor: Tensor) -> Tensor:
        """As ``(N, T, d)``, or ``(N, d)`` where each example has one token."""
        shape = tensor.shape
        if len(shape) == 2 and shape[0] == self.examples:
            return tensor
        if shape[:-1].numel() != self.examples:
            whole = len(shape) == 3 and shape[0] == self.examples
            return tensor if whole else tensor.reshape(self.examples, -1, shape[-1])
        return tensor.reshape(self.examples, shape[-1])

    @property
    def briefly(self) -> bool:
        u, v = self.grads, self.inputs
        tokens = u is not None and v is not None and u.dim() == 3
        return tokens and not instantiating_pays(u.shape[1], u.shape[2], v.shape[2])  # type: ignore[union-attr]

    def measure(self, wanted: set[int]) -> list[Report]:
        u, v = self._u(), self.inputs
        weight = self.weight if self.weight is not None and id(self.weight) in wanted else None
        bias = self.bias if self.bias is not None and id(self.bias) in wanted else None
        result = []
        if self._pair is not None:
            both = zip((bias, weight), self._pair, strict=True)
            return [Report(id(p), Kind.NORM, value) for p, value in both if p is not None]
        if u.dim() == 2:
            out = row_norm(u)
            if bias is not None:
                result.append(Report(id(bias), Kind.NORM, out))
            if weight is not None and v is not None:
                product = row_norm(v).mul_(out).mul_(above(1))
                norms = Size(product, product).rounded().norm if coarse(u) else product
                result.append(Report(id(weight), Kind.NORM, norms))
            return result
        if weight is not None and v is not None:
            size, self._products = product_size(u, v)
            if size is None:
                result.append(Report(id(weight), Kind.NORM, row_norm(self._formed())))
            else:
                self._terms = size.terms
                norms = size.rounded().norm if coarse(u) else size.norm
                result.append(Report(id(weight), Kind.NORM, norms))
        if bias is not None:
            result.append(Report(id(bias), Kind.ROWS, self._per_example_bias()))
        if self._products is not None and (self.bias is None or self._totals is not None):
            self.inputs = self.grads = None  # the products replace them
        return result

    def _rows_summed(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of both parameters of one token, kept for the one that is asked for next."""
        if self._summed is None or self._summed[0] is not factors:
            u, v = self._u(), self.inputs
            assert v is not None
            # where launching takes longer than multiplying, float64 is as fast
            few = u.numel() * v.shape[1] <= _FEW
            double = few or factors.dtype is torch.float64
            sums = products.of_rows(u, v, factors, double=double, rounded=coarse(u))
            self._summed = factors, sums
        return self._summed[1]

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        if self._pair is not None:
            return self._rows_summed(factors)[param is not self.weight]
        if param is self.weight:
            if self._products is not None:
                return weighted(factors, self._products)
            assert self.inputs is not None
            return product_weighted(self._u(), self.inputs, factors)
        return weighted(factors, self._per_example_bias())

    def add_weighted(
        self, total: Tensor, param: nn.Parameter, factors: Tensor, scale: float
    ) -> None:
        u, v = self.grads, self.inputs
        if u is None or not u.dtype == factors.dtype == total.dtype:
            super().add_weighted(total, param, factors, scale)
        elif param is not self.weight:
            total.addmv_(self._per_example_bias().t(), factors, alpha=scale)
        elif v is None or self._products is not None:
            super().add_weighted(total, param, factors, scale)
        else:
            add_product_weighted(total, u, v, factors, scale)

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        if self._pair is not None:
            place = int(param is not self.weight)
            return [(WHOLE, Known(lambda: self._rows_summed(factors)[place], self.examples))]
        if param is not self.weight:
            rows, product = self._per_example_bias(), self._product
            self._product = None
            if product is not None and product.wide is rows and product.factors is factors:
                return [(WHOLE, Column(rows, factors, product))]
            return [(WHOLE, Rows(rows, factors))]
        if self._products is not None:
            return [(WHOLE, Rows(self._products, factors))]
        assert self.inputs is not None
        if serves(self._u(), self.inputs):
            return [(WHOLE, DeviceProduct(self._u(), self.inputs, factors, self._terms))]
        product = Product(self._u(), self.inputs, factors, self._terms)
        if self.bias is not None:
            self._product = product
        return [(WHOLE, product)]

    def purge(self, keep: Tensor) -> None:
        u, v = self.grads, self.inputs
        narrow = None
        if self._pair is not None:
            return  # rows with factor zero are not read
        if u is not None and v is not None and serves(u, v):  # zero where it is scaled
            narrow = "grads" if u.shape[2] <= v.shape[2] else "inputs"
        if narrow == "grads" and self.bias is not None and self._totals is None:
            narrow = None
        for name in self.heavy:
            tensor = getattr(self, name)
            if tensor is not None and name not in (narrow, "_terms"):
                setattr(self, name, kept_rows(tensor, keep))

    def release(self) -> None:
        super().release()
        self._summed = None

    def instantiate(self, param: nn.Parameter) -> Tensor:
        if param is not self.weight:
            return self._per_example_bias().double()
        if self._products is not None:
            return self._products.double()
        u, v = self._factors()
        return torch.bmm(u.double().mT, v.double())

    def bulk(self, param: nn.Parameter) -> Tensor:
        if param is not self.weight:
            return row_norm(self._per_example_bias())
        if self._products is not None:
            return row_norm(self._products)
        return Factor(*self._factors()).bulk()

    def factor(self, param: nn.Parameter) -> Factor | None:
        if param is not self.weight or self.inputs is None:
            return None
        return Factor(*self._factors())

    def _formed(self) -> Tensor:
        assert self._products is not None
        return self._products

    def _u(self) -> Tensor:
        assert self.grads is not None
        return self.grads

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Output gradients and inputs as ``(N, T, *)``."""
        u, v = self._u(), self.inputs
        assert v is not None
        return (u.unsqueeze(1), v.unsqueeze(1)) if u.dim() == 2 else (u, v)

    def _per_example_bias(self) -> Tensor:
        if self._totals is None:
            u = self._u()
            self._totals = u if u.dim() == 2 else u.sum(1, dtype=upcast(u[:0]).dtype)
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
            f"{place(path)} got an input of shape {tuple(x.shape)}; expected (examples, ..., "
            f"{weight.shape[1]}): add the example dimension in front"
        )
    if x.is_cuda and x.dtype is torch.float32 and torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))  # as the product would: what is kept is smaller
    fixed, shift = weight.detach(), None if bias is None else bias.detach()
    rooted = not x.requires_grad
    if rooted:
        (fixed if shift is None else shift).requires_grad_()
    out = F.linear(x, fixed, shift)
    return tape.watch_op(LinearPiece(path, trained(weight), trained(bias), x), out, rooted)


def forward_of(module: nn.Linear, tape: Tape, path: str) -> Callable[..., Tensor]:
    """The forward that replaces ``module.forward`` while the engine is attached."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if self is not module or not tape.recording() or input.shape[0] == 0:
            return nn.Linear.forward(self, input)
        return linear(tape, path, input, cast(nn.Parameter, self.weight), self.bias)

    return forward

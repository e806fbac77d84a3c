"""``nn.Conv1d/2d/3d``: stride, every padding mode, dilation and groups.

The clipped sum is an ordinary convolution weight gradient with the output gradient of example i
scaled by ``c_i``: one kernel, no unfolding. The norms come from one of

* the per-example weight gradients, as ONE convolution weight gradient in which the examples are
  turned into groups of channels (``N`` times the groups), or as one batched matrix product with
  the unfolded input; these are kept, and their weighted sum replaces the kernel above;
* Gram matrices of the unfolded input ``(N, T, K)`` and the output gradient ``(N, T, C_out)``,
  where the weight is large beside the number T of output positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.contract import (
    Factor,
    gram_square_norm,
    spread,
    square_norm,
    upcast,
    weighted,
)
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.tape import Piece, Tape, kept_rows, trained

ConvNd = nn.Conv1d | nn.Conv2d | nn.Conv3d
# Per-example gradients may take this many times the memory of the unfolded input and gradients.
_MEMORY = 2.0
# From this many channels in and out a batched matrix product beats grouped kernels on a CPU.
_WIDE = 64
# Most entries of an unfolded input.
_UNFOLDED = 1 << 27


def instantiating_pays(positions: int, weight: Tensor, groups: int) -> bool:
    """Whether per-example weight gradients are cheaper than Gram matrices."""
    width = weight.shape[0] + weight[0].numel() * groups
    return groups > 1 or weight.numel() <= _MEMORY * positions * width


class ConvPiece(Piece):
    """One application of a convolution; a frozen weight or bias is passed as None."""

    def __init__(
        self,
        path: str,
        module: ConvNd,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        inputs: Tensor,
    ) -> None:
        super().__init__(path, (weight, bias), inputs.shape[0])
        self.module, self.weight, self.bias = module, weight, bias
        self.inputs = self.save(inputs) if weight is not None else None
        self.padding: list[int] = []
        self.grads: Tensor | None = None
        self._kept: Tensor | None = None
        self._totals: Tensor | None = None

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        self.grads = upcast(grad)
        if self.inputs is not None:
            self.inputs, self.padding = _padded(self.module, upcast(self.inputs))
        return True

    def square_norms(self, wanted: Callable[[nn.Parameter], bool]) -> list[tuple[int, Tensor]]:
        grads = self._b()
        result = []
        if self.weight is not None and wanted(self.weight):
            positions = grads[0, 0].numel()
            if instantiating_pays(positions, self.weight, self.module.groups):
                self._kept = self._per_example_weight()
                result.append((id(self.weight), square_norm(self._kept)))
            else:
                factor = self.factor(self.weight)
                assert factor is not None
                result.append((id(self.weight), gram_square_norm(factor.rows, factor.cols)))
        if self.bias is not None and wanted(self.bias):
            result.append((id(self.bias), square_norm(self._per_example_bias())))
        if self._kept is not None and (self.bias is None or self._totals is not None):
            self.inputs = self.grads = None
        return result

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        if param is not self.weight:
            return weighted(factors, self._per_example_bias())
        if self._kept is not None:
            return weighted(factors, self._kept)
        grads = self._b()
        return self._weight_gradient(
            grads * spread(factors, grads), self._x(), param.detach(), self.module.groups
        )

    def instantiate(self, param: nn.Parameter) -> Tensor:
        if param is not self.weight:
            return self._per_example_bias()
        return self._kept if self._kept is not None else self._per_example_weight()

    def factor(self, param: nn.Parameter) -> Factor | None:
        if param is not self.weight or self.module.groups > 1 or self.inputs is None:
            return None
        return Factor(self._b().flatten(2).mT, self._unfolded().mT)

    def purge(self, keep: Tensor) -> None:
        for name in ("inputs", "grads", "_kept", "_totals"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, kept_rows(tensor, keep))

    def _b(self) -> Tensor:
        assert self.grads is not None
        return self.grads

    def _x(self) -> Tensor:
        assert self.inputs is not None
        return self.inputs

    def _per_example_bias(self) -> Tensor:
        if self._totals is None:
            self._totals = self._b().flatten(2).sum(2)
        return self._totals

    def _per_example_weight(self) -> Tensor:
        """Examples as groups: channels ``N C`` and a weight of ``N C_out`` filters."""
        x, grads, examples = self._x(), self._b(), self.examples
        assert self.weight is not None
        shape = self.weight.shape
        if self._by_matrices(shape):
            product = torch.bmm(grads.flatten(2), self._unfolded().mT)
            return product.view(examples, *shape)
        filters = grads.new_empty(examples * shape[0], *shape[1:])  # only its shape matters
        full = self._weight_gradient(
            grads.reshape(1, -1, *grads.shape[2:]),
            x.reshape(1, -1, *x.shape[2:]),
            filters,
            examples * self.module.groups,
        )
        return full.view(examples, *shape)

    def _by_matrices(self, shape: torch.Size) -> bool:
        """Whether a batched matrix product is the faster way to per-example gradients."""
        if self.module.groups > 1:
            return False
        if self._b().device.type == "cpu":
            return min(shape[0], shape[1]) >= _WIDE
        return self._b().numel() // shape[0] * shape[1:].numel() <= _UNFOLDED

    def _weight_gradient(self, grads: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        module = self.module
        result: Any = torch.ops.aten.convolution_backward(
            grads,
            x,
            weight.to(grads.dtype),
            None,
            list(module.stride),
            self.padding,
            list(module.dilation),
            False,
            [0] * len(self.padding),
            groups,
            [False, True, False],
        )
        total: Tensor = result[1]
        return total

    def _unfolded(self) -> Tensor:
        """The input patches ``(N, C_in k_1 ... k_n, T)``, in the order of the weight."""
        module, x = self.module, self._x()
        spatial = len(self.padding)
        if any(self.padding):
            sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
            x = F.pad(x, sides)
        for axis in range(spatial):
            step = module.dilation[axis]
            span = (module.kernel_size[axis] - 1) * step + 1
            x = x.unfold(2 + axis, span, module.stride[axis])
            x = x[..., ::step]
        order = [0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial)]
        positions = x.shape[2 : 2 + spatial].numel()
        return x.permute(order).reshape(self.examples, -1, positions)


def _padded(module: ConvNd, x: Tensor) -> tuple[Tensor, list[int]]:
    """The input with unusual padding applied, and the zero padding left for the kernel."""
    spatial = len(module.kernel_size)
    sides = list(module._reversed_padding_repeated_twice)
    if module.padding_mode != "zeros":
        return F.pad(x, sides, mode=module.padding_mode), [0] * spatial
    if all(sides[2 * axis] == sides[2 * axis + 1] for axis in range(spatial)):
        return x, [sides[2 * axis] for axis in reversed(range(spatial))]
    return F.pad(x, sides), [0] * spatial


def forward_of(module: ConvNd, tape: Tape, path: str) -> Callable[..., Tensor]:
    """The forward that replaces ``module.forward`` while the engine is attached."""
    original = type(module).forward
    dims = module.weight.dim()

    def forward(self: ConvNd, input: Tensor) -> Tensor:
        if self is not module or not tape.recording() or input.shape[0] == 0:
            out: Tensor = original(self, input)  # type: ignore[arg-type]
            return out
        if input.dim() != dims:
            raise EngineError(
                f"'{path}' got an input of shape {tuple(input.shape)}; expected (examples, "
                f"{module.in_channels}, ...) with {dims} dimensions: add the example dimension"
            )
        frozen = None if module.bias is None else module.bias.detach()
        out = module._conv_forward(input, module.weight.detach(), frozen)
        out = tape.attach(out)
        piece = ConvPiece(path, module, trained(module.weight), trained(module.bias), input)
        tape.watch(piece, out)
        return out

    return forward

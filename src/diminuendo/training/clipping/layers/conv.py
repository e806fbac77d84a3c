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

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.contract import (
    Factor,
    gram_square_norm,
    rounding,
    row_norm,
    spread,
    upcast,
    weighted,
)
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.tape import Kind, Piece, Report, Tape, trained

ConvNd = nn.Conv1d | nn.Conv2d | nn.Conv3d
# Per-example gradients may take this many times the memory of the unfolded input and gradients.
_MEMORY = 2.0
# From this many channels in and out a batched matrix product beats grouped kernels on a CPU.
_WIDE = 64
# Most entries of an unfolded input for which a batched matrix product is used on a GPU.
_UNFOLDED = 1 << 27
# Most entries of the unfolded input, or of gradients that are not kept, held at a time.
_BLOCK = 1 << 25


def instantiating_pays(positions: int, weight: Tensor, groups: int) -> bool:
    """Whether per-example weight gradients are cheaper than Gram matrices."""
    width = weight.shape[0] + weight[0].numel() * groups
    return groups > 1 or weight.numel() <= _MEMORY * positions * width


def keeping_pays(examples: int, weight: Tensor, held: int, device: torch.device) -> bool:
    """Whether to keep per-example gradients rather than the ``held`` entries they come from.

    Kept gradients save a kernel for the sum. On a CPU that decides; on a GPU, where memory is
    what limits the batch, they must also be no larger than the input and output gradient.
    """
    return device.type == "cpu" or examples * weight.numel() <= held


class ConvPiece(Piece):
    """One application of a convolution; a frozen weight or bias is passed as None."""

    heavy = ("inputs", "grads", "_kept", "_totals")

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

    def measure(self, wanted: set[int]) -> list[Report]:
        grads = self._b()
        result = []
        if self.weight is not None and id(self.weight) in wanted:
            weight, key, x = self.weight, id(self.weight), self._x()
            if not instantiating_pays(grads.shape[2:].numel(), weight, self.module.groups):
                result.append(Report(key, Kind.SQUARE, self._gram_square_norm()))
            elif keeping_pays(self.examples, weight, grads.numel() + x.numel(), grads.device):
                self._kept = self._per_example_weight()
                result.append(Report(key, Kind.ROWS, self._kept))
            else:
                result.append(Report(key, Kind.NORM, self._passing_norm()))
        if self.bias is not None and id(self.bias) in wanted:
            result.append(Report(id(self.bias), Kind.ROWS, self._per_example_bias()))
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
        return Factor(self._b().flatten(2).mT, self._unfolded(self._x()).mT)

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

    def _blocks(self, entries: int) -> list[tuple[Tensor, Tensor]]:
        """Output gradients and inputs in blocks of examples that need ``entries`` each."""
        x, grads = self._x(), self._b()
        block = max(1, _BLOCK // max(1, entries))
        if block >= self.examples:
            return [(grads, x)]
        return list(zip(torch.split(grads, block), torch.split(x, block), strict=True))

    def _gram_square_norm(self) -> Tensor:
        assert self.weight is not None
        unfolded = self.weight.shape[1:].numel() * self._b().shape[2:].numel()
        parts = [
            gram_square_norm(grads.flatten(2).mT, self._unfolded(x).mT, convolved=True)
            for grads, x in self._blocks(unfolded)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _passing_norm(self) -> Tensor:
        """Norms of the per-example weight gradients, which are not kept."""
        assert self.weight is not None
        shape = self.weight.shape
        by_matrices = self._by_matrices(shape)
        unfolded = shape[1:].numel() * self._b().shape[2:].numel()
        entries = max(shape.numel(), unfolded) if by_matrices else shape.numel()
        parts = []
        for grads, x in self._blocks(entries):
            if by_matrices:
                rows = torch.bmm(grads.flatten(2), self._unfolded(x).mT)
            else:
                rows = self._grouped(grads, x, shape)
            largest = row_norm(grads) * row_norm(x) * math.sqrt(shape[2:].numel())
            slack = rounding(grads, grads.shape[2:].numel(), True)  # the sum is rounded otherwise
            parts.append(row_norm(rows).add_(largest, alpha=slack))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _per_example_weight(self) -> Tensor:
        """The gradients ``(N, *weight.shape)``."""
        x, grads, examples = self._x(), self._b(), self.examples
        assert self.weight is not None
        shape = self.weight.shape
        if not self._by_matrices(shape):
            return self._grouped(grads, x, shape)
        blocks = self._blocks(shape[1:].numel() * grads.shape[2:].numel())
        if len(blocks) == 1:
            return torch.bmm(grads.flatten(2), self._unfolded(x).mT).view(examples, *shape)
        full = grads.new_empty(examples, shape[0], shape[1:].numel())
        start = 0
        for part, inputs in blocks:
            stop = start + part.shape[0]
            torch.bmm(part.flatten(2), self._unfolded(inputs).mT, out=full[start:stop])
            start = stop
        return full.view(examples, *shape)

    def _grouped(self, grads: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Examples as groups: channels ``N C`` and a weight of ``N C_out`` filters."""
        examples = grads.shape[0]
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

    def _unfolded(self, x: Tensor) -> Tensor:
        """The input patches ``(N, C_in k_1 ... k_n, T)``, in the order of the weight."""
        module, examples = self.module, x.shape[0]
        spatial = len(self.padding)
        if any(self.padding):
            sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
            x = F.pad(x, sides)
        for axis in range(spatial):
            step = module.dilation[axis]
            span = (module.kernel_size[axis] - 1) * step + 1
            x = x.unfold(2 + axis, span, module.stride[axis])
            x = x[..., ::step] if step > 1 else x
        order = [0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial)]
        positions = x.shape[2 : 2 + spatial].numel()
        return x.permute(order).reshape(examples, -1, positions)


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
        weight, bias = module.weight, module.bias
        fixed, shift = weight.detach(), None if bias is None else bias.detach()
        rooted = not input.requires_grad
        if rooted:
            fixed.requires_grad_()
        out = module._conv_forward(input, fixed, shift)
        piece = ConvPiece(path, module, trained(weight), trained(bias), input)
        return tape.watch_op(piece, out, rooted)

    return forward

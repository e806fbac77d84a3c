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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping import device, kernels
from diminuendo.training.clipping.contract import (
    LOOSE,
    Factor,
    Size,
    gram_size,
    joined,
    scaled,
    spread,
    upcast,
    weighted,
)
from diminuendo.training.clipping.device import DeviceConvolved
from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.rounding import (
    DOUBLE,
    cancelled,
    coarse,
    gamma,
    row_norm,
    smallest,
    to_tf32,
    unit,
)
from diminuendo.training.clipping.sums import Rows, Term
from diminuendo.training.clipping.tape import WHOLE, Kind, Piece, Report, Tape, trained

ConvNd = nn.Conv1d | nn.Conv2d | nn.Conv3d
# Per-example gradients may take this many times the memory of the unfolded input and gradients.
_MEMORY = 2.0
# Grouped kernels of a CPU's convolution library take channels by so many; for other numbers of
# channels it has none that is fast, and a batched matrix product takes a fraction of the time.
_CHANNELS = 8
# Most entries of an unfolded input for which a batched matrix product is used on a GPU.
_UNFOLDED = 1 << 27
# Most entries of the unfolded input, or of gradients that are not kept, held at a time; on a CPU
# what is freed and taken again without asking the kernel for new pages.
_BLOCK, _BLOCK_CPU = 1 << 25, 1 << 22
# Entries of an unfolded input in float64 held at a time.
_PRECISE = 1 << 22
# A convolution is summed quickly and checked if its groups have more filters; else precisely.
_NARROW = 24
# What a convolution in float64 is taken to be off by, relative to the sizes of its terms.
_CONVOLVED = 2.0**-36


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

    heavy = ("inputs", "grads", "_kept", "_totals", "_terms")

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
        self._terms: Tensor | None = None

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        self.grads = upcast(grad)
        self.tokens = grad.shape[2:].numel()
        if self.inputs is not None:
            self.inputs, self.padding = _padded(self.module, upcast(self.inputs))
        return True

    def measure(self, wanted: set[int]) -> list[Report]:
        grads = self._b()
        result = []
        if self.weight is not None and id(self.weight) in wanted:
            weight, key, x = self.weight, id(self.weight), self._x()
            by_gram = not instantiating_pays(grads.shape[2:].numel(), weight, self.module.groups)
            held = grads.numel() + x.numel()
            if not by_gram and keeping_pays(self.examples, weight, held, grads.device):
                self._kept = self._per_example_weight()
                result.append(Report(key, Kind.ROWS, self._kept))
            else:
                rounded = self._round()
                size = self._gram_size() if by_gram else self._passing_size()
                self._terms = size.terms
                norms = size.rounded().norm if rounded else size.norm
                result.append(Report(key, Kind.NORM, norms))
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
        return self.weight_gradient(
            scaled(grads, factors), self._x(), param.detach(), self.module.groups
        )

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        if param is not self.weight:
            return [(WHOLE, Rows(self._per_example_bias(), factors))]
        if self._kept is not None:
            return [(WHOLE, Rows(self._kept, factors))]
        if device.serves_convolutions(self._b(), self._x(), self.module.groups):
            return [(WHOLE, DeviceConvolved(self, self._b(), self._x(), factors, self._terms))]
        return [(WHOLE, _Convolved(self, self._b(), self._x(), factors, self._terms))]

    def instantiate(self, param: nn.Parameter) -> Tensor:
        if param is not self.weight:
            return self._per_example_bias().double()
        if self._kept is not None:
            return self._kept.double()
        self._round()
        parts = [self.formed(grads.double(), x.double()) for grads, x in self._blocks(0)]
        return torch.cat(parts).view(self.examples, *param.shape)

    def bulk(self, param: nn.Parameter) -> Tensor:
        if param is not self.weight:
            return row_norm(self._per_example_bias())
        if self._kept is not None:
            return row_norm(self._kept)
        return self._bulk(self._b(), self._x())

    def _bulk(self, grads: Tensor, x: Tensor) -> Tensor:
        """At least ``sum_t ||u_t|| ||v_t||``, by Cauchy and Schwarz."""
        taps = math.prod(self.module.kernel_size)
        return row_norm(grads).mul_(row_norm(x)).mul_(math.sqrt(taps) * 1.0001)

    def _round(self) -> bool:
        """Round what a GPU convolves in TF32, so that it has nothing left to round."""
        if not coarse(self._b(), convolved=True):
            return False
        self.grads, self.inputs = to_tf32(self._b()), to_tf32(self._x())
        return True

    def factor(self, param: nn.Parameter) -> Factor | None:
        if param is not self.weight or self.module.groups > 1 or self.inputs is None:
            return None
        self._round()
        return Factor(self._b().flatten(2).mT, self.unfolded(self._x()).mT)

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
        """Output gradients and inputs in blocks of examples that need ``entries`` each, and no
        less than their unfolded input."""
        assert self.weight is not None
        unfolded = self.weight.shape[1:].numel() * self.module.groups * self._b().shape[2:].numel()
        entries = max(entries, unfolded)
        x, grads = self._x(), self._b()
        most = _BLOCK if x.is_cuda else _BLOCK_CPU
        block = max(1, most // max(1, entries))
        if block >= self.examples:
            return [(grads, x)]
        return list(zip(torch.split(grads, block), torch.split(x, block), strict=True))

    def _gram_size(self) -> Size:
        return joined(
            [gram_size(grads.flatten(2).mT, self.unfolded(x).mT) for grads, x in self._blocks(0)]
        )

    def _passing_size(self) -> Size:
        """Sizes of the per-example weight gradients, which are not kept.

        They are formed by matrix products, of which an error bound is known, whatever kernel
        convolves faster.
        """
        assert self.weight is not None
        parts = []
        for grads, x in self._blocks(self.weight.numel()):
            positions = grads.shape[2:].numel()
            if gamma(positions + 2, unit(grads)) > LOOSE:
                rows = self.formed(grads.double(), x.double())
            else:
                rows = self.formed(grads, x)
            terms = self._bulk(grads, x)
            norms = row_norm(rows).add_(terms, alpha=gamma(positions + 2, unit(rows)))
            norms.add_(3 * smallest(rows) * positions * math.sqrt(self.weight.numel()))
            norms = torch.where(terms == 0, 0.0, norms.maximum(terms / cancelled(x)))
            parts.append(Size(norms, terms))
        return joined(parts)

    def formed(self, grads: Tensor, x: Tensor) -> Tensor:
        """Per-example weight gradients ``(n, rows, entries of a row)`` by matrix products."""
        groups, examples = self.module.groups, x.shape[0]
        u = grads.reshape(examples * groups, grads.shape[1] // groups, -1)
        v = self.unfolded(x).view(examples * groups, -1, u.shape[2])
        return torch.bmm(u, v.mT).view(examples, grads.shape[1], -1)

    def _per_example_weight(self) -> Tensor:
        """The gradients ``(N, *weight.shape)``."""
        x, grads, examples = self._x(), self._b(), self.examples
        assert self.weight is not None
        shape = self.weight.shape
        if not self._by_matrices(shape):
            return self._grouped(grads, x, shape)
        blocks = self._blocks(0)
        if len(blocks) == 1:
            return torch.bmm(grads.flatten(2), self.unfolded(x).mT).view(examples, *shape)
        full = grads.new_empty(examples, shape[0], shape[1:].numel())
        start = 0
        for part, inputs in blocks:
            stop = start + part.shape[0]
            torch.bmm(part.flatten(2), self.unfolded(inputs).mT, out=full[start:stop])
            start = stop
        return full.view(examples, *shape)

    def _grouped(self, grads: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """Examples as groups: channels ``N C`` and a weight of ``N C_out`` filters."""
        examples = grads.shape[0]
        filters = grads.new_empty(examples * shape[0], *shape[1:])  # only its shape matters
        full = self.weight_gradient(
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
            blocked = shape[0] % _CHANNELS == 0 and shape[1] % _CHANNELS == 0
            return not blocked or shape[2:].numel() == 1
        return self._b().numel() // shape[0] * shape[1:].numel() <= _UNFOLDED

    def weight_gradient(self, grads: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
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

    def unfolded(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """The input patches ``(N, C_in k_1 ... k_n, T)``, in the order of the weight; where
        ``skip`` is true on a GPU, memory that holds anything."""
        module, examples = self.module, x.shape[0]
        spatial = len(self.padding)
        if spatial == 2 and kernels.serves(x):
            sizes = module.kernel_size, module.stride, self.padding, module.dilation
            return kernels.unfold(x, kernels.Window(*[cast(Any, tuple(s)) for s in sizes]), skip)
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


class _Convolved(Term):
    """Output gradients and inputs whose convolution weight gradients are added up.

    Where a GPU convolves in TF32, both have been rounded, and the scaled gradients are too.
    """

    def __init__(
        self, piece: ConvPiece, grads: Tensor, x: Tensor, factors: Tensor, terms: Tensor | None
    ) -> None:
        self.piece, self.x, self.terms, self.cancelled = piece, x, terms, cancelled(x)
        self.groups = piece.module.groups
        self.grads, self.factors = grads, factors
        if coarse(grads, convolved=True):
            self.grads = to_tf32(grads * spread(factors.to(grads.dtype), grads))
            self.factors = torch.ones_like(factors)
        self.filters = grads.shape[1] // self.groups
        self.checked = self.filters > _NARROW and grads.dtype is not torch.float64
        positions = grads.shape[2:].numel()
        self.block = max(1, _PRECISE // max(1, positions * piece.module.weight[0].numel()))
        added = min(self.block, piece.examples) * positions + piece.examples // self.block
        self.error = DOUBLE * (added + 8)

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Scaled gradients and inputs in float64, in blocks of examples."""
        parts = [torch.split(part, self.block) for part in (self.grads, self.x, self.factors)]
        for grads, x, factors in zip(*parts, strict=True):
            yield grads.double().mul_(spread(factors, grads)), x.double()

    def precise(self) -> Tensor:
        shape, total = self.piece.module.weight.shape, None
        for grads, x in self._blocks():
            sides = [
                side.reshape(x.shape[0], self.groups, side.shape[1] // self.groups, -1)
                .transpose(0, 1)
                .transpose(1, 2)
                .flatten(2)
                for side in (grads, self.piece.unfolded(x))
            ]
            part = torch.bmm(sides[0], sides[1].mT)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.view(shape)

    def quick(self) -> Tensor:
        scaled = self.grads * spread(self.factors.to(self.grads.dtype), self.grads)
        return self.piece.weight_gradient(
            scaled, self.x, self.piece.module.weight.detach(), self.groups
        )

    def probes(self) -> int:
        return self.filters

    def probe_error(self) -> float:
        return _CONVOLVED + 3 * DOUBLE * self.filters

    def probe(self, total: Tensor, vectors: Tensor) -> Tensor:
        count = vectors.shape[1]
        ours = total.double().reshape(self.groups, self.filters, -1)
        sketch = torch.matmul(vectors.t(), ours)
        filters = vectors.new_empty(self.groups * count, *total.shape[1:])  # only its shape matters
        for grads, x in self._blocks():
            split = grads.reshape(len(grads), self.groups, self.filters, -1)
            mixed = torch.matmul(vectors.t(), split).reshape(len(grads), -1, *grads.shape[2:])
            part = self.piece.weight_gradient(mixed, x, filters, self.groups)
            sketch.sub_(part.reshape(sketch.shape))
        return sketch.square_().sum()


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
                f"{place(path)} got an input of shape {tuple(input.shape)}; expected (examples, "
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

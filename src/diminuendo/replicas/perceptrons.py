"""Replicas of a multilayer perceptron: batched matrix products throughout, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from diminuendo.replicas import kernels
from diminuendo.replicas.batch import (
    Batch,
    Data,
    Loss,
    Part,
    Result,
    Update,
    clip_factors,
    cross_entropy,
)
from diminuendo.replicas.layers import Layer
from diminuendo.training.cores import side_by_side
from diminuendo.training.memory import keep_freed


class _Examples(NamedTuple):
    """A block of examples for some replicas."""

    x: Tensor
    y: Tensor
    lengths: Tensor


class FlatData(Data):
    """Flat inputs times the first layer's factors, with a column of ones where it has a bias, and
    their norms."""

    def __init__(self, x: Tensor, y: Tensor, indices: Sequence[int], first: Layer) -> None:
        x = x.flatten(2)
        if first.factors:
            x = x * x.new_tensor(first.factors)
        if first.bias:
            x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
        super().__init__(x, y, indices)
        self._lengths = _length(self.x)
        self._cache: dict[tuple[int, int, int], _Examples] = {}

    def some(self, rows: slice, block: slice) -> _Examples:
        """These examples for these replicas. Cached, since slicing takes its time too."""
        key = rows.start, rows.stop, block.start
        examples = self._cache.get(key)
        if examples is None:
            if len(self._cache) > 10_000:
                self._cache.clear()
            lengths = self._lengths[:, block].expand(self.replicas, -1)[rows]
            examples = _Examples(self.inputs(rows, block), self.targets(rows, block), lengths)
            self._cache[key] = examples
        return examples


class _Map(NamedTuple):
    """One layer's matrix as (in, out), its transpose, and its bias where that is stored apart."""

    matrix: Tensor
    transposed: Tensor
    bias: Tensor | None


class _Buffers:
    """Memory for one piece: every layer's outputs and the derivatives with respect to them."""

    def __init__(self, layers: Sequence[Layer], rises: Sequence[bool], like: Tensor) -> None:
        self.like = like
        upright = [up or like.is_cuda for up in rises]
        ahead = [(layer.fan_out, up) for layer, up in zip(layers, upright, strict=True)]
        self._shapes, self._layers = [*ahead, *ahead[:-1]], len(layers)
        self._views: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self.store: list[Tensor] = []

    def views(self, replicas: int, examples: int) -> tuple[list[Tensor], list[Tensor]]:
        """(replicas, examples, width): outputs of each layer, derivatives of each but the last."""
        key = replicas, examples
        if key not in self._views:
            entries = replicas * examples
            if not self.store or entries * self._shapes[0][0] > len(self.store[0]):
                self.store = [self.like.new_empty(entries * width) for width, _ in self._shapes]
                self._views.clear()
            views = []
            for part, (width, upright) in zip(self.store, self._shapes, strict=True):
                part = part[: entries * width]
                turned = part.view(replicas, -1, examples).mT
                views.append(part.view(*key, -1) if upright else turned)
            self._views[key] = views[: self._layers], views[self._layers :]
        return self._views[key]


class Perceptrons(Batch):
    """Linear layers as batched matrix products; norms from activations and output gradients.

    For one linear layer an example's gradient is g aᵀ, so its norm is ‖a‖‖g‖, and the clipped sum
    is one product with the factors folded into the narrower of a and g. The input carries a column
    of ones for the first layer's bias. Matrices are stored with their shorter side first, and so
    are, on a CPU, the outputs of layers that narrow: matrix products are fastest in this layout.

    `piece` is how many replicas and examples are computed at a time: one piece for each core.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        replicas: int,
        loss: Loss,
        piece: tuple[int, int],
        like: Tensor,
    ) -> None:
        keep_freed()
        self.layers, self.loss, self.like = tuple(layers), loss, like
        self.rises = [layer.fan_in + (i == 0) <= layer.fan_out for i, layer in enumerate(layers)]
        stored = []
        for i, (layer, rises) in enumerate(zip(layers, self.rises, strict=True)):
            ins, outs = layer.fan_in + (layer.bias and i == 0), layer.fan_out
            if rises and i == 0 and like.is_cuda:  # as `kernels.rectified_product` needs it
                stored.append(like.new_zeros(ins, replicas, outs).transpose(0, 1))
            else:
                shape = (replicas, ins, outs) if rises else (replicas, outs, ins)
                stored.append(like.new_zeros(shape))
            if layer.bias and i > 0:
                stored.append(like.new_zeros(replicas, 1, outs))
        self.together, block = piece
        super().__init__(stored, sum(x.fan_out * (x.fan_in + x.bias) for x in layers), block)
        self._map_cache: dict[tuple[int, int], tuple[list[_Map], list[_Map]]] = {}
        self._free: list[_Buffers] = []

    def each(self, rows: slice, call: Callable[[slice, slice], Result]) -> list[Result]:
        """`Batch.each` with pieces of at most `together` rows, about equal; in threads on a CPU."""
        count = rows.stop - rows.start
        number = -(-count // self.together)
        threaded = number > 1 and not self.like.is_cuda
        if threaded:
            threads = torch.get_num_threads()
            number = min(count, -(-number // threads) * threads)
        ends = [count * i // number for i in range(number + 1)]

        def one(i: int) -> Result:
            start, stop = ends[i], ends[i + 1]
            return call(slice(rows.start + start, rows.start + stop), slice(start, stop))

        return side_by_side(one, number) if threaded else [one(i) for i in range(number)]

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that pieces have used so far, for a CUDA graph to keep alive."""
        return [part for buffers in self._free for part in buffers.store]

    @contextmanager
    def _borrowed(self) -> Iterator[_Buffers]:
        """Buffers for one piece, free again afterwards."""
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = _Buffers(self.layers, self.rises, self.like)
        yield buffers
        self._free.append(buffers)

    def data(self, x: Tensor, y: Tensor, indices: Sequence[int]) -> FlatData:
        """Stacked data sets, and the index of the one that each replica uses."""
        return FlatData(x, y, indices, self.layers[0])

    def _maps(self, stored: Sequence[Tensor]) -> Iterator[_Map]:
        left = iter(stored)
        for i, (layer, rises) in enumerate(zip(self.layers, self.rises, strict=True)):
            matrix = next(left)
            bias = next(left) if layer.bias and i > 0 else None
            yield _Map(matrix, matrix.mT, bias) if rises else _Map(matrix.mT, matrix, bias)

    def _views(self, rows: slice) -> tuple[list[_Map], list[_Map]]:
        """The maps of these rows' parameters and sums."""
        key = rows.start, rows.stop
        maps = self._map_cache.get(key)
        if maps is None:
            if len(self._map_cache) > 1000:
                self._map_cache.clear()
            maps = (
                list(self._maps([part[rows] for part in self.state])),
                list(self._maps([part[rows] for part in self.sums])),
            )
            self._map_cache[key] = maps
        return maps

    def parts(self, stored: Sequence[Tensor], flat: Tensor) -> Iterator[Part]:
        """Each layer's matrix, then its bias."""
        start, k = 0, flat.shape[0]
        for layer, (matrix, transposed, bias) in zip(self.layers, self._maps(stored), strict=True):
            ins, outs = layer.fan_in, layer.fan_out
            yield transposed[..., :ins], flat[:, start : start + ins * outs].view(k, outs, ins)
            start += ins * outs
            if layer.bias:
                own = matrix[:, ins] if bias is None else bias[:, 0]
                yield own, flat[:, start : start + outs]
                start += outs

    def _forward(
        self, inputs: Tensor, maps: Sequence[_Map], ahead: Sequence[Tensor]
    ) -> list[Tensor]:
        """The input of every layer, and the last one's output."""
        values = [inputs]
        for layer, own, out in zip(self.layers, maps, ahead, strict=True):
            if len(values) == 1 and layer.bias and kernels.serves_product(inputs, layer.activation):
                values.append(kernels.rectified_product(inputs[0], own.matrix, out))
                continue
            _product(values[-1], own.matrix, out)
            if own.bias is not None:
                out += own.bias
            if layer.activation:
                getattr(torch, f"{layer.activation}_")(out)
            values.append(out)
        return values

    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        """The last layer's outputs (k, n, classes)."""
        with self._borrowed() as buffers:
            ahead, _ = buffers.views(*inputs.shape[:2])
            return self._forward(inputs, self._views(rows)[0], ahead)[-1].clone()

    @torch.no_grad()
    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        """Forward and back through all layers, a block of examples at a time."""
        assert isinstance(data, FlatData)
        health = None
        maps, sums = self._views(rows)
        with self._borrowed() as buffers:
            for block in self.blocks(data):
                x, y, lengths = data.some(rows, block)
                ahead, back = buffers.views(*x.shape[:2])
                values = self._forward(x, maps, ahead)
                slopes, norms = self._backward(values, y, lengths, maps, back)
                sizes = torch.stack([norm.sum(1) for norm in norms]).sum(0)
                health = sizes if health is None else health + sizes
                factors = clip_factors(norms, update, block)
                for value, slope, total, own in zip(values, slopes, sums, factors, strict=False):
                    _add(total, value, slope, own)
        assert health is not None
        return health

    def _backward(
        self,
        values: Sequence[Tensor],
        y: Tensor,
        lengths: Tensor,
        maps: Sequence[_Map],
        back: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each layer's derivatives before its activation, and the norms of its gradients."""
        slope = _before_activation(
            self.layers[-1].activation, _slopes(self.loss, values[-1], y), values[-1]
        )
        slopes, own = [slope], _length(slope)
        norms: list[Tensor] = []
        for i in range(len(maps) - 1, 0, -1):
            (matrix, transposed, bias), out = maps[i], back[i - 1]
            activation = self.layers[i - 1].activation
            if kernels.serves_backward(values[i], matrix, activation):
                around, before = kernels.backward(slope, matrix, values[i], out)
            else:
                _product(slope, transposed, out)
                _before_activation(activation, out, values[i])
                around, before = _length(values[i]), _length(out)
            norm = around.mul_(own) if bias is None else torch.hypot(around.mul_(own), own)
            norms.insert(0, norm)
            slope, own = out, before
            slopes.insert(0, slope)
        return slopes, [own * lengths, *norms]


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """left·right into a buffer that may be stored transposed."""
    if out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:
        torch.bmm(right.mT, left.mT, out=out.mT)


def _add(total: _Map, value: Tensor, slope: Tensor, factors: Tensor) -> None:
    """Σ_i c_i a_i g_iᵀ into the matrix, and Σ_i c_i g_i into the bias."""
    if total.bias is not None:
        total.bias.baddbmm_(factors.unsqueeze(1), slope)
    if kernels.serves_sums(value, total.matrix):
        kernels.add_sums(slope, factors, value, total.transposed)
        return
    if value.shape[2] <= slope.shape[2]:
        value = value * factors.unsqueeze(2)
    else:
        turned = slope.mT
        slope = torch.mul(turned, factors.unsqueeze(1), out=turned.new_empty(turned.shape)).mT
    if total.matrix.stride(2) == 1:
        total.matrix.baddbmm_(value.mT, slope)
    else:
        total.transposed.baddbmm_(slope.mT, value)


def _slopes(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The derivatives of the losses with respect to the outputs (k, n, …)."""
    if loss is cross_entropy and targets.dim() == 2:
        # Along the short dimension of classes a CPU cannot use its vector instructions.
        slopes = torch.softmax(outputs, 2) if outputs.is_cuda else torch.softmax(outputs.mT, 1).mT
        labels = targets.unsqueeze(2)
        return slopes.scatter_add_(2, labels, slopes.new_full((1, 1, 1), -1.0).expand(labels.shape))
    with torch.enable_grad():
        leaf = outputs.detach().flatten(0, 1).requires_grad_()
        (slopes,) = torch.autograd.grad(loss(leaf, targets.flatten(0, 1)).sum(), leaf)
    return slopes.view(outputs.shape)


def _length(values: Tensor) -> Tensor:
    """Norms along the last dimension; PyTorch's own are slow on a CPU where it is not the inner."""
    if values.is_cuda or values.stride(2) == 1:
        norms: Tensor = torch.linalg.vector_norm(values, dim=2)
        return norms
    return values.mT.square().sum(1).sqrt_()


def _before_activation(activation: str, slope: Tensor, value: Tensor) -> Tensor:
    """The derivative before an activation, in place, from its output."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(slope, value, 0, grad_input=slope)
    elif activation == "tanh":
        slope.sub_(value.square().mul_(slope))
    elif activation == "sigmoid":
        slope.mul_(value).sub_(value * slope)
    return slope

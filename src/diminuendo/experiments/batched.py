"""K replicas of one model in one computation: private gradient descent on stacked parameters.

A `Batch` holds the parameters of its replicas as tensors whose first dimension is the replica, and
takes a step of Algorithm 1 for all of them at once: θ ← θ − η·φ(Σ_i c_i g_i + noise). Nothing of
size replicas × examples × parameters is ever made. Three kinds, from fast to general:

    Perceptrons   linear layers with elementwise activations: batched matrix products throughout
    Vmapped       whatever `torch.func` can map over replicas and examples, in bounded chunks
    OneByOne      the training engine for one replica after the other
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from diminuendo.experiments import kernels
from diminuendo.training.clipping import Engine, Flat

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of n examples → n losses."""
Part = tuple[Tensor, Tensor]
Map = tuple[Tensor, Tensor | None]


class Data:
    """Training sets of one size, stacked, and which of them each replica uses."""

    def __init__(self, x: Tensor, y: Tensor, chosen: Sequence[int]) -> None:
        self.shared = len(set(chosen)) == 1
        index = torch.tensor(chosen[:1] if self.shared else chosen, device=x.device)
        self.x, self.y = x[index], y[index]
        self.replicas, self.examples = len(chosen), x.shape[1]
        self._squares: Tensor | None = None

    def inputs(self, rows: slice, block: slice) -> Tensor:
        """(k, n, …): a view repeated over replicas where they share a set."""
        return _rows(self.x[:, block], rows, self.replicas)

    def targets(self, rows: slice, block: slice) -> Tensor:
        return _rows(self.y[:, block], rows, self.replicas)

    def squares(self, rows: slice, block: slice) -> Tensor:
        """(k, n): squared norms of the inputs, computed once."""
        if self._squares is None:
            self._squares = self.x.square().sum(2)
        return _rows(self._squares[:, block], rows, self.replicas)


def _rows(stacked: Tensor, rows: slice, replicas: int) -> Tensor:
    return stacked.expand(replicas, *stacked.shape[1:])[rows]


@dataclass(frozen=True)
class Update:
    """One step's numbers, a row for each replica; `noise` has deviation clip·σ, in model order."""

    noise: Tensor
    clip: Tensor
    scale: Tensor
    """η(1−β) / ((1−β^t)·divisor): from the running sum to the change of the parameters."""
    beta: Tensor | None = None
    taken: Tensor | None = None
    """(k, N) zeros and ones where examples are sampled."""


class Batch(ABC):
    """The stacked state of K replicas; rows of it take steps, are assessed, copied and read."""

    def __init__(self, shapes: Sequence[Part], parameters: int) -> None:
        self.state = [own for own, _ in shapes]
        self.parameters = parameters
        self.sums = [torch.zeros_like(part) for part in self.state]
        self.averages: list[Tensor] | None = None
        replicas, device = self.state[0].shape[0], self.state[0].device
        self.broken = torch.full((replicas,), -1, dtype=torch.int64, device=device)
        """The first step in which a loss or a gradient was not finite, or −1."""

    @abstractmethod
    def parts(self, stored: Sequence[Tensor], flat: Tensor) -> Iterator[Part]:
        """Matching views of the stored form and of rows of flat parameters in model order."""

    @abstractmethod
    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        """Add Σ_i c_i g_i to `sums`; returns for each replica whether all of it was finite."""

    @abstractmethod
    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        """The model's outputs (k, n, …) for inputs (k, n, …)."""

    def step(self, data: Data, rows: slice, update: Update, t: int) -> None:
        """Algorithm 1 for these replicas; t counts from zero."""
        for own, flat in self.parts([part[rows] for part in self.sums], update.noise):
            own.copy_(flat)
        finite = self.clipped_sum(data, rows, update)
        broken = self.broken[rows]
        broken.masked_fill_(~finite & (broken < 0), t + 1)
        direction = self.sums
        if update.beta is not None:
            if self.averages is None:
                self.averages = [torch.zeros_like(part) for part in self.state]
            for average, total in zip(self.averages, self.sums, strict=True):
                average[rows].mul_(_over(update.beta, average)).add_(total[rows])
            direction = self.averages
        for own, change in zip(self.state, direction, strict=True):
            own[rows].addcmul_(change[rows], _over(update.scale, own), value=-1)

    def write(self, flat: Tensor) -> None:
        """Set all parameters from flat rows in model order."""
        for own, part in self.parts(self.state, flat):
            own.copy_(part)

    def read(self, row: int) -> Tensor:
        first = self.state[0]
        flat = torch.empty(1, self.parameters, dtype=first.dtype, device=first.device)
        for own, part in self.parts([p[row : row + 1] for p in self.state], flat):
            part.copy_(own)
        return flat[0]

    def branch(self, source: slice, target: slice) -> None:
        """Copy replicas, parameters and averages, onto a multiple of as many others."""
        for stored in [*self.state, *(self.averages or [])]:
            origin = stored[source]
            times = len(stored[target]) // len(origin)
            stored[target] = origin.repeat(times, *[1] * (origin.dim() - 1))

    @torch.no_grad()
    def assess(
        self, data: Data, rows: slice, loss: Loss, block: int
    ) -> tuple[Tensor, Tensor | None]:
        """Mean loss and, for whole-number targets, accuracy of these replicas."""
        counted = not data.y.is_floating_point() and data.y.dim() == 2
        losses, right = [], []
        for start in range(0, data.examples, block):
            part = slice(start, start + block)
            out, y = self.outputs(data.inputs(rows, part), rows), data.targets(rows, part)
            each = loss(out.flatten(0, 1), y.flatten(0, 1)).view(out.shape[:2])
            losses.append(each.double().sum(1))
            if counted:
                right.append((out.argmax(-1) == y).sum(1))
        total = torch.stack(losses).sum(0) / data.examples
        return total, torch.stack(right).sum(0) / data.examples if right else None


def _over(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *([1] * (like.dim() - 1)))


def _factors(squares: Tensor, update: Update, block: slice) -> tuple[Tensor, Tensor]:
    """min(1, C/‖g‖) for examples (k, n), zero where not sampled; and whether all are finite."""
    norms = squares.sqrt_()
    finite = norms.sum(1).isfinite()
    factors = torch.div(update.clip.unsqueeze(1), norms).clamp_(max=1.0)
    if update.taken is not None:
        factors *= update.taken[:, block]
    return factors, finite


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _slopes(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The derivatives of the losses with respect to the outputs (k, n, …)."""
    if loss is cross_entropy and targets.dim() == 2:
        # Along the other dimension: a softmax of ten neighbours is slow on a CPU.
        slopes = torch.softmax(outputs.mT, 1).mT
        chosen = targets.unsqueeze(2)
        return slopes.scatter_add_(2, chosen, slopes.new_full((1, 1, 1), -1.0).expand(chosen.shape))
    with torch.enable_grad():
        leaf = outputs.detach().flatten(0, 1).requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf, targets.flatten(0, 1)).sum(), leaf)
    return found.view(outputs.shape)


@dataclass(frozen=True)
class Layer:
    """A linear map and the activation after it."""

    fan_in: int
    fan_out: int
    bias: bool
    activation: str


_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


def layers_of(model: nn.Module) -> list[Layer] | None:
    """The layers of a plain multilayer perceptron, or None for any other model."""
    found: list[Layer] = []
    for module in _flattened(model):
        kind = type(module)
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            if found and found[-1].fan_out != module.in_features:
                return None
            ins, outs, bias = module.in_features, module.out_features, module.bias is not None
            found.append(Layer(ins, outs, bias, ""))
        elif kind in _ACTIVATIONS and found and not found[-1].activation:
            last = found.pop()
            found.append(Layer(last.fan_in, last.fan_out, last.bias, _ACTIVATIONS[kind]))
        elif kind is not nn.Identity:
            return None
    entries = sum(layer.fan_out * (layer.fan_in + layer.bias) for layer in found)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not found or sum(p.numel() for p in trainable) != entries or list(model.buffers()):
        return None
    return found


def _flattened(model: nn.Module) -> Iterator[nn.Module]:
    if type(model) is nn.Sequential:
        for part in model:
            yield from _flattened(part)
    else:
        yield model


class Perceptrons(Batch):
    """Linear layers as batched matrix products; norms from activations and output gradients.

    For one linear layer an example's gradient is g aᵀ, so its norm is ‖a‖‖g‖, and the clipped sum
    is one product with the factors folded into the narrower of a and g. The input carries a column
    of ones for the first layer's bias. Matrices are stored with their shorter side first, which is
    what the products on both sides of them like best.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        replicas: int,
        loss: Loss,
        block: int,
        like: Tensor,
        at_once: int | None = None,
    ) -> None:
        self.layers, self.loss, self.block = tuple(layers), loss, block
        self.rises = [layer.fan_in + (i == 0) <= layer.fan_out for i, layer in enumerate(layers)]
        stored: list[Part] = []
        for i, (layer, rises) in enumerate(zip(layers, self.rises, strict=True)):
            ins, outs = layer.fan_in + (layer.bias and i == 0), layer.fan_out
            shape = (replicas, ins, outs) if rises else (replicas, outs, ins)
            stored.append((like.new_zeros(shape), like))
            if layer.bias and i > 0:
                stored.append((like.new_zeros(replicas, 1, outs), like))
        super().__init__(stored, sum(x.fan_out * (x.fan_in + x.bias) for x in layers))
        widths = [layer.fan_out for layer in layers]
        self._kept: dict[tuple[int, int], tuple[list[Map], list[Map]]] = {}
        held = (at_once or replicas) * block
        self._ahead = [like.new_empty(held, width) for width in widths]
        self._back = [like.new_empty(held, width) for width in widths[:-1]]

    def data(self, x: Tensor, y: Tensor, chosen: Sequence[int]) -> Data:
        x = x.flatten(2)
        if self.layers[0].bias:
            x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
        return Data(x, y, chosen)

    def _maps(self, stored: Sequence[Tensor]) -> Iterator[Map]:
        """Each layer's matrix as (in, out), and its bias where it is kept apart."""
        left = iter(stored)
        for i, (layer, rises) in enumerate(zip(self.layers, self.rises, strict=True)):
            matrix = next(left)
            bias = next(left) if layer.bias and i > 0 else None
            yield matrix if rises else matrix.mT, bias

    def _views(self, start: int, stop: int) -> tuple[list[Map], list[Map]]:
        """The maps of these rows' parameters and sums; kept, since slicing takes its time too."""
        if (start, stop) not in self._kept:
            if len(self._kept) > 1000:
                self._kept.clear()
            self._kept[start, stop] = (
                list(self._maps([part[start:stop] for part in self.state])),
                list(self._maps([part[start:stop] for part in self.sums])),
            )
        return self._kept[start, stop]

    def parts(self, stored: Sequence[Tensor], flat: Tensor) -> Iterator[Part]:
        start, k = 0, flat.shape[0]
        for layer, (matrix, bias) in zip(self.layers, self._maps(stored), strict=True):
            ins, outs = layer.fan_in, layer.fan_out
            yield matrix[:, :ins].mT, flat[:, start : start + ins * outs].view(k, outs, ins)
            start += ins * outs
            if layer.bias:
                own = matrix[:, ins] if bias is None else bias[:, 0]
                yield own, flat[:, start : start + outs]
                start += outs

    @staticmethod
    def _buffer(store: Tensor, k: int, n: int) -> Tensor:
        return store[: k * n].view(k, n, -1)

    def _forward(self, inputs: Tensor, rows: slice) -> list[Tensor]:
        """The input of every layer, and the last one's output."""
        k, n = inputs.shape[:2]
        values = [inputs]
        maps = self._views(rows.start, rows.stop)[0]
        for layer, (matrix, bias), store in zip(self.layers, maps, self._ahead, strict=True):
            if len(values) == 1 and layer.bias and kernels.rectifies(inputs, layer.activation):
                values.append(kernels.rectified(inputs[0], matrix, self._buffer(store, k, n)))
                continue
            out = torch.bmm(values[-1], matrix, out=self._buffer(store, k, n))
            if bias is not None:
                out += bias
            if layer.activation:
                getattr(torch, f"{layer.activation}_")(out)
            values.append(out)
        return values

    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        return self._forward(inputs, rows)[-1]

    @torch.no_grad()
    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        finite = torch.ones_like(update.clip, dtype=torch.bool)
        maps, sums = self._views(rows.start, rows.stop)
        for start in range(0, data.examples, self.block):
            block = slice(start, min(start + self.block, data.examples))
            values = self._forward(data.inputs(rows, block), rows)
            slope = _slopes(self.loss, values[-1], data.targets(rows, block))
            slope = _through(self.layers[-1].activation, slope, values[-1])
            slopes, squares = [slope], torch.zeros_like(slope[..., 0])
            own = _square(slope)
            for i in range(len(maps) - 1, 0, -1):
                (matrix, bias), activation = maps[i], self.layers[i - 1].activation
                out = self._buffer(self._back[i - 1], *slope.shape[:2])
                if kernels.takes(values[i], matrix, activation):
                    around, before = kernels.backward(slope, matrix, values[i], out)
                else:
                    torch.bmm(slope, matrix.mT, out=out)
                    _through(activation, out, values[i])
                    around, before = _square(values[i]), _square(out)
                squares.addcmul_(own, around if bias is None else around.add_(1))
                slope, own = out, before
                slopes.insert(0, slope)
            squares.addcmul_(own, data.squares(rows, block))
            factors, whole = _factors(squares, update, block)
            finite &= whole
            for value, slope, (matrix, bias) in zip(values, slopes, sums, strict=False):
                self._add(matrix, bias, value, slope, factors)
        return finite

    def _add(
        self, matrix: Tensor, bias: Tensor | None, value: Tensor, slope: Tensor, factors: Tensor
    ) -> None:
        """Σ_i c_i a_i g_iᵀ into `matrix`, and Σ_i c_i g_i into `bias`."""
        if bias is not None:
            bias.baddbmm_(factors.unsqueeze(1), slope)
        weight = factors.unsqueeze(2)
        if value.shape[2] <= slope.shape[2]:
            value = value * weight
        else:
            slope = slope * weight
        if matrix.is_contiguous():
            matrix.baddbmm_(value.mT, slope)
        else:
            matrix.mT.baddbmm_(slope.mT, value)


def _square(values: Tensor) -> Tensor:
    """Squared norms along the last dimension."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=2)
    return norms.square_()


def _through(activation: str, slope: Tensor, value: Tensor) -> Tensor:
    """The derivative before an activation, in place, from its output."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(slope, value, 0, grad_input=slope)
    elif activation == "tanh":
        slope.sub_(value.square().mul_(slope))
    elif activation == "sigmoid":
        slope.mul_(value).sub_(value * slope)
    return slope


class _Flattened(Batch):
    """State as one vector of trainable parameters for each replica."""

    def __init__(
        self, model: nn.Module, replicas: int, loss: Loss, block: int, like: Tensor
    ) -> None:
        self.model, self.loss, self.block = copy.deepcopy(model).to(like.device), loss, block
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.shapes = {name: p.shape for name, p in named}
        self.sizes = [p.numel() for _, p in named]
        total = sum(self.sizes)
        super().__init__([(like.new_zeros(replicas, total), like)], total)

    def data(self, x: Tensor, y: Tensor, chosen: Sequence[int]) -> Data:
        return Data(x, y, chosen)

    def parts(self, stored: Sequence[Tensor], flat: Tensor) -> Iterator[Part]:
        yield stored[0], flat

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        split = torch.split(flat, self.sizes, dim=-1)
        return {
            name: part.view(*flat.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), split, strict=True)
        }


class Vmapped(_Flattened):
    """Per-example gradients by `torch.func`, a chunk of examples at a time."""

    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        def run(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return _tensor(functional_call(self.model, parameters, (x,)))

        mapped: Tensor = vmap(run)(self.named(self.state[0][rows]), inputs)
        return mapped

    def _one(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(self.model, self.named(flat), (x.unsqueeze(0),))
        return self.loss(_tensor(out), y.unsqueeze(0)).sum()

    @torch.no_grad()
    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        finite = torch.ones_like(update.clip, dtype=torch.bool)
        each = vmap(vmap(grad_and_value(self._one), (None, 0, 0)))
        sums = self.sums[0][rows]
        for start in range(0, data.examples, self.block):
            block = slice(start, min(start + self.block, data.examples))
            flat = self.state[0][rows]
            gradients, losses = each(flat, data.inputs(rows, block), data.targets(rows, block))
            squares = gradients.square().sum(2)
            factors, whole = _factors(squares, update, block)
            finite &= whole & losses.sum(1).isfinite()
            sums += torch.bmm(factors.unsqueeze(1), gradients).squeeze(1)
        return finite


class OneByOne(_Flattened):
    """The training engine, replica after replica: for what cannot be mapped over replicas."""

    def _at(self, row: int) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in self.named(self.state[0][row]).items():
            parameters[name].data = value

    def _numbers(self, rows: slice) -> range:
        return range(*rows.indices(self.state[0].shape[0]))

    @torch.no_grad()
    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        found = []
        for row, x in zip(self._numbers(rows), inputs, strict=True):
            self._at(row)
            found.append(_tensor(self.model(x)))
        return torch.stack(found)

    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        finite = []
        with Engine(self.model) as engine:
            for i, row in enumerate(self._numbers(rows)):
                self._at(row)
                finite.append(self._one(engine, data, slice(row, row + 1), update, i))
        return torch.stack(finite)

    def _one(self, engine: Engine, data: Data, row: slice, update: Update, i: int) -> Tensor:
        whole = torch.ones((), dtype=torch.bool, device=self.broken.device)
        clip = Flat(float(update.clip[i]))
        for start in range(0, data.examples, self.block):
            block = slice(start, min(start + self.block, data.examples))
            x, y = data.inputs(row, block)[0], data.targets(row, block)[0]
            if update.taken is not None:
                kept = update.taken[i, block] > 0
                x, y = x[kept], y[kept]
            result = engine.clipped_sum(self.loss(_tensor(self.model(x)), y), clip)
            self.sums[0][row] += torch.cat([part.flatten() for part in result.sums])
            whole &= (result.nonfinite == 0).to(whole.device)
        return whole


def _tensor(value: Any) -> Tensor:
    result: Tensor = value
    return result

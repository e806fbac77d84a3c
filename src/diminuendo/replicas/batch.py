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
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from diminuendo.training.clipping import Engine, Flat

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of n examples → n losses."""
Part = tuple[Tensor, Tensor]
Start = Callable[[slice, slice], None]
"""Puts noise into the sums of some rows, given also their place among all that step."""
Result = TypeVar("Result")


class Data:
    """Training sets of one size, stacked, and which of them each replica uses."""

    def __init__(self, x: Tensor, y: Tensor, chosen: Sequence[int]) -> None:
        self.shared = len(set(chosen)) == 1
        index = torch.tensor(chosen[:1] if self.shared else chosen, device=x.device)
        self.x, self.y = x[index], y[index]
        self.replicas, self.examples = len(chosen), x.shape[1]

    def inputs(self, rows: slice, block: slice) -> Tensor:
        """(k, n, …): a view repeated over replicas where they share a set."""
        return _rows(self.x[:, block], rows, self.replicas)

    def targets(self, rows: slice, block: slice) -> Tensor:
        return _rows(self.y[:, block], rows, self.replicas)


def _rows(stacked: Tensor, rows: slice, replicas: int) -> Tensor:
    return stacked.expand(replicas, *stacked.shape[1:])[rows]


@dataclass(frozen=True)
class Update:
    """One step's numbers, a row for each replica."""

    clip: Tensor
    scale: Tensor
    """η(1−β) / ((1−β^t)·divisor): from the running sum to the change of the parameters."""
    beta: Tensor | None = None
    taken: Tensor | None = None
    """(k, N) zeros and ones where examples are sampled."""

    def of(self, place: slice) -> Update:
        """The same for some of the rows."""
        return Update(
            self.clip[place],
            self.scale[place],
            None if self.beta is None else self.beta[place],
            None if self.taken is None else self.taken[place],
        )


class Batch(ABC):
    """The stacked state of K replicas; rows of it take steps, are assessed, copied and read."""

    loss: Loss

    def __init__(self, state: Sequence[Tensor], parameters: int, block: int) -> None:
        self.state, self.parameters, self.block = list(state), parameters, block
        self.sums = [part.new_zeros(part.shape) for part in self.state]
        self.averages: list[Tensor] | None = None
        first = self.state[0]
        self._trouble = first.new_zeros(len(first))
        """Zero as long as all is finite, and not a number from then on."""
        self._sound = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        """How many steps that was."""
        self._zero = first.new_zeros(())

    @property
    def broken(self) -> Tensor:
        """The first step, of those taken, in which something was not finite, or −1."""
        return torch.where(self._trouble.isnan(), self._sound + 1, -1)

    @abstractmethod
    def parts(self, stored: Sequence[Tensor], flat: Tensor) -> Iterator[Part]:
        """Matching views of the stored form and of rows of flat parameters in model order."""

    @abstractmethod
    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        """Add Σ_i c_i g_i to `sums`; returns a number for each replica: finite if all of it was."""

    @abstractmethod
    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        """The model's outputs (k, n, …) for inputs (k, n, …)."""

    def each(self, rows: slice, call: Callable[[slice, slice], Result]) -> list[Result]:
        """call(rows, their place among `rows`) for all of them, in one piece or in several."""
        return [call(rows, slice(0, rows.stop - rows.start))]

    def step(self, data: Data, rows: slice, start: Start, update: Update) -> None:
        """Algorithm 1 for these replicas."""
        if update.beta is not None and self.averages is None:
            self.averages = [torch.zeros_like(part) for part in self.sums]

        def take(piece: slice, place: slice) -> None:
            start(piece, place)
            self.advance(data, piece, update.of(place))

        self.each(rows, take)

    def start(self, rows: slice, noise: Tensor) -> None:
        """Let the sums begin with noise: flat rows in model order, of deviation clip·σ."""
        for own, flat in self.parts([part[rows] for part in self.sums], noise):
            own.copy_(flat)

    @cached_property
    def orders(self) -> list[Tensor]:
        """For each part of the sums, as it is stored, where its entries are in model order."""
        stored = [torch.empty_like(part[:1], dtype=torch.int32) for part in self.sums]
        numbers = torch.arange(self.parameters, dtype=torch.int32, device=stored[0].device)
        for own, flat in self.parts(stored, numbers.unsqueeze(0)):
            own.copy_(flat)
        return stored

    def advance(self, data: Data, rows: slice, update: Update) -> None:
        """What follows the noise: on a GPU the same operations on the same memory every time."""
        trouble = self._trouble[rows].addcmul_(self.clipped_sum(data, rows, update), self._zero)
        self._sound[rows] += trouble.eq(trouble)
        direction = self.sums
        if update.beta is not None and self.averages is not None:
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

    def assess(self, data: Data, rows: slice, loss: Loss) -> tuple[Tensor, Tensor | None]:
        """Mean loss and, for whole-number targets, accuracy of these replicas."""
        pieces = self.each(rows, lambda piece, _: self._assess(data, piece, loss))
        right = [found for _, found in pieces if found is not None]
        return torch.cat([loss for loss, _ in pieces]), torch.cat(right) if right else None

    @torch.no_grad()
    def _assess(self, data: Data, rows: slice, loss: Loss) -> tuple[Tensor, Tensor | None]:
        counted = not data.y.is_floating_point() and data.y.dim() == 2
        losses, right = [], []
        for block in self.blocks(data):
            out, y = self.outputs(data.inputs(rows, block), rows), data.targets(rows, block)
            each = loss(out.flatten(0, 1), y.flatten(0, 1)).view(out.shape[:2])
            losses.append(each.double().sum(1))
            if counted:
                right.append((out.argmax(-1) == y).sum(1))
        total = torch.stack(losses).sum(0) / data.examples
        return total, torch.stack(right).sum(0) / data.examples if right else None

    def blocks(self, data: Data) -> list[slice]:
        """The examples that go at once, block by block, all of about one size."""
        number = -(-data.examples // self.block)
        size = -(-data.examples // number)
        return [slice(i, min(i + size, data.examples)) for i in range(0, data.examples, size)]


def _over(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *([1] * (like.dim() - 1)))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def clip_factors(norms: Tensor, update: Update, block: slice) -> Tensor:
    """min(1, C/‖g‖) for examples (k, n), zero where not sampled."""
    factors = torch.div(update.clip.unsqueeze(1), norms).clamp_(max=1.0)
    if update.taken is not None:
        factors *= update.taken[:, block]
    return factors


class _Flattened(Batch):
    """State as one vector of trainable parameters for each replica."""

    def __init__(
        self, model: nn.Module, replicas: int, loss: Loss, block: int, like: Tensor
    ) -> None:
        self.model, self.loss = copy.deepcopy(model).to(like.device), loss
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.shapes = {name: p.shape for name, p in named}
        self.sizes = [p.numel() for _, p in named]
        total = sum(self.sizes)
        super().__init__([like.new_zeros(replicas, total)], total, block)

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
        health = torch.zeros_like(update.clip)
        each = vmap(vmap(grad_and_value(self._one), (None, 0, 0)))
        sums = self.sums[0][rows]
        for block in self.blocks(data):
            flat = self.state[0][rows]
            gradients, losses = each(flat, data.inputs(rows, block), data.targets(rows, block))
            norms = torch.linalg.vector_norm(gradients, dim=2)
            health += (norms + losses).sum(1)
            factors = clip_factors(norms, update, block)
            sums += torch.bmm(factors.unsqueeze(1), gradients).squeeze(1)
        return health


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
        health = torch.zeros_like(update.clip)
        with Engine(self.model) as engine:
            for i, row in enumerate(self._numbers(rows)):
                self._at(row)
                if not self._one(engine, data, slice(row, row + 1), update, i):
                    health[i] = torch.nan
        return health

    def _one(self, engine: Engine, data: Data, row: slice, update: Update, i: int) -> bool:
        whole = True
        clip = Flat(float(update.clip[i]))
        for block in self.blocks(data):
            x, y = data.inputs(row, block)[0], data.targets(row, block)[0]
            if update.taken is not None:
                kept = update.taken[i, block] > 0
                x, y = x[kept], y[kept]
            result = engine.clipped_sum(self.loss(_tensor(self.model(x)), y), clip)
            self.sums[0][row] += torch.cat([part.flatten() for part in result.sums])
            whole = whole and result.finite is None
        return whole


def _tensor(value: Any) -> Tensor:
    result: Tensor = value
    return result

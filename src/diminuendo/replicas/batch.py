"""K replicas of one model in one computation: private gradient descent on stacked parameters.

A `Batch` holds the parameters of its replicas as tensors whose first dimension is the replica, and
takes a step of Algorithm 1 for all of them at once: θ ← θ − η·φ(Σ_i c_i g_i + noise). No tensor of
size replicas × examples × parameters exists at any time. There are three kinds, from fast to
general:

    perceptrons.Perceptrons   linear layers with elementwise activations: batched matrix products
    general.Vmapped           models that `torch.func` can map over replicas and examples
    general.OneByOne          the training engine for one replica after the other
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of n examples → n losses."""
Part = tuple[Tensor, Tensor]
"""Matching views: of parameters as a batch stores them, and of flat parameters in model order."""
AddNoise = Callable[[slice, slice], None]
"""(rows, their positions among all rows that step) → None: lets the sums of these rows be noise."""
Result = TypeVar("Result")


class Data:
    """Data sets of one size, stacked, and the index of the one that each replica uses."""

    def __init__(self, x: Tensor, y: Tensor, indices: Sequence[int]) -> None:
        self.shared = len(set(indices)) == 1
        index = torch.tensor(indices[:1] if self.shared else indices, device=x.device)
        self.x, self.y = x[index], y[index]
        self.replicas, self.examples = len(indices), x.shape[1]

    def inputs(self, rows: slice, block: slice) -> Tensor:
        """Inputs (k, n, …) of k replicas and n examples; a repeated view of a set they share."""
        return _rows(self.x[:, block], rows, self.replicas)

    def targets(self, rows: slice, block: slice) -> Tensor:
        """Targets (k, n, …) of the same replicas and examples."""
        return _rows(self.y[:, block], rows, self.replicas)


def _rows(stacked: Tensor, rows: slice, replicas: int) -> Tensor:
    return stacked.expand(replicas, *stacked.shape[1:])[rows]


@dataclass(frozen=True)
class Rules:
    """The clipping rules of replicas that differ in them, a row for each.

    offset   γ, added to a norm before C is divided by it: 0.01 for automatic clipping, else 0
    longest  the largest factor: infinite for automatic clipping, else 1
    layered  True where layers are clipped one by one
    """

    offset: Tensor
    longest: Tensor
    layered: Tensor

    def of(self, place: slice | Tensor) -> Rules:
        """The same rules for some of the rows."""
        return Rules(self.offset[place], self.longest[place], self.layered[place])


@dataclass(frozen=True)
class Update:
    """One step's numbers, a row for each replica.

    clip     clip norms C
    scale    η(1−β) / ((1−β^t)·divisor): from the running sum to the change of the parameters
    beta     momenta, or None where all are zero
    sampled  (k, N) ones for examples in the replica's Poisson sample and zeros for the others, or
             None for full batches
    rules    how each replica clips, or None where all clip the whole gradient where it is too long
    """

    clip: Tensor
    scale: Tensor
    beta: Tensor | None = None
    sampled: Tensor | None = None
    rules: Rules | None = None

    def of(self, place: slice) -> Update:
        """The same numbers for some of the rows."""
        return Update(
            self.clip[place],
            self.scale[place],
            None if self.beta is None else self.beta[place],
            None if self.sampled is None else self.sampled[place],
            None if self.rules is None else self.rules.of(place),
        )


class Batch(ABC):
    """The stacked state of K replicas. Methods take the rows (replicas) that they concern.

    state     parameters, stacked over replicas
    sums      noise plus clipped gradients of the current step, stored like the state
    averages  running sums for momentum, stored like the state, or None
    """

    loss: Loss

    def __init__(self, state: Sequence[Tensor], parameters: int, block: int) -> None:
        self.state, self.parameters, self.block = list(state), parameters, block
        self.sums = [part.new_zeros(part.shape) for part in self.state]
        self.averages: list[Tensor] | None = None
        first = self.state[0]
        self._not_finite = first.new_zeros(len(first))
        """Zero while everything is finite, and NaN from then on."""
        self._finite_steps = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        self._zero = first.new_zeros(())

    @property
    def broken(self) -> Tensor:
        """For each replica, the first step (from 1) with a number that was not finite, or −1."""
        return torch.where(self._not_finite.isnan(), self._finite_steps + 1, -1)

    @abstractmethod
    def parts(self, stored: Sequence[Tensor], flat: Tensor) -> Iterator[Part]:
        """Matching views of stored parameters and of rows of flat parameters in model order."""

    @abstractmethod
    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        """Add Σ_i c_i g_i to `sums`; a number for each replica, finite if all of its terms were."""

    @abstractmethod
    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        """The model's outputs (k, n, …) for inputs (k, n, …)."""

    def each(self, rows: slice, call: Callable[[slice, slice], Result]) -> list[Result]:
        """[call(piece, its positions among `rows`), …] for pieces that make up `rows`."""
        return [call(rows, slice(0, rows.stop - rows.start))]

    def step(self, data: Data, rows: slice, add_noise: AddNoise, update: Update) -> None:
        """One step of Algorithm 1 for these replicas."""
        if update.beta is not None and self.averages is None:
            self.averages = [torch.zeros_like(part) for part in self.sums]

        def take(piece: slice, place: slice) -> None:
            add_noise(piece, place)
            self.advance(data, piece, update.of(place))

        self.each(rows, take)

    def set_noise(self, rows: slice, noise: Tensor) -> None:
        """Set the sums of these rows to noise: flat rows in model order, of deviation clip·σ."""
        for own, flat in self.parts([part[rows] for part in self.sums], noise):
            own.copy_(flat)

    @cached_property
    def orders(self) -> list[Tensor]:
        """For each part of the sums, the positions of its stored entries in model order."""
        stored = [torch.empty_like(part[:1], dtype=torch.int32) for part in self.sums]
        numbers = torch.arange(self.parameters, dtype=torch.int32, device=stored[0].device)
        for own, flat in self.parts(stored, numbers.unsqueeze(0)):
            own.copy_(flat)
        return stored

    def advance(self, data: Data, rows: slice, update: Update) -> None:
        """Everything after the noise. On a GPU, the same operations on the same memory each time,
        so that a CUDA graph can capture them.
        """
        health = self.clipped_sum(data, rows, update)
        not_finite = self._not_finite[rows].addcmul_(health, self._zero)
        self._finite_steps[rows] += not_finite.eq(not_finite)
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
        """One replica's parameters as a flat vector in model order."""
        first = self.state[0]
        flat = torch.empty(1, self.parameters, dtype=first.dtype, device=first.device)
        for own, part in self.parts([p[row : row + 1] for p in self.state], flat):
            part.copy_(own)
        return flat[0]

    def branch(self, source: slice, target: slice) -> None:
        """Copy the parameters and averages of `source` to `target`, repeated to fill it."""
        for stored in [*self.state, *(self.averages or [])]:
            origin = stored[source]
            times = len(stored[target]) // len(origin)
            stored[target] = origin.repeat(times, *[1] * (origin.dim() - 1))

    def assess(self, data: Data, rows: slice, loss: Loss) -> tuple[Tensor, Tensor | None]:
        """Mean loss of each of these replicas and, for class labels, accuracy in [0, 1]."""
        pieces = self.each(rows, lambda piece, _: self._assess(data, piece, loss))
        correct = [shares for _, shares in pieces if shares is not None]
        return torch.cat([losses for losses, _ in pieces]), torch.cat(correct) if correct else None

    @torch.no_grad()
    def _assess(self, data: Data, rows: slice, loss: Loss) -> tuple[Tensor, Tensor | None]:
        labels = not data.y.is_floating_point() and data.y.dim() == 2
        losses, correct = [], []
        for block in self.blocks(data):
            out, y = self.outputs(data.inputs(rows, block), rows), data.targets(rows, block)
            each = loss(out.flatten(0, 1), y.flatten(0, 1)).view(out.shape[:2])
            losses.append(each.double().sum(1))
            if labels:
                correct.append((out.argmax(-1) == y).sum(1))
        total = torch.stack(losses).sum(0) / data.examples
        return total, torch.stack(correct).sum(0) / data.examples if correct else None

    def blocks(self, data: Data) -> list[slice]:
        """Blocks of about equal size that make up the examples, at most `block` in each."""
        number = -(-data.examples // self.block)
        size = -(-data.examples // number)
        return [slice(i, min(i + size, data.examples)) for i in range(0, data.examples, size)]


def _over(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *([1] * (like.dim() - 1)))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One cross-entropy loss for each example: outputs (n, classes), targets (n,) → (n,)."""
    return F.cross_entropy(outputs, targets, reduction="none")


def clip_factors(norms: Sequence[Tensor], update: Update, block: slice) -> list[Tensor]:
    """What each layer's gradients are multiplied by, from their norms (k, n), one for each layer.

    min(1, C/‖g‖) of the whole gradient unless a replica has another rule; zero for examples that
    are not sampled.
    """
    whole = norms[0]
    for norm in norms[1:]:
        whole = torch.hypot(whole, norm)
    rules = update.rules
    if rules is None:
        factors = [torch.div(update.clip.unsqueeze(1), whole).clamp_(max=1.0)] * len(norms)
    else:
        shared = update.clip.unsqueeze(1) / (whole + rules.offset.unsqueeze(1))
        shared = torch.minimum(shared, rules.longest.unsqueeze(1))
        share = (update.clip / math.sqrt(len(norms))).unsqueeze(1)
        layered = rules.layered.unsqueeze(1)
        factors = [torch.where(layered, (share / n).clamp_(max=1.0), shared) for n in norms]
    if update.sampled is not None:
        sampled = update.sampled[:, block]
        distinct = {id(part): part * sampled for part in factors}
        factors = [distinct[id(part)] for part in factors]
    return factors

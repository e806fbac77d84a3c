"""Replicas of any model: by `torch.func` where it can map the model, else one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from diminuendo.replicas.batch import Batch, Data, Loss, Part, Update, clip_factors
from diminuendo.training.clipping import Automatic, Clip, Engine, Flat, PerLayer


class _Flattened(Batch):
    """State as one vector of trainable parameters for each replica."""

    def __init__(
        self, model: nn.Module, replicas: int, loss: Loss, block: int, like: Tensor
    ) -> None:
        self.model, self.loss = copy.deepcopy(model).to(like.device), loss
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.shapes = {name: p.shape for name, p in named}
        self.sizes = [p.numel() for _, p in named]
        self.layer_sizes = _layer_sizes(self.model)
        total = sum(self.sizes)
        super().__init__([like.new_zeros(replicas, total)], total, block)

    def data(self, x: Tensor, y: Tensor, indices: Sequence[int]) -> Data:
        """Stacked data sets, and the index of the one that each replica uses."""
        return Data(x, y, indices)

    def parts(self, stored: Sequence[Tensor], flat: Tensor) -> Iterator[Part]:
        """The state is stored in model order: one part."""
        yield stored[0], flat

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of flat parameters (…, parameters) by name, in their own shapes."""
        split = torch.split(flat, self.sizes, dim=-1)
        return {
            name: part.view(*flat.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), split, strict=True)
        }


class Vmapped(_Flattened):
    """Per-example gradients by `torch.func`, a chunk of examples at a time."""

    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        """The model's outputs (k, n, …), mapped over replicas."""

        def run(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return _tensor(functional_call(self.model, parameters, (x,)))

        mapped: Tensor = vmap(run)(self.named(self.state[0][rows]), inputs)
        return mapped

    def _one(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(self.model, self.named(flat), (x.unsqueeze(0),))
        return self.loss(_tensor(out), y.unsqueeze(0)).sum()

    @torch.no_grad()
    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        """Per-example gradients of one block of examples after the other."""
        health = torch.zeros_like(update.clip)
        each = vmap(vmap(grad_and_value(self._one), (None, 0, 0)))
        sums = self.sums[0][rows]
        for block in self.blocks(data):
            flat = self.state[0][rows]
            gradients, losses = each(flat, data.inputs(rows, block), data.targets(rows, block))
            layers = torch.split(gradients, self.layer_sizes, dim=2)
            norms = [torch.linalg.vector_norm(own, dim=2) for own in layers]
            health += torch.stack([*norms, losses]).sum((0, 2))
            factors = clip_factors(norms, update, block)
            if update.rules is None:
                sums += torch.bmm(factors[0].unsqueeze(1), gradients).squeeze(1)
                continue
            totals = torch.split(sums, self.layer_sizes, dim=1)
            for total, own, factor in zip(totals, layers, factors, strict=True):
                total += torch.bmm(factor.unsqueeze(1), own).squeeze(1)
        return health


class OneByOne(_Flattened):
    """The training engine, replica after replica, for models that `torch.func` cannot map."""

    _probed = False

    def _load(self, row: int) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in self.named(self.state[0][row]).items():
            parameters[name].data = value

    def _numbers(self, rows: slice) -> range:
        return range(*rows.indices(self.state[0].shape[0]))

    @torch.no_grad()
    def outputs(self, inputs: Tensor, rows: slice) -> Tensor:
        """The model's outputs (k, n, …), one replica after the other."""
        outputs = []
        for row, x in zip(self._numbers(rows), inputs, strict=True):
            self._load(row)
            outputs.append(_tensor(self.model(x)))
        return torch.stack(outputs)

    def clipped_sum(self, data: Data, rows: slice, update: Update) -> Tensor:
        """The training engine's clipped sum, for one replica after the other."""
        health = torch.zeros_like(update.clip)
        with Engine(self.model, probing=not self._probed) as engine:
            self._probed = True
            for i, row in enumerate(self._numbers(rows)):
                self._load(row)
                if not self._one(engine, data, slice(row, row + 1), update, i):
                    health[i] = torch.nan
        return health

    def _one(self, engine: Engine, data: Data, row: slice, update: Update, i: int) -> bool:
        whole = True
        clip = _rule(update, i)
        for block in self.blocks(data):
            x, y = data.inputs(row, block)[0], data.targets(row, block)[0]
            if update.sampled is not None:
                sampled = update.sampled[i, block] > 0
                x, y = x[sampled], y[sampled]
            result = engine.clipped_sum(self.loss(_tensor(self.model(x)), y), clip)
            self.sums[0][row] += torch.cat([part.flatten() for part in result.sums])
            whole = whole and result.finite is None
        return whole


def _layer_sizes(model: nn.Module) -> list[int]:
    """How many parameters each module owns, in model order: what `PerLayer` takes for layers."""
    seen: set[int] = set()
    sizes = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen |= {id(p) for p in own}
        if own:
            sizes.append(sum(p.numel() for p in own))
    return sizes


def _rule(update: Update, row: int) -> Clip:
    """One replica's clipping rule, as the training engine knows it."""
    bound = float(update.clip[row])
    if update.rules is None:
        return Flat(bound)
    if bool(update.rules.layered[row]):
        return PerLayer(bound)
    return Automatic(bound) if float(update.rules.offset[row]) > 0 else Flat(bound)


def _tensor(value: Any) -> Tensor:
    result: Tensor = value
    return result

"""Replicas of any model: by `torch.func` where it can map the model, else one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from diminuendo.replicas.batch import Batch, Data, Loss, Part, Update, clip_factors
from diminuendo.training.clipping import Engine, Flat


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
            norms = torch.linalg.vector_norm(gradients, dim=2)
            health += (norms + losses).sum(1)
            factors = clip_factors(norms, update, block)
            sums += torch.bmm(factors.unsqueeze(1), gradients).squeeze(1)
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
        clip = Flat(float(update.clip[i]))
        for block in self.blocks(data):
            x, y = data.inputs(row, block)[0], data.targets(row, block)[0]
            if update.sampled is not None:
                sampled = update.sampled[i, block] > 0
                x, y = x[sampled], y[sampled]
            result = engine.clipped_sum(self.loss(_tensor(self.model(x)), y), clip)
            self.sums[0][row] += torch.cat([part.flatten() for part in result.sums])
            whole = whole and result.finite is None
        return whole


def _tensor(value: Any) -> Tensor:
    result: Tensor = value
    return result

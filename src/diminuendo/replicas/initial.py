"""The parameters that replicas start from: one initialisation for each seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diminuendo.replicas.layers import Layer, layers_of
from diminuendo.replicas.replica import Model
from diminuendo.training.cores import side_by_side
from diminuendo.training.seeds import Seeds


def initialise(model: Model, seed: int) -> nn.Module:
    """A new module with the parameters that a replica with this seed starts from.

    Torch's global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Seeds.make(seed).number("initialisation", 0))
        return model()


def flat_parameters(module: nn.Module) -> Tensor:
    """The trainable parameters as one vector, in the order in which the trainer adds noise."""
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def initial_rows(model: Model, seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """`initialise` for many seeds: a tensor with a row of flat parameters for each.

    Linear layers as PyTorch initialises them are filled directly from the generators, in threads,
    and scaled on the device. The first seed is also initialised by the model itself; where the two
    differ, the model initialises all of them.
    """
    template = initialise(model, seeds[0])
    first, layers = flat_parameters(template), layers_of(template)
    if layers is not None:
        bounds = _default_bounds(layers, device)
        uniform, on_cpu = torch.empty(len(seeds), len(first)), torch.device(device).type == "cpu"
        generators = [
            torch.Generator().manual_seed(Seeds.make(seed).number("initialisation", 0))
            for seed in seeds
        ]

        def scale(unit: Tensor) -> Tensor:
            return unit.double().mul_(2 * bounds).sub_(bounds).float()

        def draw_row(row: int, rows: Sequence[Tensor] = uniform.unbind()) -> None:
            rows[row].uniform_(generator=generators[row])
            if on_cpu:
                rows[row].copy_(scale(rows[row]))

        side_by_side(draw_row, len(seeds))
        rows = (uniform if on_cpu else scale(uniform.to(device))).to(first.dtype)
        if torch.equal(rows[0].cpu(), first):
            return rows
    return torch.stack([flat_parameters(initialise(model, seed)) for seed in seeds]).to(device)


def _default_bounds(layers: Sequence[Layer], device: torch.device | str) -> Tensor:
    """b for each parameter of linear layers, which PyTorch draws uniformly from [−b, b]."""
    gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    bounds = []
    for layer in layers:
        weight = math.sqrt(3) * (gain / math.sqrt(layer.fan_in))
        bounds.append(torch.full((layer.fan_in * layer.fan_out,), weight, device=device))
        bias = 1 / math.sqrt(layer.fan_in)
        bounds.append(torch.full((layer.fan_out * layer.bias,), bias, device=device))
    return torch.cat(bounds).double()

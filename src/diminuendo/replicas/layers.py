"""Which models are plain multilayer perceptrons, and their layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


class FeatureScale(nn.Module):
    """Multiplies each feature by a fixed, public factor: a first layer without parameters."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors: Tensor
        self.register_buffer("factors", factors.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """``x * factors``."""
        return x * self.factors


@dataclass(frozen=True)
class Layer:
    """A linear layer of a perceptron and the name of the activation after it, if any.

    factors  what its inputs are multiplied by before, one for each; empty for nothing
    """

    fan_in: int
    fan_out: int
    bias: bool
    activation: str
    factors: tuple[float, ...] = ()


_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


def layers_of(model: nn.Module) -> list[Layer] | None:
    """The layers of a plain multilayer perceptron, or None for any other model.

    A model with forward hooks is another one: hooks may change what goes into or out of a layer.
    """
    if any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()):
        return None
    layers: list[Layer] = []
    scale: FeatureScale | None = None
    for module in _flattened(model):
        kind = type(module)
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            if layers and layers[-1].fan_out != module.in_features:
                return None
            ins, outs, bias = module.in_features, module.out_features, module.bias is not None
            layers.append(Layer(ins, outs, bias, ""))
        elif kind in _ACTIVATIONS and layers and not layers[-1].activation:
            last = layers.pop()
            layers.append(Layer(last.fan_in, last.fan_out, last.bias, _ACTIVATIONS[kind]))
        elif isinstance(module, FeatureScale) and scale is None and not layers:
            scale = module
        elif kind is not nn.Identity:
            return None
    entries = sum(layer.fan_out * (layer.fan_in + layer.bias) for layer in layers)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not layers or sum(p.numel() for p in trainable) != entries:
        return None
    if len(list(model.buffers())) != (scale is not None):
        return None
    if scale is not None:
        layers[0] = replace(layers[0], factors=tuple(scale.factors.tolist()))
    return layers


def _flattened(model: nn.Module) -> Iterator[nn.Module]:
    if type(model) is nn.Sequential:
        for part in model:
            yield from _flattened(part)
    else:
        yield model

"""Toy models, data and replicas for tests of the replicas engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo.replicas import Replica

N, D, CLASSES = 40, 6, 3
LOSS = nn.CrossEntropyLoss(reduction="none")


def logistic() -> nn.Module:
    return nn.Linear(D, CLASSES).double()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 9), nn.ReLU(), nn.Linear(9, CLASSES)).double()


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(D, 7, bias=False), nn.Tanh()),
        nn.Linear(7, 12),
        nn.Sigmoid(),
        nn.Linear(12, 5),
        nn.ReLU(),
        nn.Linear(5, CLASSES, bias=False),
    ).double()


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, CLASSES)).double()


class Normed(nn.Module):
    """No plain perceptron: goes through torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.nn.functional.gelu(self.norm(self.first(x))))
        return out


class Recurrent(nn.Module):
    """What torch.func cannot map: goes through the engine, one replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(2, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x.view(len(x), -1, 2))[0][:, -1])
        return out


def own(activation: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(D, 4), nn.Linear(4, CLASSES)
            self.activation = activation

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.activation(self.first(x)))
            return out

    return lambda: Own().double()


def weighted(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = weight * LOSS(outputs, targets)
        return losses

    return loss


def softened(kind: int) -> Callable[[Tensor, Tensor], Tensor]:
    if kind == 0:
        return lambda outputs, targets: LOSS(outputs.relu(), targets)
    return lambda outputs, targets: LOSS(outputs.tanh(), targets)


def make_data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (N,), generator=generator)


def replica(seed: int = 0, steps: int = 6, **changes: Any) -> Replica:
    settings: dict[str, Any] = {"sigmas": [2.0] * steps, "lr": 0.2, "clip": 1.0, "seed": seed}
    return Replica(**{**settings, **changes})

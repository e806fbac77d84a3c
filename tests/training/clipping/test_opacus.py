"""Agreement with the per-sample gradients of opacus, where it supports the layer."""

from __future__ import annotations

import copy

import pytest
import torch
from naive import batch_loss, close, layer_slots, reference
from torch import Tensor, nn

from diminuendo.training.clipping import Engine, Flat

opacus = pytest.importorskip("opacus")

CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(6, 5)),
    "tokens": (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(6, 9, 5)),
    "conv": (
        nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.GroupNorm(4, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=2),
            nn.InstanceNorm2d(8, affine=True),
        ),
        torch.randn(4, 3, 9, 9),
    ),
    "conv1d": (nn.Sequential(nn.Conv1d(3, 4, 3, dilation=2, padding=2)), torch.randn(4, 3, 9)),
    "conv3d": (nn.Sequential(nn.Conv3d(2, 4, 2)), torch.randn(3, 2, 4, 4, 4)),
    "embedding": (
        nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        torch.randint(0, 9, (5, 7)),
    ),
    "rms": (nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6)), torch.randn(5, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_opacus(name: str) -> None:
    model, x = CASES[name]
    model = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    sampled = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    batch_loss(sampled, (x,)).sum().backward()
    grads = [param.grad_sample for param in sampled.parameters()]
    with Engine(model) as engine:
        result = engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
        norms, sums = reference(grads, Flat(1.0), layer_slots(engine))
    close(result.norms, norms, 1e-10, "norms")
    for actual, expected in zip(result.sums, sums, strict=True):
        close(actual, expected, 1e-10, "sums", 1e-3)

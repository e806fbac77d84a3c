"""Rows of initial parameters are what the model makes; other generators are left alone."""

from __future__ import annotations

import torch
from torch import nn
from toys import make_data, mlp, replica

from diminuendo.replicas import initialise, train
from diminuendo.replicas.initial import flat_parameters, initial_rows


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train(mlp, make_data(), [replica(1)], progress=False)
    assert torch.equal(before, torch.get_rng_state())


def test_rows_are_what_initialise_gives() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))

    rows = initial_rows(network, [3, 8])
    for row, seed in zip(rows, [3, 8], strict=True):
        assert torch.equal(row, flat_parameters(initialise(network, seed)))

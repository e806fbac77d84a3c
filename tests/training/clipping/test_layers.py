"""Every layer kind and option against one-example-at-a-time autograd, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive import compare
from torch import Tensor, nn

import diminuendo.training.clipping.reports as core
from diminuendo.training.clipping.layers import conv

randn = torch.randn


class Attention(nn.Module):
    """A linear map before attention, so that the input gradient matters too."""

    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.mode = mode

    def forward(self, x: Tensor, y: Tensor, z: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.before(x)
        tokens = x.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if self.mode == "self":
            return self.attention(x, x, x)[0]
        if self.mode == "causal":
            return self.attention(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0]
        if self.mode == "padded":
            return self.attention(
                x, x, x, key_padding_mask=padding, attn_mask=causal, need_weights=False
            )[0]
        if self.mode == "weights":
            out, weights = self.attention(x, y, z)
            return torch.cat([out.flatten(1), weights.flatten(1)], 1)
        if self.mode == "kv":
            return self.attention(x, y, y, need_weights=False)[0]
        return self.attention(x, y, z, need_weights=False)[0]


class Embedded(nn.Module):
    """An embedding and an output layer, perhaps with the same weight."""

    def __init__(self, tied: bool, padding: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=padding)
        self.head = nn.Linear(6, 11, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embed(index).tanh())


class Reused(nn.Module):
    """Modules used three times in one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.grouped = nn.Conv1d(3, 3, 3, padding=1, groups=3)
        self.norm = nn.LayerNorm(6)
        self.group = nn.GroupNorm(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(self.group(self.grouped(self.conv(self.linear(x).tanh())))).sin()
        return x


class Owner(nn.Module):
    """Parameters of its own, in a list too, around other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(randn(1, 1, 8))
        self.position = nn.Parameter(randn(1, 6, 8))
        self.embed = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.scales = nn.ParameterList([nn.Parameter(randn(8))])

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(x.shape[0], -1, -1)
        x = torch.cat([start, self.embed(x)], 1) + self.position
        return self.layer(x)[:, 0] * self.scales[0]


class Low(nn.Module):
    """A frozen linear map with a trainable low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Pair(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(4, 3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bilinear(x, y)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


LINEAR = {
    "vector": (nn.Sequential(nn.Linear(5, 7), relu(), nn.Linear(7, 3)), (6, 5)),
    "no bias": (nn.Sequential(nn.Linear(5, 7, False), relu(), nn.Linear(7, 3, False)), (6, 5)),
    "few tokens": (nn.Sequential(nn.Linear(9, 30), relu(), nn.Linear(30, 8), relu()), (6, 2, 9)),
    "many tokens": (nn.Sequential(nn.Linear(5, 7), relu(), nn.Linear(7, 3, False)), (6, 40, 5)),
    "grid": (nn.Sequential(nn.Linear(5, 7), relu(), nn.Linear(7, 3)), (3, 4, 2, 5)),
    "alone": (nn.Linear(5, 3), (4, 5)),
    "one example": (nn.Sequential(nn.Linear(5, 7), relu(), nn.Linear(7, 3)), (1, 4, 5)),
    "one output": (nn.Linear(5, 1), (4, 5)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    model, shape = LINEAR[name]
    model = model.double()
    compare(model, (randn(shape),))


CONV: list[dict[str, Any]] = [
    {},
    {"stride": 2},
    {"padding": 1, "bias": False},
    {"padding": "same"},
    {"padding": "same", "dilation": 3},
    {"padding": "valid", "dilation": 2, "stride": 2},
    {"padding": 2, "padding_mode": "circular"},
    {"padding": "same", "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate", "stride": 2},
    {"groups": 2, "padding": 1},
    {"groups": 4, "bias": False},
]


@pytest.mark.parametrize("options", CONV, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv(dims: int, options: dict[str, Any]) -> None:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    kernel = (3, 2, 3)[:dims]
    model = nn.Sequential(kind(4, 8, kernel, **options), relu(), kind(8, 2, 1))
    compare(model, (randn(3, 4, *(9, 8, 7)[:dims]),))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_by_gram_matrices(dims: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(
        kind(12, 30, 3, padding=1, stride=2), relu(), kind(30, 40, 2, dilation=2, padding=2)
    )
    compare(model, (randn(3, 12, *([3] * dims)),))


@pytest.mark.parametrize("dims", [1, 2])
def test_wide_conv(dims: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d)[dims - 1]
    model = nn.Sequential(kind(64, 64, 2, padding=1, stride=2, dilation=3), relu(), kind(64, 65, 1))
    compare(model, (randn(2, 64, *([20] * dims)),))


def test_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), relu(), nn.Conv2d(6, 4, 2))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compare(model, (randn(3, 4, 6, 6).to(memory_format=torch.channels_last),))


NORM = {
    "group": nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6), relu(), nn.Conv2d(6, 4, 2)),
    "instance": nn.Sequential(nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, affine=True), relu()),
    "first": nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 2)),
    "channels": nn.Sequential(nn.Flatten(1), nn.Linear(100, 6), nn.GroupNorm(2, 6)),
    "layer": nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6), nn.LayerNorm((5, 6)), relu()),
    "layer, no bias": nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, bias=False)),
    "whole": nn.Sequential(nn.LayerNorm((4, 5, 5)), nn.Linear(5, 6)),
    "rms": nn.Sequential(nn.RMSNorm(5), nn.Linear(5, 6), nn.RMSNorm((5, 6), eps=1e-3), relu()),
    "plain": nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False)),
}


@pytest.mark.parametrize("name", NORM)
def test_norms(name: str) -> None:
    model = NORM[name].double()
    for param in model.parameters():
        nn.init.normal_(param)
    compare(model, (randn(3, 4, 5, 5),))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm(dims: int) -> None:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    compare(kind(4, affine=True), (randn(3, 4, *([3] * dims)),))


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_half_frozen_norm(part: str) -> None:
    model = nn.Sequential(
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.LayerNorm(5),
        nn.Linear(5, 2),
        nn.Conv1d(4, 3, 1),
    )
    for module in model:
        getattr(module, part).requires_grad_(False)
    compare(model, (randn(3, 4, 5),))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("shape", [(4,), (4, 9), (3, 2, 5)])
def test_embedding(tied: bool, padding: int | None, shape: tuple[int, ...]) -> None:
    compare(Embedded(tied, padding, bias=True), (torch.randint(0, 11, shape),))


@pytest.mark.parametrize("mode", ["self", "causal", "padded", "weights", "kv", "cross"])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_zero_attn": True}], ids=str)
def test_attention(mode: str, options: dict[str, Any]) -> None:
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    other = [randn(3, 4, 8) for _ in range(2)]
    compare(Attention(mode, **options), (randn(3, 5, 8), *other, padding))


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
@pytest.mark.parametrize("mode", ["self", "cross"])
def test_attention_half_frozen(mode: str, frozen: str) -> None:
    model = Attention(mode)
    model.attention.get_parameter(frozen).requires_grad_(False)
    compare(model, (randn(3, 5, 8), randn(3, 4, 8), randn(3, 4, 8)))


@pytest.mark.parametrize("bias", [True, False])
def test_attention_with_other_sizes(bias: bool) -> None:
    model = Attention("cross", kdim=5, vdim=7, bias=bias)
    compare(model, (randn(3, 5, 8), randn(3, 4, 5), randn(3, 4, 7)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "bias": False}], ids=str)
def test_transformer_encoder(options: dict[str, Any], training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    compare(model, (randn(3, 5, 8),))


def test_transformer_decoder() -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    compare(nn.TransformerDecoder(layer, 2), (randn(3, 5, 8), randn(3, 4, 8)))


def test_module_used_several_times() -> None:
    compare(Reused(), (randn(4, 3, 6),))


def test_the_same_attention_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.attention(x, x, x)[0]
            x = self.attention(x, y, x, need_weights=False)[0]
            return self.attention(x, y, y, need_weights=False)[0]

    compare(Twice(), (randn(3, 5, 8), randn(3, 5, 8)))


def test_tied_linears() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    model[3].bias = model[0].bias
    for shape in ((4, 6), (4, 3, 6), (4, 30, 6)):
        compare(model, (randn(shape),))


def test_frozen_and_low_rank() -> None:
    compare(Low(), (randn(4, 6),))
    compare(Low(), (randn(4, 7, 6),))
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    compare(model, (randn(6, 5),))
    model[0].requires_grad_(False)
    compare(model, (randn(6, 4, 5),))


FALLBACK: dict[str, tuple[nn.Module, list[tuple[int, ...]]]] = {
    "prelu": (nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 2)), [(3, 4)]),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 4, 2, stride=2)), [(3, 3, 4, 4)]),
    "bilinear": (Pair(), [(3, 4), (3, 3)]),
}


@pytest.mark.parametrize("name", FALLBACK)
def test_replayed_modules(name: str) -> None:
    model, shapes = FALLBACK[name]
    model = model.double()
    compare(model, tuple(randn(shape) for shape in shapes))


def test_parameters_of_a_container() -> None:
    compare(Owner(), (randn(3, 5, 4),))


def test_parametrized_weight() -> None:
    weight_norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2))
    compare(model, (randn(3, 4),))


class Recurrent(nn.Module):
    """A recurrent layer between linear maps; the loss sees outputs and last states."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(3, 4)
        self.recurrent = kind(4, 5, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.recurrent(self.before(x))
        last = state if isinstance(state, Tensor) else torch.cat(state)
        return torch.cat([out.flatten(1), last.transpose(0, 1).flatten(1)], 1)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}], ids=str
)
@pytest.mark.parametrize("steps", [1, 6])
def test_recurrent(kind: type[nn.RNNBase], options: dict[str, Any], steps: int) -> None:
    compare(Recurrent(kind, **options), (randn(3, steps, 3),))


def test_recurrent_variants() -> None:
    compare(Recurrent(nn.RNN, nonlinearity="relu"), (randn(3, 4, 3),))
    model = Recurrent(nn.LSTM)
    model.recurrent.weight_hh_l0.requires_grad_(False)
    model.recurrent.bias_ih_l0.requires_grad_(False)
    compare(model, (randn(3, 4, 3),))

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)
            self.start = nn.Linear(2, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.start(y).unsqueeze(0)
            return self.lstm(x, (h, h.tanh()))[0]

    compare(Started(), (randn(3, 4, 4), randn(3, 2)))


@pytest.mark.parametrize("block", [1, 300, 1 << 25])
def test_convolutions_that_save_memory(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """The way of a GPU: gradients that are not kept, in blocks of examples."""
    monkeypatch.setattr(conv, "keeping_pays", lambda *_: False)
    monkeypatch.setattr(conv, "_BLOCK_CPU", block)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, 1, 1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=False),
        nn.Conv2d(6, 70, 3, padding=1),
    )
    compare(model, (torch.randn(5, 2, 6, 6),))
    monkeypatch.setattr(conv, "_CHANNELS", 1)
    compare(model, (torch.randn(5, 2, 6, 6),))
    monkeypatch.setattr(conv, "keeping_pays", lambda *_: True)
    compare(model, (torch.randn(5, 2, 6, 6),))


@pytest.mark.parametrize("limit", [0, 1 << 15])
def test_rows_joined_or_not(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(core, "_JOINED_CPU", limit)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(9, 8), layer, nn.Linear(8, 3), nn.ReLU(inplace=True))
    compare(model, (torch.randint(0, 9, (4, 5)),))

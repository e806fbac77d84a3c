"""Random architectures against the naive reference."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive import compare
from torch import Tensor, nn

SETTINGS = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def mlps(draw: Any) -> tuple[nn.Module, Tensor]:
    """Linear maps with shared modules, tied weights, frozen parameters and extra dimensions."""
    width = draw(st.integers(1, 9))
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 5))):
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        choice = draw(st.sampled_from(["new", "new", "again", "tied", "norm"]))
        if choice == "norm":
            layers.append(draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm]))(width))
        elif choice == "again" and linears:
            layers.append(draw(st.sampled_from(linears)))
        else:
            layer = nn.Linear(width, width, bias=draw(st.booleans()))
            if choice == "tied" and linears:
                layer.weight = draw(st.sampled_from(linears)).weight
            layers.append(layer)
        layers.append(draw(st.sampled_from([nn.Tanh(), nn.ReLU(inplace=True), nn.Identity()])))
    layers.append(nn.Linear(width, draw(st.integers(1, 12))))
    model = nn.Sequential(*layers)
    params = list(model.parameters())
    for param in params[:-1]:
        param.requires_grad_(draw(st.integers(0, 4)) > 0)
    extra = draw(st.lists(st.integers(1, 12), max_size=2))
    return model, torch.randn(draw(st.integers(1, 5)), *extra, width)


@st.composite
def cnns(draw: Any) -> tuple[nn.Module, Tensor]:
    """Convolutions of one kind with random options, normalised or not."""
    dims = draw(st.integers(1, 3))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    channels = draw(st.sampled_from([2, 4, 12]))
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))
        out = draw(st.sampled_from([2, 4, 20]))
        options: dict[str, Any] = {"bias": draw(st.booleans())}
        options["groups"] = draw(st.sampled_from([1, 1, 2]))
        options["dilation"] = draw(st.integers(1, 2))
        if draw(st.booleans()):
            options["padding"] = "same"
        else:
            options["padding"] = draw(st.integers(2, 3))
            options["stride"] = draw(st.integers(1, 2))
        mode = draw(st.sampled_from(["zeros", "zeros", "circular", "replicate"]))
        layers.append(kind(channels, out, size, padding_mode=mode, **options))
        channels = out
        layers.append(
            draw(st.sampled_from([nn.GroupNorm(2, out), nn.Identity(), nn.ReLU(inplace=True)]))
        )
    spatial = draw(st.lists(st.integers(4, 6), min_size=dims, max_size=dims))
    layers += [nn.Flatten(2), nn.AdaptiveAvgPool1d(3), nn.Flatten(1), nn.Linear(3 * channels, 3)]
    first = layers[0]
    assert isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    x = torch.randn(draw(st.integers(1, 4)), first.in_channels, *spatial)
    return nn.Sequential(*layers), x


class Language(nn.Module):
    """Embedding, encoder layers (perhaps one used several times) and a head, perhaps tied."""

    def __init__(self, depth: int, shared: bool, tied: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, padding_idx=options.pop("padding"))
        count = 1 if shared else depth
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)
            for _ in range(count)
        )
        self.depth = depth
        self.head = nn.Linear(8, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        for position in range(self.depth):
            x = self.layers[position % len(self.layers)](x)
        return self.head(x)


@SETTINGS
@given(mlps(), st.integers(0, 10**6))
def test_mlps(case: tuple[nn.Module, Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    compare(case[0], (case[1],))


@SETTINGS
@given(cnns(), st.integers(0, 10**6))
def test_cnns(case: tuple[nn.Module, Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    compare(case[0], (case[1],), tol=1e-9)


@SETTINGS
@given(
    depth=st.integers(1, 3),
    shared=st.booleans(),
    tied=st.booleans(),
    norm_first=st.booleans(),
    bias=st.booleans(),
    padding=st.sampled_from([None, 0]),
    examples=st.integers(1, 4),
    tokens=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_transformers(
    depth: int,
    shared: bool,
    tied: bool,
    norm_first: bool,
    bias: bool,
    padding: int | None,
    examples: int,
    tokens: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    options = {"norm_first": norm_first, "bias": bias, "padding": padding}
    model = Language(depth, shared, tied, options)
    compare(model, (torch.randint(0, 9, (examples, tokens)),))

"""The engine on CUDA tensors: layers against one-example-at-a-time autograd, and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from naive import batch_loss, close, compare, per_example, reference
from torch import Tensor, nn

from diminuendo.training.clipping import Engine, Flat
from diminuendo.training.clipping.certificate import ALLOWANCE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Attention(nn.Module):
    """A linear map and attention of its result to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.attention(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


class Scale(nn.Module):
    """A layer the engine does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def sequence() -> Tensor:
    return torch.randn(5, 7, 8)


def images() -> Tensor:
    return torch.randn(5, 3, 9, 9)


def tokens() -> Tensor:
    return torch.randint(0, 11, (5, 7))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)),
        lambda: torch.randn(5, 6),
    ),
    "linear tokens": (
        lambda: nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3)),
        sequence,
    ),
    "conv1d": (lambda: nn.Conv1d(7, 4, 3, padding=1), sequence),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 2)),
        images,
    ),
    "conv2d grouped": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3, padding=2, dilation=2), nn.Tanh()),
        images,
    ),
    "conv2d wide": (lambda: nn.Conv2d(3, 70, 8), images),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), tokens),
    "tied": (Tied, tokens),
    "layer norm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), sequence),
    "rms norm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6)), sequence),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)), images),
    "attention": (Attention, sequence),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        sequence,
    ),
    "gru": (lambda: Recurrent(nn.GRU(8, 5, batch_first=True)), sequence),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 5, batch_first=True)), sequence),
    "fallback": (lambda: nn.Sequential(nn.Linear(8, 6), Scale()), sequence),
}


class Recurrent(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """TF32 would hide errors of the size that is looked for."""
    backends: tuple[Any, Any] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


def case(name: str) -> tuple[nn.Module, Tensor]:
    model, x = CASES[name]
    return model().cuda(), x().cuda()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_layers_against_one_example_at_a_time(name: str, dtype: torch.dtype, tol: float) -> None:
    torch.set_default_dtype(dtype)
    model, x = case(name)
    with torch.backends.cudnn.flags(enabled=name not in ("gru", "lstm"), allow_tf32=False):
        compare(model, (x,), tol=tol)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("gru", "lstm")])
def test_bfloat16_autocast(name: str) -> None:
    """Sums in float32, and near those of the same pass one example at a time."""
    torch.set_default_dtype(torch.float32)
    model, x = case(name)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(*batch)
        return out.float().square().flatten(1).sum(1)

    grads = per_example(copy.deepcopy(model), (x,), loss)
    bound = float(torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt().median())
    norms, sums = reference(grads, Flat(bound), [])
    with Engine(model) as engine:
        result = engine.clipped_sum(loss(model, (x,)), Flat(bound))
    assert result.norms.dtype == torch.float64
    assert all(total.dtype == torch.float32 for total in result.sums)
    close(result.norms, norms, 0.05, "norms")
    whole = torch.cat([total.flatten() for total in result.sums])
    close(whole, torch.cat([total.flatten() for total in sums]), 0.05, "sums")


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_have_the_type_of_the_parameters(dtype: torch.dtype, static: bool) -> None:
    """So that they can be assigned to ``p.grad``."""
    torch.set_default_dtype(dtype)
    model = nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 8)).cuda()
    with Engine(model, static=static) as engine:
        result = engine.clipped_sum(batch_loss(model, (torch.randn(30, 20).cuda(),)), Flat(0.5))
    for param, total in zip(engine.parameters, result.sums, strict=True):
        param.grad = total


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding", "transformer"])
def test_a_broken_example_contributes_nothing(name: str) -> None:
    model, x = case(name)
    weights = torch.ones(len(x)).cuda()
    weights[1], weights[3] = float("nan"), float("inf")
    good = x[[0, 2, 4]]
    with Engine(model) as engine:
        expected = engine.clipped_sum(batch_loss(model, (good,)), Flat(0.5))
        result = engine.clipped_sum(batch_loss(model, (x,)) * weights, Flat(0.5))
    assert result.nonfinite == 2
    for actual, total in zip(result.sums, expected.sums, strict=True):
        close(actual, total, 1e-10, "sums")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["linear", "conv2d", "transformer"])
def test_compiled_by_inductor(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    model, x = case(name)
    with Engine(model) as engine:
        expected = engine.clipped_sum(batch_loss(model, (x,)), Flat(0.5))
    torch._dynamo.reset()
    compiled: Any = torch.compile(model)
    with Engine(compiled) as engine:
        for _ in range(2):
            actual = engine.clipped_sum(batch_loss(compiled, (x,)), Flat(0.5))
            close(actual.norms, expected.norms, 1e-4, "norms")
            for a, b in zip(actual.sums, expected.sums, strict=True):
                close(a, b, 1e-4, "sums")


WIDE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vectors": (lambda: nn.Sequential(nn.Linear(200, 150), nn.Linear(150, 80)), (300, 200)),
    "tokens": (lambda: nn.Linear(128, 256), (40, 17, 128)),
    "convolution": (lambda: nn.Conv2d(32, 64, 3, padding=1), (40, 32, 12, 12)),
    "few positions": (lambda: nn.Conv2d(64, 128, 3), (40, 64, 4, 4)),
    "groups": (lambda: nn.Conv2d(64, 128, 3, groups=2), (40, 64, 8, 8)),
}


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_certified_sums(name: str, tf32: bool) -> None:
    """Near the sums in float64, and no contribution above the bound."""
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    make, shape = WIDE[name]
    model, x, bound = make().cuda(), torch.randn(shape).cuda(), 1e-2
    with Engine(model) as engine:

        def run(x: Tensor) -> Tensor:
            losses = model(x).flatten(1).square().sum(1)
            made = engine.clipped_sum(losses, Flat(bound), certify=True).sums
            return torch.cat([part.flatten() for part in made])

        quick = run(x)
        coarse = dict(engine._summation.precise)
        assert not coarse, "the quick sums were good enough"
        engine._summation.precise = dict.fromkeys(range(len(engine.parameters)), 9)
        assert float((run(x) - quick).norm()) <= ALLOWANCE * bound
        for i in range(3):
            size = float(run(x[i : i + 1]).norm())
            assert 0.9 * bound <= size <= bound * (1 + ALLOWANCE)

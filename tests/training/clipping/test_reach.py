"""Models that use parameters in ways of their own: exact, whatever N is, or refused.

Each is run with N equal to each other size in it, and with another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from naive import batch_loss, close, compare, per_example, reference
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from diminuendo.training.clipping import Engine, EngineError, Flat, MixedExamples

SIZES = (2, 3, 4, 5, 6, 7, 9)  # the sizes below are 2, 3, 4, 6 and 7


class Model(nn.Module):
    """A body between an embedding of T = 7 tokens in 6 dimensions and 3 outputs for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).tanh())

    def body(self, x: Tensor) -> Tensor:
        return x


class Positions(Model):
    """Positions that are looked up once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(9, 6)

    def body(self, x: Tensor) -> Tensor:
        return x + self.positions(torch.arange(x.shape[1]))


class Bias(Model):
    """A bias (heads, T, T) for attention, looked up by relative position."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.qkv = nn.Embedding(13, 2), nn.Linear(6, 18)

    def body(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        place = torch.arange(t)
        bias = self.bias(place[:, None] - place + t - 1).permute(2, 0, 1)
        q, k, v = self.qkv(x).view(n, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).reshape(n, t, d)


class Queries(Model):
    """Learned queries attend to the batch, then values that are the same for all examples."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.kv = nn.Parameter(torch.randn(1, 2, 7, 3)), nn.Linear(6, 12)
        self.other = nn.Linear(3, 3)

    def body(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        k, v = self.kv(x).view(n, t, 2, 2, 3).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(self.queries, k, v, dropout_p=self.dropout)
        same = self.other(torch.ones_like(k))
        again = F.scaled_dot_product_attention(seen, k, same, None, self.dropout)
        return (seen + again).transpose(1, 2).reshape(n, t, d)


class TimeFirst(Model):
    """(T, N, d) inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())

    def body(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Folded(Model):
    """Tokens folded into the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def body(self, x: Tensor) -> Tensor:
        flat = self.inner(x.reshape(-1, 6)) * self.scale
        return flat.view(x.shape)


class Token(Model):
    """A learned token in front, positions on top, a number that scales it all."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(8, 6))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def body(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return x * self.scale.exp()


class Cells(Model):
    """A cell whose state is made of its output: neither may be counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)

    def body(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 6)
        outs = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            outs.append(h)
        return torch.stack(outs, 1)


class Both(Model):
    """Two outputs of a module with a parameter of its own, one made of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.embed(x) * self.scale).tanh()
        return torch.cat([self.head(hidden).flatten(1), hidden.flatten(1)], 1)


@dataclasses.dataclass
class Result:
    logits: Tensor


class Boxed(Model):
    """A module with a parameter of its own that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Result:  # type: ignore[override]
        return Result(super().forward(x) * self.scale)


class Routed(Model):
    """Tokens that go to one of two experts, one of which may get none of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        share = self.gate(flat).softmax(-1)
        out = torch.zeros_like(flat)
        for position, expert in enumerate(self.experts):
            (where,) = (share.argmax(-1) == position).nonzero(as_tuple=True)
            out.index_add_(0, where, expert(flat[where]) * share[where, position, None])
        return out.view_as(x)


class Picked(Model):
    """Experts whose weights are one parameter; the loop is over those that any token goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.weights = nn.Parameter(torch.randn(4, 6, 6))

    def body(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        share, chosen = self.gate(flat).softmax(-1).topk(2)
        with torch.no_grad():
            mask = F.one_hot(chosen, 4).permute(2, 1, 0)
            hit = (mask.sum((-1, -2)) > 0).nonzero()
        out = torch.zeros_like(flat)
        for number in hit:
            expert = number[0]
            position, where = torch.where(mask[expert])
            hidden = F.linear(flat[where], self.weights[expert]).tanh()
            out.index_add_(0, where, hidden * share[where, position, None])
        return out.view_as(x)


class WrittenOver(Model):
    """An operation that is repeated, and whose result another one writes on in place."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(6, 2, 3))

    def body(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bih,dnh->bind", x[..., :3], self.kernel).flatten(2)[..., :6]
        scores *= 0.5
        return x + scores


class Tied(Model):
    """A weight that another part of the model reads, turned."""

    def body(self, x: Tensor) -> Tensor:
        return (x @ self.embed.weight).tanh() @ self.embed.weight.T


class Saved(Token):
    """A part with parameters of its own under gradient checkpointing."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        return checkpoint(super().body, x, use_reentrant=self.reentrant)


class SavedOtherwise(Saved):
    reentrant = True


class Doubled(Model):
    """One pass over two halves of a doubled batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def body(self, x: Tensor) -> Tensor:
        first, second = self.inner(torch.cat([x, x.sin()])).chunk(2)
        return first * second


class Sequences(Model):
    """Recurrent layers and attention with the examples second."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 4, dropout=0.0)

    def body(self, x: Tensor) -> Tensor:
        return self.layer(self.lstm(x.transpose(0, 1))[0]).transpose(0, 1)


class Tables(Model):
    """Constants looked up by the batch, and a table looked up by constants, both one a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.segment = torch.randn(5, 6), nn.Embedding(2, 6)

    def body(self, x: Tensor) -> Tensor:
        index = (x[:, :, 0] * 3).long().remainder(5)
        places = self.table.index_select(0, index.view(-1)).view(x.shape)
        places += self.segment(torch.zeros(len(x), 1, dtype=torch.long))
        x = x + places
        x[index == 2] = self.segment.weight[1]
        order = index.flatten().argsort()
        return x.reshape(-1, 6)[order][order.argsort()].view(x.shape)


class Overwritten(Model):
    """Tables made of parameters that are changed in place after they met the batch, or before."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(7, 6), nn.Parameter(torch.rand(6))

    def body(self, x: Tensor) -> Tensor:
        scale = self.scale * 1.5
        x = x + scale
        scale.mul_(2)
        x = x + scale
        scale[:3].mul_(3)
        x = x + scale
        scale[0] = 1.5
        looked = self.table(torch.arange(7))
        x = x + looked
        looked[2] = 0.5
        looked[4:].mul_(2)
        each = self.table(torch.full((len(x),), 3))
        each[:, :2].mul_(0.5)
        return x + scale + looked + each[:, None]


class Assembled(Model):
    """Learned rows that are written on constants, as many as an example asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(7, 6))

    def body(self, x: Tensor) -> Tensor:
        table, parts = torch.zeros_like(x), torch.zeros(7, 6)
        for i, number in enumerate((x[:, 0, 0] * 3).long().remainder(5).tolist()):
            table[i, : number + 1] = self.places[: number + 1]
            table[i, number + 1 :] = self.places[0]
        parts[:2].copy_(self.places[:2] * 2)
        return x + table + parts


class OneByOne(Model):
    """A loop over the examples, each with learned rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.token, self.places = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(7, 6))
        self.blend = nn.Conv1d(6, 6, 3, padding=1)

    def body(self, x: Tensor) -> Tensor:
        outs = []
        for i in range(len(x)):
            part = torch.cat([self.token, self.inner(x[i])])[:-1] + self.places
            part = self.norm(part) * part.mean(0).exp() + part.select(0, 2)
            outs.append(self.blend(part.t().unsqueeze(0)).squeeze(0).t())
        return torch.stack(outs)


class Lengths(Model):
    """Examples of different lengths, packed for a layer and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.end = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def body(self, x: Tensor) -> Tensor:
        lengths = [1 + int(part[0, 0] * 3) % 6 for part in x]
        parts = [
            torch.cat([part[:size], self.end[None]]) for part, size in zip(x, lengths, strict=True)
        ]
        packed = self.inner(torch.cat(parts)).tanh()
        out = torch.zeros_like(x)
        for i, part in enumerate(packed.split([size + 1 for size in lengths])):
            out[i, : len(part)] = part * self.end
        return out


class Padded(Model):
    """Parts of different lengths that are padded to one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)

    def body(self, x: Tensor) -> Tensor:
        parts = [part[: 1 + int(part[0, 0] * 3) % 6] for part in x]
        whole = self.inner(nn.utils.rnn.pad_sequence(parts, batch_first=True))
        return x + F.pad(whole, (0, 0, 0, 7 - whole.shape[1]))


class ConstantValues(Model):
    """Attention that goes by the batch, to values that are no part of it, the examples second."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2)

    def body(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attend(x, x, torch.ones_like(x).cumsum(-1))[0].transpose(0, 1)


class Bags(Model):
    """Layers without code of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.pair = nn.EmbeddingBag(5, 6, mode="mean"), nn.Bilinear(6, 6, 6)
        self.slope, self.projected = nn.PReLU(7), nn.LSTM(6, 6, proj_size=2, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        index = (x[:, :, 0] * 3).long().remainder(5)
        x = self.slope(self.pair(x, x.sin()) + self.bag(index)[:, None])
        return torch.cat([x[..., :4], self.projected(x)[0]], -1)


class Replaced(Model):
    """Layers that are called with other weights than their parameters, made of those."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.convolve = nn.Conv1d(6, 6, 3, padding=1)

    def body(self, x: Tensor) -> Tensor:
        x = functional_call(self.inner, {"weight": self.inner.weight.tanh()}, (x,))
        x = functional_call(self.norm, {"bias": self.inner.bias * 2}, (x,))
        made = {"out_proj.weight": self.attend.out_proj.weight.t()}
        x = functional_call(self.attend, made, (x, x, x))[0]
        kernel = self.convolve.weight
        made = {"weight": kernel - kernel.mean((1, 2), keepdim=True)}
        return functional_call(self.convolve, made, (x.mT,)).mT


class Pruned(Model):
    """Layers whose weights are made anew before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.words = nn.Linear(6, 6), nn.Embedding(5, 6)
        self.recurrent = nn.GRU(6, 3, batch_first=True, bidirectional=True)
        self.normed = nn.LSTM(6, 6, batch_first=True)
        for module, name in (
            (self.inner, "weight"),
            (self.inner, "bias"),
            (self.words, "weight"),
            (self.recurrent, "weight_ih_l0"),
        ):
            prune.l1_unstructured(module, name, 3)
        weight_norm(self.normed, "weight_hh_l0")

    def body(self, x: Tensor) -> Tensor:
        words = self.words((x[:, :, 0] * 3).long().remainder(5))
        return self.normed(self.recurrent(self.inner(x) + words)[0])[0]


class Waves(Model):
    """Complex numbers: products, a function that PyTorch repeats, learned turns."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.rand(4, 4))
        self.kernel, self.turn = nn.Parameter(torch.randn(4, 3, 2)), nn.Parameter(torch.rand(3))

    def body(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x, dim=1).mT @ torch.complex(self.real, self.imaginary)
        waves = torch.einsum("ndw,wk->ndk", waves, torch.view_as_complex(self.kernel))
        waves = waves * torch.polar(torch.ones(3), self.turn)
        return torch.fft.irfft(waves, n=7).mT


class Sparse(Model):
    """Gradients that PyTorch keeps sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 6, mode="sum", sparse=True)
        self.positions = nn.Embedding(9, 6, sparse=True)

    def body(self, x: Tensor) -> Tensor:
        index = (x[:, :, 0] * 3).long().remainder(5)
        return x + self.bag(index)[:, None] + self.positions(torch.arange(7)).tanh()


class Grid(Model):
    """Places in a picture of 2 by 3: the table of each side is repeated along the other, which may
    be as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.cols = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3, 3))
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def body(self, x: Tensor) -> Tensor:
        place = torch.cat([self.cols[None].repeat(2, 1, 1), self.rows[:, None].expand(2, 3, 3)], -1)
        place = self.norm(self.inner(place)).permute(2, 0, 1)[None].repeat(len(x), 1, 1, 1)
        return x[:, :6] + place.flatten(2).transpose(1, 2)


class Heads(Model):
    """A bias that the heads share, each with a slope of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 7, 7))

    def body(self, x: Tensor) -> Tensor:
        q = x.view(len(x), 7, 2, 3).transpose(1, 2)
        bias = self.bias.expand(2, -1, -1) * torch.tensor([1.0, 0.5]).view(2, 1, 1)
        mixed = F.scaled_dot_product_attention(q, q, q, bias) + (q @ q.mT + bias).softmax(-1) @ q
        return mixed.transpose(1, 2).reshape(x.shape)


class Rotated(Model):
    """Constants, as many as there are blocks, become rotations by what is written on them."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.other = nn.Parameter(torch.rand(3, 2, 2)), nn.Parameter(torch.rand(3, 2, 2))

    def body(self, x: Tensor) -> Tensor:
        blocks = torch.eye(2).repeat(3, 1, 1)
        blocks.add_(self.turn, alpha=2)
        blocks.add_(self.turn @ self.turn)
        solved = torch.linalg.solve(torch.eye(2).expand(3, 2, 2) + self.other, blocks)
        folded = x.unflatten(-1, (3, 2))
        return torch.einsum("...rk,rkc->...rc", folded, solved).flatten(-2)


class Measured(Model):
    """A constant is made a parameter anew in every pass."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.rand(6))
        self.register_buffer("constant", torch.randn(8, 6))

    def body(self, x: Tensor) -> Tensor:
        weight = nn.Parameter(self.constant.T)
        return x * (self.size / (weight + 2 * self.constant.T).norm(dim=1))


class WrittenOn(Model):
    """What was spread over the examples is changed in place before it meets them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, 1, 6))

    def body(self, x: Tensor) -> Tensor:
        tokens = self.tokens.repeat(len(x), 3, 1)
        tokens[:, 1] = tokens[:, 1] * 2
        tokens[:, 0].mul_(3)
        return torch.cat([tokens, x], 1)


class TimeOutermost(Model):
    """Tokens folded into the first dimension, those of one time after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def body(self, x: Tensor) -> Tensor:
        flat = self.inner(x.transpose(0, 1).reshape(-1, 6)) * self.scale
        return flat.view(7, len(x), 6).transpose(0, 1)


class Started(Model):
    """Learned states to start from, of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.start = nn.GRU(6, 6, 2, batch_first=True), nn.Parameter(torch.randn(2, 6))

    def body(self, x: Tensor) -> Tensor:
        out, last = self.inner(x, self.start[:, None].expand(-1, len(x), -1).contiguous())
        return out + last[1][:, None]


class Parts(Model):
    """Two examples at a time, the last of them alone if their number is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def body(self, x: Tensor) -> Tensor:
        return torch.cat([part * self.scale for part in x.split(2)])


class Windows(Model):
    """Windows over the tokens, and a table in front of whose indices another dimension stands."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.table = (
            nn.Parameter(torch.randn(2, 6)),
            nn.Parameter(torch.randn(3, 4, 6)),
        )

    def body(self, x: Tensor) -> Tensor:
        seen = (x.unfold(1, 2, 1).transpose(2, 3) * self.window).sum(2)
        return seen + self.table[:, (x[:, :6, 0] > 0).long() + 1].sum(0)


HEALTHY = [
    Positions, Bias, Queries, TimeFirst, Folded, Token, Cells, Both, Boxed, Routed, Picked,
    WrittenOver, Tied, Saved, SavedOtherwise, Doubled, Sequences, Tables, Overwritten, Assembled,
    OneByOne, Lengths, Padded, ConstantValues, Bags, Replaced, Pruned, Waves, Sparse, Grid, Heads,
    Rotated, Measured, WrittenOn, TimeOutermost, Started, Parts, Windows,
]  # fmt: skip


def logits(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    def call(x: Tensor) -> Tensor:
        out = model(x)
        return out.logits if isinstance(out, Result) else out

    return batch_loss(call, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("examples", SIZES)
@pytest.mark.parametrize("kind", HEALTHY)
def test_exact_whatever_the_batch_size(kind: type[Model], examples: int) -> None:
    model, x = kind(), torch.randn(examples, 7, 2)
    # Reentrant checkpoints know only backward().
    grads = per_example_by_backward(model, x)
    clip = Flat(
        float(torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads]).sum(0).median())
        ** 0.5
    )
    norms, sums = reference(grads, clip, [])
    with Engine(model) as engine:
        result = engine.clipped_sum(logits(model, (x,)), clip)
    close(result.norms, norms, 1e-10, "norms")
    floor = 1e-3 * max(float(total.abs().max()) for total in sums)
    for name, actual, expected in zip(engine.names, result.sums, sums, strict=True):
        close(actual, expected, 1e-10, name, floor)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [kind for kind in HEALTHY if kind not in (Lengths, Padded)])
def test_an_example_that_is_not_finite_adds_nothing_and_reaches_no_other(
    kind: type[Model], value: float
) -> None:
    model, x = kind(), torch.randn(5, 7, 2)
    others = torch.tensor([0, 2, 3, 4])
    spoilt = x.clone()
    spoilt[1, :, 1] = value
    with Engine(model) as engine:
        expected = engine.clipped_sum(logits(model, (x[others],)), Flat(0.5))
        result = engine.clipped_sum(logits(model, (spoilt,)), Flat(0.5))
    assert result.nonfinite == 1
    for name, actual, total in zip(engine.names, result.sums, expected.sums, strict=True):
        close(actual, total, 1e-10, name, 1e-3)


def per_example_by_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    rows = []
    for i in range(len(x)):
        model.zero_grad()
        logits(model, (x[i : i + 1],)).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        rows.append([grad.to_dense() for grad in grads])
        model.zero_grad()
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", HEALTHY)
def test_the_same_on_a_gpu(kind: type[Model]) -> None:
    """There the backward pass, and what a checkpoint does again, run in a thread of their own."""
    model, x = kind(), torch.randn(5, 7, 2)
    with Engine(model) as engine:
        expected = engine.clipped_sum(logits(model, (x,)), Flat(0.5))
    for name, buffer in vars(model).items():
        if isinstance(buffer, Tensor):
            setattr(model, name, buffer.cuda())
    model.cuda()
    with torch.device("cuda"), Engine(model) as engine:
        actual = engine.clipped_sum(logits(model, (x.cuda(),)), Flat(0.5))
    for total, other in zip(actual.sums, expected.sums, strict=True):
        close(total.cpu(), other, 1e-9, "sum", 1e-3)


class Pictured(nn.Module):
    """Texts with pictures, which come in pieces; word 8 stands for a piece."""

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.look, self.words = nn.Linear(4, 6), nn.Embedding(9, 6)
        self.places, self.mixing = nn.Parameter(torch.randn(1, 4, 3, 3)), mixing
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, pieces: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        where = (words == 8).nonzero()[:, 1].double() / 7
        grid = torch.stack([where, where.sin()], -1)[None, :, None]
        pieces = pieces + F.grid_sample(self.places, grid, align_corners=False)[0, ..., 0].T
        seen = self.look(pieces).tanh()
        if self.mixing:
            seen = seen + seen.mean(0)
        x = self.words(words).masked_scatter((words == 8)[..., None], seen)
        return self.head(self.norm(x)) * mask[..., None]


def pictured(
    model: Pictured, counts: list[int]
) -> tuple[Tensor, Callable[[slice, Tensor], Tensor]]:
    """Pieces of pictures, and the losses of some of the examples, given their pieces."""
    words = torch.randint(0, 8, (len(counts), 7))
    for row, count in enumerate(counts):
        words[row, 2 : 2 + count] = 8
    mask = torch.ones(len(counts), 7, dtype=torch.long)

    def losses(rows: slice, pieces: Tensor) -> Tensor:
        return model(pieces, words[rows], mask[rows]).square().flatten(1).sum(1)

    return torch.randn(sum(counts), 4), losses


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("examples", [2, 3, 5])
def test_pictures_in_pieces_beside_texts(examples: int, pieces: int) -> None:
    """The first input may have more rows than there are examples."""
    model = Pictured()
    given, losses = pictured(model, [pieces] * examples)
    grads = [
        torch.autograd.grad(losses(slice(i, i + 1), part).sum(), list(model.parameters()))
        for i, part in enumerate(given.split(pieces))
    ]
    norms, sums = reference(
        [torch.stack(column) for column in zip(*grads, strict=True)], Flat(0.5), []
    )
    with Engine(model) as engine:
        result = engine.clipped_sum(losses(slice(None), given), Flat(0.5))
    close(result.norms, norms, 1e-10, "norms")
    for name, actual, expected in zip(engine.names, result.sums, sums, strict=True):
        close(actual, expected, 1e-10, name, 1e-3)


class Named(nn.Module):
    """Compares the picture of each example with the names of several objects, as OWL-ViT does."""

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.look, self.words, self.mixing = nn.Linear(4, 6), nn.Embedding(9, 6), mixing
        self.read, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def forward(self, pictures: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        seen = self.look(pictures).tanh()
        named = self.read((self.words(words) * mask[..., None]).mean(1)).tanh() * self.scale
        named = named.reshape(len(pictures), -1, 6)
        return seen @ (named.roll(1, 0) if self.mixing else named).mT


@pytest.mark.parametrize("names", [2, 3])
@pytest.mark.parametrize("examples", [1, 2, 3, 4, 6])
def test_several_names_for_each_picture(examples: int, names: int) -> None:
    model, pictures = Named(), torch.randn(examples, 4, 4)
    words = torch.randint(0, 9, (examples, names, 4))

    def losses(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        seen, texts = batch
        texts = texts.flatten(0, 1)
        out: Tensor = m(seen, texts, torch.ones_like(texts))
        return out.sin().flatten(1).sum(1)

    compare(model, (pictures, words), loss=losses)
    if examples > 1:
        with Engine(Named(mixing=True)) as engine, pytest.raises(MixedExamples):
            engine.clipped_sum(losses(engine.model, (pictures, words)), Flat(1.0))


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_pieces_that_see_those_of_others_are_refused(pieces: int) -> None:
    model = Pictured(mixing=True)
    given, losses = pictured(model, [pieces] * 4)
    with Engine(model) as engine, pytest.raises(MixedExamples):
        engine.clipped_sum(losses(slice(None), given), Flat(1.0))


@pytest.mark.parametrize("counts", [[1, 2, 1, 2], [1, 3, 2, 2], [4, 1, 0, 3]])
@pytest.mark.parametrize("mixing", [False, True])
def test_pieces_of_unknown_examples_are_refused(counts: list[int], mixing: bool) -> None:
    """Whose they are is not known, so neither is whether they reach another's loss."""
    model = Pictured(mixing)
    given, losses = pictured(model, counts)
    with Engine(model) as engine, pytest.raises(EngineError, match=r"as many rows|own example"):
        engine.clipped_sum(losses(slice(None), given), Flat(1.0))


@pytest.mark.parametrize("examples", [2, 3, 4, 5])
def test_a_mask_for_all_examples(examples: int) -> None:
    """An input without examples that no parameter meets is a constant."""

    class Masked(Bias):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            hidden = self.embed(x)
            q, k, v = self.qkv(hidden).view(len(x), 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
            return self.head(mixed.transpose(1, 2).reshape(hidden.shape))

    model, mask = Masked(), torch.triu(torch.full((4, 4), -9.0), 1)
    compare(model, (torch.randn(examples, 4, 2),), loss=lambda m, b: batch_loss(m, (*b, mask)))


class DroppedBias(Bias):
    def body(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        bias = self.bias(torch.arange(t)[:, None] - torch.arange(t) + t - 1).permute(2, 0, 1)
        q, k, v = self.qkv(x).view(n, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.5)
        return mixed.transpose(1, 2).reshape(n, t, d)


class DroppedQueries(Queries):
    dropout = 0.5


@pytest.mark.parametrize("kind", [DroppedBias, DroppedQueries])
@pytest.mark.parametrize("examples", [3, 7])
def test_dropout_in_attention_on_what_is_learned(kind: type[Model], examples: int) -> None:
    """Attention that is repeated would draw another dropout."""
    model, x = kind(), torch.randn(examples, 7, 2)
    torch.manual_seed(3)
    expected = torch.autograd.grad(logits(model, (x,)).sum(), list(model.parameters()))
    with Engine(model) as engine:
        torch.manual_seed(3)
        result = engine.clipped_sum(logits(model, (x,)), Flat(1e6))
    for name, actual, total in zip(engine.names, result.sums, expected, strict=True):
        close(actual, total, 1e-10, name, 1e-3)


class Across(Model):
    """Attention across the batch."""

    def body(self, x: Tensor) -> Tensor:
        turned = x.transpose(0, 1)
        return F.scaled_dot_product_attention(turned, turned, turned).transpose(0, 1)


class Centred(Model):
    def body(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Neighbours(Model):
    """A loop over the examples in which each sees the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def body(self, x: Tensor) -> Tensor:
        return torch.stack([(x[i] + x[i - 1]) * self.scale for i in range(len(x))])


class Taken(Model):
    """Every example gets what a layer made of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def body(self, x: Tensor) -> Tensor:
        return x + self.inner(x[0])


class Reversed(Model):
    """The examples come out in another order than they went in."""

    def body(self, x: Tensor) -> Tensor:
        return x.flip(0)


def mean_of_all(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    losses = batch_loss(model, batch)
    return losses.mean().expand(len(losses))


def beside_the_mean(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    losses = batch_loss(model, batch)
    return losses - losses.mean()


def contrast(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(*batch).flatten(1)
    return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")


@pytest.mark.parametrize("examples", SIZES)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Across, batch_loss),
        (Centred, batch_loss),
        (Reversed, batch_loss),
        (Neighbours, batch_loss),
        (Taken, batch_loss),
        (Model, mean_of_all),
        (Model, beside_the_mean),
        (Model, contrast),
        (Positions, mean_of_all),
    ],
)
def test_mixed_examples_are_refused(
    kind: type[Model], loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor], examples: int
) -> None:
    model = kind()
    with Engine(model) as engine:
        losses = loss(model, (torch.randn(examples, 7, 2),))
        with pytest.raises(MixedExamples, match="Each loss must depend on its own example alone"):
            engine.probe_if_due(losses)
        with pytest.raises(MixedExamples):
            engine.clipped_sum(losses, Flat(1.0))
    assert all(param.grad is None for param in model.parameters())


def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    seen: list[int] = []
    probe = Engine.probe

    def counted(self: Engine, losses: Tensor) -> None:
        seen.append(len(losses))
        probe(self, losses)

    monkeypatch.setattr(Engine, "probe", counted)
    yield seen


def test_when_the_probe_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the 1st, 2nd, 4th, ... use of a shape, once a step; a batch size is a new shape only
    where it is the size of something else."""
    (seen,) = passes(monkeypatch)
    model = Model()
    with Engine(model) as engine:
        for examples in (10, 11, 12, 13, 14, 15, 6, 16, 17):
            losses = batch_loss(model, (torch.randn(examples, 7, 2),))
            engine.probe_if_due(losses)
            engine.clipped_sum(losses, Flat(1.0))
    assert seen == [10, 11, 13, 6, 17]


def test_a_mixture_that_begins_later_is_seen() -> None:
    """A head that starts at zero hides what is behind it, until it has moved."""
    model = Centred()
    nn.init.zeros_(model.head.weight)
    with Engine(model) as engine:
        engine.clipped_sum(batch_loss(model, (torch.randn(5, 7, 2),)), Flat(1.0))
        nn.init.normal_(model.head.weight)
        losses = batch_loss(model, (torch.randn(5, 7, 2),))
        with pytest.raises(MixedExamples, match="embed"):
            engine.clipped_sum(losses, Flat(1.0))


def test_bfloat16_under_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    for kind in (Positions, Bias, Token, Folded, TimeFirst):
        torch.manual_seed(0)
        model, x = kind(), torch.randn(5, 7, 2)
        _, expected = reference(per_example(model, (x,), batch_loss), Flat(1e3), [])

        def low(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return batch_loss(model, (x,)).float()

        with Engine(model) as engine:
            result = engine.clipped_sum(low(), Flat(1e3))
        whole = torch.cat([total.flatten() for total in result.sums])
        exact = torch.cat([total.flatten() for total in expected])
        assert float((whole - exact).norm() / exact.norm()) < 0.05, kind


def test_half_precision_weights() -> None:
    model, x = Token().bfloat16(), torch.randn(5, 7, 2).bfloat16()
    with Engine(model) as engine:
        result = engine.clipped_sum(batch_loss(model, (x,)).float(), Flat(1e3))
    exact = per_example(model.double(), (x.double(),), batch_loss)
    norms, _ = reference(exact, Flat(1e3), [])
    close(result.norms.double(), norms, 0.05, "norms")


def test_two_engines_share_a_loss() -> None:
    """A generator learns through a critic; each has an engine of its own."""
    generator, critic = Token(), Model()
    critic.embed = nn.Linear(3, 6)
    x = torch.randn(4, 7, 2)

    def play(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        del module
        return batch_loss(critic, (generator(*batch),))

    expected = {
        module: reference(per_example(module, (x,), play), Flat(0.5), [])[1]
        for module in (generator, critic)
    }
    with Engine(generator) as first, Engine(critic) as second:
        for engine, module in ((first, generator), (second, critic)):
            result = engine.clipped_sum(play(module, (x,)), Flat(0.5))
            for actual, total in zip(result.sums, expected[module], strict=True):
                close(actual, total, 1e-10, "sum", 1e-3)


def test_a_loss_of_something_else_that_goes_through_the_model() -> None:
    """A generator that is not private learns through a critic that is."""
    generator, critic = Model(), Token()
    critic.embed = nn.Linear(3, 6)
    x = torch.randn(4, 7, 2)
    batch_loss(critic, (generator(x),)).sum().backward()
    expected = [param.grad for param in generator.parameters()]
    generator.zero_grad()
    critic.zero_grad()
    with Engine(critic) as engine:
        with engine.frozen():
            losses = batch_loss(critic, (generator(x),))
        losses.sum().backward()
        assert all(param.grad is None and param.requires_grad for param in critic.parameters())
        for param, gradient in zip(generator.parameters(), expected, strict=True):
            assert param.grad is not None
            assert gradient is not None
            close(param.grad, gradient, 1e-12, "gradient")
        engine.clipped_sum(batch_loss(critic, (generator(x).detach(),)), Flat(1.0))
        with pytest.raises(EngineError, match=r"frozen\(\)"):
            batch_loss(critic, (generator(x),)).sum().backward()


class SavedNorm(Token):
    """What a checkpoint saves differs between a watched and an unwatched pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def part(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, 2, self.gain.exp(), self.shift.sin())
        return x * (self.shift.exp() * self.gain.sin())[:, None]

    def body(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, super().body(x), use_reentrant=False)


def test_a_checkpoint_that_runs_again_for_the_parameters_alone() -> None:
    model, x = SavedNorm(), torch.randn(5, 7, 2)
    _, sums = reference(per_example_by_backward(model, x), Flat(0.5), [])
    with Engine(model) as engine:
        result = engine.clipped_sum(batch_loss(model, (x,)), Flat(0.5))
    for actual, expected in zip(result.sums, sums, strict=True):
        close(actual, expected, 1e-10, "sum", 1e-3)


def test_a_function_of_the_users_own_is_refused() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG004
            return x * scale

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
            return grad, grad.sum(0)

    class User(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7, 6))

        def body(self, x: Tensor) -> Tensor:
            return Own.apply(x, self.scale)

    model = User()
    with Engine(model) as engine, pytest.raises(EngineError, match=r"scale.*autograd\.Function"):
        engine.clipped_sum(batch_loss(model, (torch.randn(4, 7, 2),)), Flat(1.0))


@pytest.mark.parametrize("scaled", [False, True])
def test_nested_tensors_are_refused(scaled: bool) -> None:
    class Ragged(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

        def body(self, x: Tensor) -> Tensor:
            rows = [row[: 3 + place % 2] for place, row in enumerate(x)]
            ragged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            done = ragged * self.scale if scaled else self.inner(ragged)
            return torch.nested.to_padded_tensor(done, 0.0)

    model = Ragged()
    with Engine(model), pytest.raises(EngineError, match="pad the sequences"):
        model(torch.randn(4, 7, 2))


def test_the_random_reference_agrees() -> None:
    compare(Token(), (torch.randn(3, 7, 2),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_confident_models_pass_the_probe(dtype: torch.dtype, scale: float) -> None:
    """Probabilities near underflow lose digits when they are weighted, and are no mixture."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).to(dtype)
        with torch.no_grad():
            model.weight.mul_(scale)
        x, y = torch.randn(30, 4, dtype=dtype), torch.randint(0, 3, (30,))
        with Engine(model) as engine:
            engine.probe(nn.functional.cross_entropy(model(x), y, reduction="none"))

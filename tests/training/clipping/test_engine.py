"""The engine around the layers: odd examples, micro-batches, errors, refusals, life cycle."""

from __future__ import annotations

import copy
import inspect
import math
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive import batch_loss, close, compare, layer_slots, per_example, reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diminuendo.training.clipping import (
    Automatic,
    Clip,
    Engine,
    EngineError,
    Flat,
    MixedExamples,
    PerLayer,
    UnsupportedModule,
    clip,
    lanes,
    reports,
)

CLIPS: list[Clip] = [Flat(0.7), PerLayer(0.7), Automatic(0.7)]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.LayerNorm(5),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def gram_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 40, 3, padding=1), nn.PReLU(40), nn.Conv1d(40, 50, 3), nn.Linear(4, 60)
    )


def test_sensitivities() -> None:
    assert Flat(2.0).sensitivity == 2.0
    assert Automatic(3.0).sensitivity == 3.0
    assert PerLayer(2.5).sensitivity == 2.5
    assert PerLayer([3.0, 4.0]).sensitivity == pytest.approx(5.0)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(EngineError, match="above 0"):
            Flat(wrong)
    with pytest.raises(EngineError):
        PerLayer([])


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_one_contribution_is_within_the_sensitivity(clip: Clip) -> None:
    model = network()
    with Engine(model) as engine:
        for scale in (1e-3, 1.0, 1e3):
            result = engine.clipped_sum(batch_loss(model, (scale * torch.randn(1, 2, 6),)), clip)
            size = torch.stack([total.square().sum() for total in result.sums]).sum().sqrt()
            assert float(size) <= clip.sensitivity * (1 + 1e-12)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf, 1e200])
@pytest.mark.parametrize("make", [network, gram_network])
def test_nonfinite_examples_contribute_zero(make: object, value: float, clip: Clip) -> None:
    model = make()  # type: ignore[operator]
    x = torch.randn(5, 2, 6)
    bad = x.clone()
    bad[1, 0, 2] = value
    bad[4, 1, 5] = value
    with Engine(model) as engine:
        result = engine.clipped_sum(batch_loss(model, (bad,)).square(), clip)
        good = engine.clipped_sum(batch_loss(model, (bad[[0, 2, 3]],)).square(), clip)
    if bool(result.norms.isfinite().all()):
        pytest.skip("a normalisation tamed the value")
    assert int(result.nonfinite) == 2
    assert torch.isfinite(result.norms[[0, 2, 3]]).all()
    for actual, expected in zip(result.sums, good.sums, strict=True):
        close(actual, expected, 1e-12, "sum", 1e-3)


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
@pytest.mark.parametrize("clip", [Flat(0.3), PerLayer(0.3)])
def test_sums_taken_before_the_norms_are_known(
    value: float, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with little to do: where a norm turns out not to be finite, they start anew."""
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(5, 2, 6)
    x[1, 0, 2] = value
    made: list[int] = []
    found = []
    for twice in (False, True):
        monkeypatch.setattr(Engine, "_may_sum_twice", lambda *_, twice=twice: twice)
        with Engine(model) as engine:

            def buffers(engine: Engine = engine) -> list[torch.Tensor]:
                made.append(1)
                return engine.zeros()

            result = engine.clipped_sum(batch_loss(model, (x,)), clip, buffers, 0.5)
            assert result.nonfinite == (not math.isfinite(value))
            found.append(result.sums)
    assert len(made) == 2 + (not math.isfinite(value))
    for first, second in zip(*found, strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)


def test_a_loss_that_is_not_finite() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    weights = torch.tensor([1.0, math.inf, math.nan, 1.0])
    x = torch.randn(4, 3)
    with Engine(model) as engine:
        result = engine.clipped_sum(batch_loss(model, (x,)) * weights, Flat(1.0))
        good = engine.clipped_sum(batch_loss(model, (x[[0, 3]],)), Flat(1.0))
    assert int(result.nonfinite) == 2
    for actual, expected in zip(result.sums, good.sums, strict=True):
        close(actual, expected, 1e-12, "sum")


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_zero_gradients(clip: Clip) -> None:
    model = network()
    x = torch.randn(4, 2, 6)
    keep = torch.tensor([1.0, 0.0, 1.0, 0.0])
    with Engine(model) as engine:
        result = engine.clipped_sum(batch_loss(model, (x,)) * keep, clip)
        half = engine.clipped_sum(batch_loss(model, (x[[0, 2]],)), clip)
        nothing = engine.clipped_sum(batch_loss(model, (x,)) * 0.0, clip)
    assert torch.equal(result.norms[[1, 3]], torch.zeros(2))
    for actual, expected in zip(result.sums, half.sums, strict=True):
        close(actual, expected, 1e-12, "sum", 1e-3)
    assert all(torch.equal(total, torch.zeros_like(total)) for total in nothing.sums)
    assert int(nothing.nonfinite) == 0


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_micro_batches(clip: Clip) -> None:
    model = network()
    x = torch.randn(7, 2, 6)
    with Engine(model) as engine:
        whole = engine.clipped_sum(batch_loss(model, (x,)), clip)
        buffers = engine.zeros()
        norms = []
        for part in (x[:3], x[3:4], x[4:4], x[4:]):
            result = engine.clipped_sum(batch_loss(model, (part,)), clip, accumulate=buffers)
            assert all(a is b for a, b in zip(result.sums, buffers, strict=True))
            norms.append(result.norms)
    close(torch.cat(norms), whole.norms, 1e-12, "norms")
    for actual, expected in zip(buffers, whole.sums, strict=True):
        close(actual, expected, 1e-12, "sum", 1e-3)


def test_empty_batch() -> None:
    for model, x in (
        (network(), torch.randn(0, 2, 6)),
        (nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4)), torch.zeros(0, 3, dtype=torch.long)),
    ):
        with Engine(model) as engine:
            for clip in CLIPS:
                result = engine.clipped_sum(model(x).flatten(1).sum(1), clip)
                assert result.norms.shape == (0,)
                assert int(result.nonfinite) == 0
                for total, param in zip(result.sums, engine.parameters, strict=True):
                    assert torch.equal(total, torch.zeros_like(param))


def test_unused_parameters_get_zeros() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    with Engine(model) as engine:
        result = engine.clipped_sum(model["a"](torch.randn(4, 3)).sum(1), PerLayer(1.0))
    assert torch.equal(result.sums[engine.names.index("b.weight")], torch.zeros(2, 3))


def test_float32_takes_the_same_paths() -> None:
    torch.set_default_dtype(torch.float32)
    for model in (network(), gram_network()):
        compare(model, (torch.randn(5, 2, 6),), tol=2e-4)  # norms are rounded up


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e8])
@pytest.mark.parametrize("kind", ["linear", "embedding", "convolution", "reuse"])
def test_terms_that_cancel_are_clipped_all_the_same(kind: str, scale: float) -> None:
    """An example's tokens nearly cancel each other: what float32 leaves of them is not its norm."""
    torch.set_default_dtype(torch.float32)
    tokens, width = 8, 64
    for seed in range(5):
        torch.manual_seed(seed)
        weights = torch.randn(tokens, width)
        weights -= weights.mean(0)
        near = torch.randn(1, 1, width) + 1e-4 * torch.randn(1, tokens, width)
        model: nn.Module
        if kind == "linear":
            model, x = nn.Linear(width, width, bias=False), near * scale
        elif kind == "embedding":
            model, x = nn.Embedding(5, width), torch.full((1, tokens), 2)
            weights = scale * (weights + 1e-4 * torch.randn(tokens, width))
        elif kind == "convolution":
            model, x = nn.Conv1d(width, width, 1, bias=False), near.mT * scale
            weights = weights.t()
        else:
            model, x = nn.Linear(width, width, bias=False), near[:, 0] * scale
        with Engine(model) as engine:
            if kind == "reuse":
                both = model(x) * weights[0], model(x * 1.0001) * weights[0]
                losses = (both[0] - both[1]).sum(1)
            else:
                losses = (model(x) * weights).sum((1, 2))
            (total,) = engine.clipped_sum(losses, Flat(1.0)).sums
        assert float(total.norm()) <= 1.001


def test_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(
        nn.Embedding(20, 16),
        nn.Linear(16, 32),
        nn.ReLU(),
        nn.LayerNorm(32),
        nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True),
    )
    x = torch.randint(0, 20, (6, 7))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float().square().mean((1, 2))

    with Engine(model) as engine:
        low = engine.clipped_sum(loss(), Flat(0.05))
        full = engine.clipped_sum(model(x).square().mean((1, 2)), Flat(0.05))
    assert low.norms.dtype == torch.float64
    assert all(total.dtype == torch.float32 for total in low.sums)
    close(low.norms, full.norms, 0.1, "norms")
    grad = torch.cat([total.flatten() for total in low.sums])
    expected = torch.cat([total.flatten() for total in full.sums])
    assert float((grad - expected).norm() / expected.norm()) < 0.1


def test_the_model_is_left_alone() -> None:
    model = network()
    x = torch.randn(4, 2, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = model(x)
    engine = Engine(model)
    assert list(model.state_dict()) == list(before)
    assert torch.equal(model(x), plain)
    engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
    assert all(param.grad is None and param.requires_grad for param in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(x), plain)
    assert not any(engine._tape.pending.values())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(2.0)
    assert not torch.equal(twin(x), plain)
    assert not any(engine._tape.pending.values()), "a copy must not record into the engine"
    with pytest.raises(EngineError, match="already attached"):
        Engine(model)
    compare(twin, (x,))
    with pytest.raises(EngineError, match=r"instead of loss\.backward"):
        model(x).sum().backward()
    engine.close()
    engine.close()
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    with pytest.raises(EngineError, match="closed"):
        engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))


def test_forward_passes_that_led_nowhere_do_not_count() -> None:
    model = network()
    x = torch.randn(4, 2, 6)
    with Engine(model) as engine:
        expected = engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
        model(torch.randn(9, 2, 6))
        actual = engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
    for a, b in zip(actual.sums, expected.sums, strict=True):
        assert torch.equal(a, b)


def test_two_forward_passes_in_one_loss() -> None:
    model = network()

    def loss(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (module(batch[0]) - module(batch[1])).square().sum(1)

    compare(model, (torch.randn(4, 2, 6), torch.randn(4, 2, 6)), loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, self.first(x), use_reentrant=reentrant)

    model, x = Saving(), torch.randn(4, 3, 6)
    grads: list[list[Any]] = []
    for i in range(4):
        value = batch_loss(model, (x[i : i + 1],)).sum()
        model.zero_grad()
        value.backward()
        grads.append([param.grad for param in model.parameters()])
    stacked = [torch.stack([row[k] for row in grads]) for k in range(len(grads[0]))]
    with Engine(model) as engine:
        norms, sums = reference(stacked, Flat(1.0), layer_slots(engine))
        result = engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
    close(result.norms, norms, 1e-10, "norms")
    for actual, expected in zip(result.sums, sums, strict=True):
        close(actual, expected, 1e-10, "sums")


def test_inputs_that_require_gradients() -> None:
    compare(network(), (torch.randn(4, 2, 6).requires_grad_(),))


def test_averaged_losses_are_refused() -> None:
    model = nn.Linear(3, 2)
    with Engine(model) as engine:
        with pytest.raises(EngineError, match="reduction='none'"):
            engine.clipped_sum(model(torch.randn(4, 3)).mean(), Flat(1.0))
        with pytest.raises(EngineError, match="one loss per example"):
            engine.clipped_sum(model(torch.randn(4, 3)), Flat(1.0))
        with pytest.raises(EngineError, match="first dimension 4, but there are 8"):
            engine.clipped_sum(model(torch.randn(4, 3)).flatten(), Flat(1.0))
        with torch.no_grad():
            losses = model(torch.randn(4, 3)).sum(1)
        with pytest.raises(EngineError, match="no_grad"):
            engine.clipped_sum(losses, Flat(1.0))
        with pytest.raises(EngineError, match="2 bounds were given for 1 layers"):
            engine.clipped_sum(model(torch.randn(4, 3)).sum(1), PerLayer([1.0, 2.0]))


def test_eval_mode() -> None:
    model = nn.Linear(3, 2).eval()
    with (
        Engine(model, eval_mode="raise") as engine,
        pytest.raises(EngineError, match="eval mode"),
    ):
        engine.clipped_sum(model(torch.randn(4, 3)).sum(1), Flat(1.0))
    with Engine(model, eval_mode="warn") as engine, pytest.warns(UserWarning, match="eval mode"):
        engine.clipped_sum(model(torch.randn(4, 3)).sum(1), Flat(1.0))
    with pytest.raises(EngineError, match="eval_mode"):
        Engine(model, eval_mode="never")


def test_changed_inputs_are_noticed() -> None:
    model = nn.Linear(3, 3)
    with Engine(model) as engine:
        x = torch.randn(4, 3)
        out = model(x)
        x.add_(1.0)
        with pytest.raises(EngineError, match="changed in place"):
            engine.clipped_sum(out.sum(1), Flat(1.0))


def test_a_weight_that_another_part_of_the_model_reads() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)

        def forward(self, index: Tensor) -> Tensor:
            return nn.functional.linear(self.embed(index), self.embed.weight)

    model = Direct()
    compare(model, (torch.randint(0, 5, (3, 2)),))
    with Engine(model) as engine:
        losses = batch_loss(model, (torch.tensor([[1, 2]]),)) + model.embed.weight.square().sum()
        with pytest.raises(EngineError, match=r"embed\.weight.*penalty"):
            engine.clipped_sum(losses, Flat(1.0))


def test_forward_before_the_engine_is_refused() -> None:
    model = nn.Linear(3, 2)
    losses = model(torch.randn(4, 3)).sum(1)
    with Engine(model) as engine, pytest.raises(EngineError, match="not recorded"):
        engine.clipped_sum(losses, Flat(1.0))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x * self.scale, 0.5, True)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale - x.mean(0)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.BatchNorm1d(3), "never.*GroupNorm"),
        (nn.BatchNorm1d(3, affine=False), "never.*GroupNorm"),
        (nn.SyncBatchNorm(3), "never.*GroupNorm"),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "track_running_stats"),
        (nn.Embedding(4, 2, max_norm=1.0), "max_norm"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.EmbeddingBag(4, 2, max_norm=1.0), "max_norm"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.utils.spectral_norm(nn.Linear(3, 3)), "parametrizations"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "not yet"),
    ],
)
def test_refusals_name_the_module(module: nn.Module, text: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))
    with pytest.raises(UnsupportedModule, match=rf"1\.0.*{text}") as caught:
        Engine(model)
    assert caught.value.path.startswith("1.0")
    assert caught.value.verdict in ("never", "not yet", "replace")
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_frozen_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False).eval())
    compare(model, (torch.randn(4, 3),))
    with Engine(model):
        model.train()
        with pytest.raises(UnsupportedModule, match="GroupNorm"):
            model(torch.randn(4, 3))


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_in_evaluation_mode_is_trained(frozen: bool) -> None:
    """With its own statistics it is a scale and a shift of each channel, like any other."""
    norm = nn.BatchNorm2d(5)
    norm(torch.randn(50, 5, 4, 4) * 3 + 1)
    first = nn.Conv2d(3, 5, 1).requires_grad_(not frozen)
    model = nn.Sequential(first, norm, nn.ReLU(), nn.Flatten(), nn.Linear(80, 2), nn.BatchNorm1d(2))
    model.eval()
    compare(model, (torch.randn(5, 3, 4, 4),))
    with Engine(model):
        norm.train()
        with pytest.raises(UnsupportedModule, match=r"eval\(\) after each train\(\)"):
            model(torch.randn(5, 3, 4, 4))


def test_examples_that_mix_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Mixing())
    with Engine(model) as engine, pytest.raises(MixedExamples, match="of another one's loss"):
        engine.clipped_sum(batch_loss(model, (torch.randn(4, 3),)), Flat(1.0))


def test_randomness_beside_a_parameter() -> None:
    """The engine takes the gradients of the pass that ran, whatever was drawn in it."""
    model, x = nn.Sequential(nn.Linear(3, 3), Noisy()), torch.randn(1, 3)
    torch.manual_seed(5)
    grads = per_example(model, (x,), batch_loss)
    with Engine(model) as engine:
        torch.manual_seed(5)
        result = engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
        _, sums = reference(grads, Flat(1.0), layer_slots(engine))
    for actual, expected in zip(result.sums, sums, strict=True):
        close(actual, expected, 1e-12, "sums")


def test_parameters_that_thaw() -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    with Engine(model) as engine:
        model.requires_grad_(True)
        with pytest.raises(EngineError, match=r"0\.weight.*frozen"):
            engine.clipped_sum(batch_loss(model, (torch.randn(4, 3),)), Flat(1.0))


class Masked(nn.Module):
    """An argument that is not per example, and may have the size of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (mask @ x) * self.scale


def test_arguments_that_are_not_per_example() -> None:
    inner, mask = Masked(), torch.randn(4, 4)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, mask)

    model = Outer()
    batches = [torch.randn(n, 4, 3) for n in (6, 4, 5)]
    expected = [
        reference(per_example(model, (x,), batch_loss), Flat(1.0), [])[1][0] for x in batches
    ]
    with Engine(model) as engine:
        for x, total in zip(batches, expected, strict=True):
            result = engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
            close(result.sums[0], total, 1e-10, "sum")


def test_no_trainable_parameter() -> None:
    with pytest.raises(EngineError, match="requires_grad"):
        Engine(nn.Linear(3, 2).requires_grad_(False))


def test_dropout_between_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.5), nn.Linear(30, 2))
    x = torch.randn(1, 3)
    torch.manual_seed(5)
    grads = per_example(model, (x,), batch_loss)
    with Engine(model) as engine:
        torch.manual_seed(5)
        result = engine.clipped_sum(batch_loss(model, (x,)), Flat(1.0))
        norms, sums = reference(grads, Flat(1.0), layer_slots(engine))
    close(result.norms, norms, 1e-12, "norms")
    for actual, expected in zip(result.sums, sums, strict=True):
        close(actual, expected, 1e-12, "sums")


COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about itself
@pytest.mark.parametrize("first", ["engine", "compile"])
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not COMPILER, reason="no compiler")),
    ],
)
def test_compiled_model(first: str, backend: str) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3))
    x = torch.randn(6, 5)
    with Engine(model) as engine:
        expected = engine.clipped_sum(batch_loss(model, (x,)), Flat(0.5))
    torch._dynamo.reset()
    compiled: Any
    if first == "engine":
        engine = Engine(model)
        compiled = torch.compile(model, backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
        engine = Engine(compiled)
    for _ in range(2):
        actual = engine.clipped_sum(batch_loss(compiled, (x,)), Flat(0.5))
        close(actual.norms, expected.norms, 1e-12, "norms")
        for a, b in zip(actual.sums, expected.sums, strict=True):
            close(a, b, 1e-12, "sums")
    engine.close()


@pytest.mark.parametrize("clip", CLIPS)
def test_scaled_sums_are_added_to_what_the_buffers_hold(clip: Clip) -> None:
    model = nn.Sequential(
        nn.Embedding(9, 6),
        nn.Linear(6, 6),
        nn.LayerNorm(6),
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(18, 4),
    )
    x = torch.randint(0, 9, (5, 3))
    with Engine(model) as engine:
        plain = engine.clipped_sum(batch_loss(model, (x,)), clip)
        scaled = engine.clipped_sum(batch_loss(model, (x,)), clip, scale=0.25)
        made = [torch.randn_like(total) for total in plain.sums]
        before = [total.clone() for total in made]
        added = engine.clipped_sum(batch_loss(model, (x,)), clip, lambda: made, 0.25)
    for total, quarter, start, end, own in zip(
        plain.sums, scaled.sums, before, added.sums, made, strict=True
    ):
        assert end is own
        close(quarter, 0.25 * total, 1e-12, "scaled")
        close(end, start + 0.25 * total, 1e-12, "added")


def test_a_hook_that_writes_on_the_gradient_changes_its_own_step_alone() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with Engine(model) as engine:
        first = engine.clipped_sum(batch_loss(model, (x,)), Automatic(1.0))
        losses = batch_loss(model, (x,))
        losses.register_hook(lambda grad: grad.mul_(0.5))
        halved = engine.clipped_sum(losses, Automatic(1.0))
        again = engine.clipped_sum(batch_loss(model, (x,)), Automatic(1.0))
    close(halved.norms, 0.5 * first.norms, 1e-12, "norms")
    assert torch.equal(again.norms, first.norms)


def test_a_model_keeps_its_arguments() -> None:
    """Trainers read the names of the arguments to know what to pass."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, pixels: Tensor, scale: float = 1.0) -> Tensor:
            out: Tensor = self.layer(pixels) * scale
            return out

    model = Named()
    before = inspect.signature(model.forward)
    with Engine(model):
        assert inspect.signature(model.forward) == before


def test_messages_name_the_model_where_it_has_no_path() -> None:
    """A lone layer has the path "", which once was printed as such."""
    cases = [
        (torch.nn.Linear(3, 2), torch.zeros(3)),
        (torch.nn.Conv1d(3, 2, 1), torch.zeros(3, 4)),
        (torch.nn.LayerNorm(3), torch.zeros(3)),
        (torch.nn.GRU(3, 2, batch_first=True), torch.zeros(3)),
        (torch.nn.BatchNorm1d(3), torch.zeros(5, 3)),
    ]
    for model, x in cases:
        with pytest.raises(EngineError, match="the model itself") as error:
            (Engine(model), model(x))
        assert "''" not in str(error.value)
    inside = torch.nn.Sequential(torch.nn.Linear(3, 2))
    Engine(inside)
    with pytest.raises(EngineError, match="'0' got an input of shape"):
        inside(torch.zeros(3))


class Late:
    """Lanes of a GPU at their slowest: work that is done when they meet, and no sooner."""

    def __init__(self, device: torch.device) -> None:  # noqa: ARG002
        self._waiting: list[Callable[[], object]] = []

    def do(self, call: Callable[[], object]) -> None:
        self._waiting.append(call)

    def join(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()


class Twice(nn.Module):
    """A layer that is used twice; what comes of the second use is for whoever wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(2 * x)


@pytest.mark.parametrize("model", [Twice, lambda: nn.LSTM(8, 8, batch_first=True)])
def test_norms_wait_for_all_lanes(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for what is measured last: of a recurrent layer, or of one that was used in vain."""
    torch.manual_seed(0)
    made, x = model(), torch.randn(5, 3, 8)
    found = []
    for kind in (lanes.Lanes, Late):
        monkeypatch.setattr(reports, "Lanes", kind)
        with Engine(made, probing=False) as engine:
            out, other = made(x)
            losses = out.square().flatten(1).sum(1)
            found.append(engine.clipped_sum(losses, Flat(1e-3), certify=True))
            del other
    assert torch.equal(found[0].norms, found[1].norms)
    for ours, theirs in zip(found[0].sums, found[1].sums, strict=True):
        assert torch.equal(ours, theirs)


def test_bounds_stay_where_a_recorded_step_reads_them() -> None:
    """However many others were asked for since."""
    norms = torch.ones(2, 3, dtype=torch.float64)
    PerLayer([1.0, 2.0]).factors(norms)
    place = clip._column((1.0, 2.0), norms.dtype, norms.device)
    for number in range(200):
        PerLayer([1.0, 3.0 + number]).factors(norms)
    assert clip._column((1.0, 2.0), norms.dtype, norms.device) is place

"""What would make the host wait for a GPU in a step, found on a CPU in the code that both share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import LINEAR, run
from torch import Tensor, nn
from waits import Wait, recorded

import diminuendo as dim
from diminuendo.training import Automatic, Flat, PerLayer, PrivateGradients
from diminuendo.training.clipping import Clip, Engine
from diminuendo.training.mechanism import NoiseName

LOSS = nn.CrossEntropyLoss(reduction="none")

CPU_ONLY = {
    # branches that a tensor on a GPU does not take
    "training/clipping/rounding.py:row_norm",
    "training/clipping/contract.py:_measure_odd",
    "training/clipping/certified.py:<genexpr>",
    # made and read on the host in any case
    "training/clipping/certificate.py:__init__",
    "training/mechanism/cpu.py:_add",
    "training/seeds.py:_filled",
    "training/mechanism/bernoulli.py:chosen",
    "training/sampling.py:draw",
}
STAYS = {
    # decide by looking whether some gradients are not finite, and whether quick sums are close
    # enough: docs/decisions/0008-static-shapes.md
    "training/clipping/engine.py:_unless_all_finite",
    "training/clipping/certificate.py:holds",
}


class Words(nn.Module):
    """Embeddings, attention, normalisation; wide enough for sums that are checked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 72)
        self.mix = nn.TransformerEncoderLayer(72, 2, 80, dropout=0.1, batch_first=True)
        self.head = nn.Linear(72, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).mean(1))  # type: ignore[no-any-return]


def _pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 3)),
        lambda: torch.randn(40, 9),
    ),
    "convolution": (_pictures, lambda: torch.randn(40, 1, 6, 6)),
    "attention": (Words, lambda: torch.randint(0, 20, (40, 6))),
}


def waits_of_a_step(
    kind: str, clip: Clip | Callable[[int], Clip], noise: NoiseName, static: bool
) -> set[str]:
    """Where the seventh step would wait: the engine probes at the first, second and fourth."""
    torch.manual_seed(0)
    model, data = KINDS[kind][0](), KINDS[kind][1]()
    plan = dim.plan(
        (4, 1e-5), examples=40, parameters=1, steps=9, sampling_rate=0.5, schedule="uniform"
    )
    private = PrivateGradients(model, plan, clip=clip, noise=noise, seed=1, pad=True)
    private.engine.static = static
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = private.batches((data, torch.randint(0, 3, (40,))))

    def step() -> None:
        x, y = next(batches)
        private.backward(LOSS(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(6):
        step()
    with recorded() as found:
        step()
    private.close()
    assert private.step == 7
    return {wait.where for wait in found}


CLIPS = [Flat(1.0), PerLayer(1.0), Automatic(1.0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_steady_step_waits_only_where_it_is_known(kind: str, clip: Clip) -> None:
    assert waits_of_a_step(kind, clip, "fast", static=False) - CPU_ONLY == {
        "training/clipping/engine.py:_unless_all_finite"
    }
    exact = waits_of_a_step(kind, clip, "exact", static=False) - CPU_ONLY
    assert exact <= STAYS
    assert "training/clipping/engine.py:_unless_all_finite" in exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("noise", ["exact", "fast"])
def test_a_static_step_waits_for_nothing(kind: str, clip: Clip, noise: NoiseName) -> None:
    assert waits_of_a_step(kind, clip, noise, static=True) <= CPU_ONLY


def test_fit_does_not_read_a_learning_rate_that_is_a_tensor() -> None:
    plan = LINEAR.plan(sampling_rate=0.5, steps=9, lr=dim.influence.cosine(9))
    model = LINEAR.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), fused=True)
    marks: list[int] = []
    with recorded() as found:
        run(
            model,
            plan,
            optimizer=optimizer,
            pad=True,
            noise="fast",
            seed=1,
            after_step=lambda step, private: marks.append(len(found)),
        )
    steady = {wait.where for wait in found[marks[5] : marks[6]]}
    assert steady - CPU_ONLY == {"training/clipping/engine.py:_unless_all_finite"}


def test_bounds_of_layers_are_copied_once() -> None:
    clip = PerLayer([1.0, 2.0])
    assert waits_of_a_step("linear", clip, "fast", static=True) <= CPU_ONLY


@pytest.mark.parametrize("certify", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", CLIPS)
def test_static_sums_are_the_same_and_leave_out_what_is_not_finite(
    kind: str, certify: bool, clip: Clip
) -> None:
    torch.manual_seed(0)
    model, x = KINDS[kind][0]().eval(), KINDS[kind][1]()
    y = torch.randint(0, 3, (40,))
    spoilt = torch.ones(40)
    spoilt[3], spoilt[7] = torch.nan, torch.inf
    for factor, left_out in ((torch.ones(40), 0), (spoilt, 2)):
        found = []
        for static in (False, True):
            with Engine(model, static=static) as engine:
                losses = LOSS(model(x), y) * factor
                found.append(engine.clipped_sum(losses, clip, certify=certify))
                assert not (static and engine.checks)
        assert [result.nonfinite for result in found] == [left_out] * 2
        for plain, masked in zip(found[0].sums, found[1].sums, strict=True):
            torch.testing.assert_close(masked, plain, rtol=1e-4, atol=1e-5)
            assert bool(plain.isfinite().all())


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
        (lambda x: float(x[0]), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: torch.equal(x, x + 1), "equal"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.repeat_interleave((x > 0).long()), "repeat_interleave"),
        (lambda x: x + torch.tensor([1.0] * len(x)), "tensor"),
    ],
)
def test_the_tool_sees_what_waits(act: Callable[[Tensor], Any], name: str) -> None:
    x = torch.linspace(-1, 1, 6)
    with recorded() as found:
        act(x)
    assert Wait(name, "outside") in found


def test_the_tool_lets_through_what_does_not() -> None:
    x = torch.linspace(-1, 1, 6)
    with recorded() as found:
        x[x > 0] = 0.0
        y = torch.where(x.isfinite(), x, 0.0)
        y.index_select(0, torch.arange(3)).sum()
    assert found == []

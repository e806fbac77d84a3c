"""Runs are computed where their data are: nothing is made on another device on the way.

PyTorch's device `meta`, which has shapes and no numbers, stands for a GPU: operations refuse to mix
it with the CPU. A method that decides by numbers is followed up to the first of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diminuendo.budget import Budget
from diminuendo.cli import main
from diminuendo.compare.data import Pool
from diminuendo.compare.lesson import Lesson
from diminuendo.compare.methods import METHODS
from diminuendo.compare.models import Linear, Network
from diminuendo.compare.private import Private

BUDGET = Budget(epsilon=3, delta=1e-5)
NUMBERS = "cannot be called on meta tensors|Cannot copy out of meta tensor"
RUNNABLE = [key for key, method in METHODS.items() if method.run is not None]
DECIDES = {"validation", "adaptive-share", "learned-policy", "output", "objective"}
READS = DECIDES | {"uniform-whitened"}
"""Those that read numbers on the way."""


def elsewhere(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("key", RUNNABLE)
@torch.no_grad()
def test_a_method_computes_where_the_data_are(key: str, network: bool) -> None:
    method = METHODS[key]
    assert method.run is not None
    if network and method.convex:
        pytest.skip("for convex losses only")
    model = Network(6, 3, 4) if network else Linear(6, 3)
    labels = elsewhere(2, 40).long()
    private = Private(model, elsewhere(2, 40, 6), labels, BUDGET, seeds=[1, 2])
    if key in READS:
        with pytest.raises((RuntimeError, NotImplementedError), match=NUMBERS):
            method.run(private, method.candidate(2))
    else:
        assert method.run(private, method.candidate(2)).device.type == "meta"


@pytest.mark.parametrize("key", [key for key in RUNNABLE if METHODS[key].learn is not None])
def test_a_lesson_is_learnt_where_its_data_are(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(loss: torch.Tensor) -> None:
        raise NotImplementedError(loss.device.type)

    # Saved tensors are told apart by their addresses, and tensors without numbers have none.
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    method = METHODS[key]
    assert method.learn is not None
    lesson = Lesson(
        model=Linear(6, 3),
        x=elsewhere(2, 40, 6),
        y=elsewhere(2, 40).long(),
        test_x=elsewhere(2, 10, 6),
        test_y=elsewhere(2, 10).long(),
        budget=BUDGET,
        examples=40,
        rounds=1,
    )
    with pytest.raises(NotImplementedError, match="meta"):
        method.learn(lesson, method.candidate(2))


def test_a_pool_moves_as_a_whole() -> None:
    pool = Pool(torch.ones(5, 2), torch.ones(5), torch.ones(3, 2), torch.ones(3), "five").to("meta")
    x, y = pool.draw(4, [1, 2])
    assert {part.device.type for part in (x, y, pool.test_x, pool.test_y)} == {"meta"}
    assert (x.shape, y.shape, pool.source) == ((2, 4, 2), (2, 4), "five")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
def test_a_gpu_ends_where_the_cpu_ends() -> None:
    run = METHODS["optimal"].run
    assert run is not None
    x, y = torch.randn(2, 40, 6) / 6, torch.randint(0, 3, (2, 40))
    ends = [
        run(
            Private(Linear(6, 3), x.to(device), y.to(device), BUDGET, seeds=[1, 2]),
            METHODS["optimal"].candidate(0),
        ).cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


def test_a_device_that_is_not_there_is_said_before_anything_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", "--quick", "--device", "warp", "--out", str(out)]) == 2
    assert "--device" in capsys.readouterr().err
    assert not out.exists()

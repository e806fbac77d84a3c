"""Two processes and one give the same model; if a rank dies, the others stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from small_runs import two_ranks

from diminuendo.training.distributed import Group

HERE = str(Path(__file__).parent)
SCRIPT = """
import datetime, os, sys, time, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {here!r})
import torch, torch.distributed as dist, test_fit
torch.set_num_threads(1)
out, rates, mode, backend, device = sys.argv[1:]
rank = os.environ.get("RANK", "0")
if "RANK" in os.environ:
    limit = datetime.timedelta(minutes=5)
    dist.init_process_group(backend, os.environ.get("MEET"), timeout=limit)
def after(step, private):
    if step == 5 and mode == "wait":
        open(f"{{out}}/{{rank}}.pid", "w").write(str(os.getpid()))
    if step >= 5 and mode == "wait":
        time.sleep(0.05)
    if step == 5 and mode == "die" and rank == "1":
        os._exit(9)
(steps, gamma), runs = (4000, 0.995) if mode == "wait" else (20, 0.95), []
for rate in map(float, rates.split()):
    model = test_fit.make_model().to(device)
    plan = test_fit.make_plan(sampling_rate=rate, gamma=gamma, steps=steps)
    result = test_fit.run(model, plan, seed=5, after_step=after)
    final = test_fit.weights(model).cpu()
    runs.append((final, result.status, result.steps, result.epsilon))
torch.save(runs, f"{{out}}/{{rank}}.pt")
if "RANK" in os.environ:
    dist.barrier()
    os._exit(0)  # threads of the backend may abort while the interpreter goes down
"""


def script(
    folder: Path, rates: str, mode: str = "live", backend: str = "gloo", device: str = "cpu"
) -> list[str]:
    folder.mkdir(exist_ok=True)
    file = folder / "script.py"
    file.write_text(textwrap.dedent(SCRIPT.format(here=HERE)))
    return [str(file), str(folder), rates, mode, backend, device]


def torchrun(world: int, arguments: list[str]) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(world), *arguments],
        check=False,
        stderr=subprocess.DEVNULL,
        timeout=600,
    ).returncode


def load(folder: Path, rank: int) -> list[tuple[torch.Tensor, str, int, float]]:
    runs: list[tuple[torch.Tensor, str, int, float]] = torch.load(
        folder / f"{rank}.pt", weights_only=True
    )
    return runs


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_two_processes_equal_one(device: str, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    command = [sys.executable, *script(alone, "1.0 0.4", device=device)]
    assert subprocess.run(command, check=False, timeout=600).returncode == 0
    assert torchrun(2, script(both, "1.0 0.4", device=device)) == 0
    for one, first, second in zip(load(alone, 0), load(both, 0), load(both, 1), strict=True):
        torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
        torch.testing.assert_close(one[0], first[0], rtol=1e-5, atol=1e-6)
        assert one[1:] == first[1:] == second[1:]
        assert one[1:3] == ("done", 20)


@CUDA
def test_a_world_of_one_on_nccl(tmp_path: Path) -> None:
    alone, world = tmp_path / "alone", tmp_path / "world"
    command = [sys.executable, *script(alone, "0.4", device="cuda")]
    assert subprocess.run(command, check=False, timeout=600).returncode == 0
    assert torchrun(1, script(world, "0.4", backend="nccl", device="cuda")) == 0
    [one], [same] = load(alone, 0), load(world, 0)
    torch.testing.assert_close(one[0], same[0], rtol=0, atol=0)


def test_torchrun_reports_a_rank_that_dies(tmp_path: Path) -> None:
    assert torchrun(2, script(tmp_path, "1.0", "die")) != 0
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("victim", [0, 1])
def test_if_a_rank_is_killed_the_other_stops_with_an_error(victim: int, tmp_path: Path) -> None:
    ranks = two_ranks(script(tmp_path, "1.0", "wait"))
    try:
        files = [tmp_path / f"{rank}.pid" for rank in range(2)]
        until = time.monotonic() + 300
        while not all(file.exists() for file in files) and time.monotonic() < until:
            time.sleep(0.02)
        ranks[victim].kill()
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] > 0
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(asked: int, tmp_path: Path) -> None:
    ranks = two_ranks(script(tmp_path, "1.0", "wait"))
    try:
        file = tmp_path / f"{asked}.pid"
        until = time.monotonic() + 300
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.02)
        ranks[asked].terminate()
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    [first], [second] = load(tmp_path, 0), load(tmp_path, 1)
    assert first[1:] == second[1:]
    assert first[1] == "interrupted"
    assert 5 <= first[2] < 4000
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)


def test_alone_nothing_is_exchanged() -> None:
    group = Group.current()
    total = torch.ones(3)
    group.sum(total)
    assert (group.first, group.agree(lambda: 7), group.any(True)) == (True, 7, True)
    assert torch.equal(total, torch.ones(3))
    assert torch.equal(group.share(torch.arange(4)), torch.arange(4))

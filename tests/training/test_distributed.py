"""Two processes and one give the same model; if a rank dies, the others stop."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

HERE = str(Path(__file__).parent)
SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {here!r})
import datetime, torch, torch.distributed as dist, test_fit
torch.set_num_threads(1)
out, rate, die = sys.argv[1], float(sys.argv[2]), sys.argv[3]
if "RANK" in os.environ:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
model = test_fit.make_model()
def after(step, private):
    if die == "die" and step == 5 and private.group.rank == 1:
        os._exit(9)
plan = test_fit.make_plan(sampling_rate=rate, gamma=0.95)
result = test_fit.run(model, plan, seed=5, after_step=after)
rank = os.environ.get("RANK", "0")
torch.save((test_fit.weights(model), result.steps, result.epsilon), f"{{out}}/{{rank}}.pt")
"""


def launch(folder: Path, world: int, rate: float, die: str = "live") -> list[int]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(here=HERE)))
    command = [sys.executable, str(script), str(folder), str(rate), die]
    if world == 1:
        return [subprocess.run(command, check=False).returncode]
    port = str(20_000 + os.getpid() % 20_000)
    processes = [
        subprocess.Popen(
            command,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(world)
    ]
    return [process.wait(timeout=120) for process in processes]


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_two_processes_equal_one(rate: float, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    alone.mkdir()
    both.mkdir()
    assert launch(alone, 1, rate) == [0]
    assert launch(both, 2, rate) == [0, 0]
    one = torch.load(alone / "0.pt", weights_only=True)
    first = torch.load(both / "0.pt", weights_only=True)
    second = torch.load(both / "1.pt", weights_only=True)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    torch.testing.assert_close(one[0], first[0], rtol=1e-5, atol=1e-6)
    assert one[1:] == first[1:] == second[1:]


def test_if_a_rank_dies_the_other_stops_with_an_error(tmp_path: Path) -> None:
    codes = launch(tmp_path, 2, 1.0, "die")
    assert codes[1] == 9
    assert codes[0] not in (0, 9)
    assert not (tmp_path / "0.pt").exists()

"""Death between any two writes: nothing is released twice or unpaid, and seeds replay exactly.

Runs die at a random write, rename or release, again and again, and are resumed. What was released
goes to a log of its own, as an adversary would keep it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, random, sys, warnings
from collections import Counter
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import torch, test_fit
from diminuendo.training.mechanism import NoisySum
from small_runs import COUNTED
torch.set_num_threads(1)
folder, seed, rng = {folder!r}, {seed!r}, random.Random(3)
log = os.open(folder + "/log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
plan = test_fit.make_plan()

def options():
    return test_fit.adaptive(seed) if {policy!r} else {{"seed": seed}}

def child(death):
    moments = 0
    def moment():
        nonlocal moments
        moments += 1
        if moments == death:
            os._exit(9)
    def around(action):
        def acted(*given):
            moment()
            answer = action(*given)
            moment()
            return answer
        return acted
    os.replace, os.fsync = around(os.replace), around(os.fsync)
    Path.replace = around(Path.replace)
    plain = NoisySum.release
    def release(self):
        gradients = plain(self)
        os.write(log, f"{{self.step}} {{self.noise_std}}\\n".encode())
        return gradients
    NoisySum.release = around(release)
    model = test_fit.make_model()
    result = test_fit.run(model, plan, folder=folder, every=3, **options())
    sigmas = [e.noise_multiplier for e in result.events for _ in range(e.count)]
    torch.save((test_fit.weights(model), sigmas), folder + "/end.pt")
    os._exit(0)

for death in [rng.randint(1, 80) for _ in range(5)] + [None]:
    pid = os.fork()
    if pid == 0:
        child(death)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (9 if death else 0) or os.path.exists(folder + "/end.pt"), code
weights, sigmas = torch.load(folder + "/end.pt", weights_only=True)
if seed is None:
    released = [line.split() for line in open(folder + "/log")]
    assert max(Counter(step for step, _ in released).values()) == 1
    for step, deviation in released:
        assert float(deviation) == sigmas[int(step)] * (plan.clip * COUNTED)
else:
    straight = test_fit.make_model()
    test_fit.run(straight, plan, **options())
    assert torch.equal(weights, test_fit.weights(straight))
"""


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
def test_death_between_any_two_writes(tmp_path: Path, policy: bool, seed: int | None) -> None:
    script = SCRIPT.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path), seed=seed, policy=policy
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

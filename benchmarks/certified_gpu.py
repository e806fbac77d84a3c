"""Times of plain steps, of clipped sums and of certified clipped sums on a GPU, TF32 allowed.

    python -m pytest -q tests/training/clipping/test_cuda_engine.py   # first: is it right there
    python benchmarks/certified_gpu.py --workloads AEF                # then: what it costs

Medians in milliseconds over the calls of each variant. `recomputed` says for how many
parameters a quick sum was too coarse, so that float64 replaced it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F
from training import plain_step, workload

from diminuendo.training.clipping import Engine, Flat


def clipped(name: str, certify: bool) -> tuple[Callable[[], object], Engine]:
    """One clipped sum of a workload, and the engine that takes it."""
    model, x, y = workload(name, "cuda")
    engine = Engine(model)

    def step() -> None:
        losses = F.cross_entropy(model(x), y, reduction="none")
        engine.clipped_sum(losses, Flat(1.0), certify=certify)

    return step, engine


def timed(step: Callable[[], object]) -> float:
    """Milliseconds of one call, until the device is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="AEF")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in arguments.workloads:
        quick, _ = clipped(name, certify=False)
        certified, engine = clipped(name, certify=True)
        steps = {"plain": plain_step(name, "cuda"), "clipped": quick, "certified": certified}
        for step in steps.values():
            for _ in range(3):
                step()
        times = {
            kind: [timed(step) for _ in range(arguments.rounds)] for kind, step in steps.items()
        }
        for kind, values in times.items():
            print(f"{name} {kind:9s} {statistics.median(values):8.2f} ms")
        print(f"{name} recomputed {len(engine._summation.precise)}")


if __name__ == "__main__":
    main()

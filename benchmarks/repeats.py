"""A hundred replicas of the paper's network beside the arithmetic's own time.

    python benchmarks/repeats.py                   # on the CPU; on a GPU where there is one

The arithmetic is the same matrix products (two forward, one back, two for the clipped sums), bare,
on buffers of the same shapes. On a CPU both alternate step by step, and seconds of all cores are
shown beside the clock's, since other programs disturb them less; on a GPU, where a step is only
launched, they alternate run by run. Everything counts: initialisation, noise, the last assessment.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from diminuendo.experiments import Replica, repeats

EXAMPLES, INPUTS, HIDDEN, CLASSES = 1000, 60, 1000, 10


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def products(replicas: int, block: int, device: str) -> Callable[[], None]:
    """One step's matrix products for a group of replicas."""
    x = torch.randn(EXAMPLES, INPUTS + 1, device=device)
    first = torch.randn(replicas, INPUTS + 1, HIDDEN, device=device)
    second = torch.randn(replicas, CLASSES, HIDDEN, device=device)
    hidden = torch.randn(replicas, block, HIDDEN, device=device)
    back = torch.randn(replicas, block, HIDDEN, device=device)
    slopes = torch.randn(replicas, block, CLASSES, device=device)
    scaled = torch.randn(replicas, block, INPUTS + 1, device=device)
    outputs = torch.empty_like(slopes)
    sums = torch.zeros_like(first), torch.zeros_like(second)

    def step() -> None:
        for start in range(0, EXAMPLES, block):
            part = x[start : start + block]
            n = len(part)
            torch.bmm(part.expand(replicas, n, INPUTS + 1), first, out=_cut(hidden, n))
            torch.bmm(_cut(hidden, n), second.mT, out=_cut(outputs, n))
            torch.bmm(_cut(slopes, n), second, out=_cut(back, n))
            sums[0].baddbmm_(_cut(scaled, n).mT, _cut(back, n))
            sums[1].baddbmm_(_cut(slopes, n).mT, _cut(hidden, n))

    return step


def _cut(buffer: torch.Tensor, n: int) -> torch.Tensor:
    """A buffer for the last, shorter block, packed as the engine packs it."""
    k, block, width = buffer.shape
    return buffer if n == block else buffer.view(-1)[: k * n * width].view(k, n, width)


def clock(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Beside:
    """Runs and times the bare products after every step of the engine."""

    def __init__(self, bare: Callable[[], None]) -> None:
        self.bare, self.seconds, self.cores = bare, 0.0, 0.0

    def __call__(self, active: int) -> None:
        del active
        start, cores = time.perf_counter(), time.process_time()
        self.bare()
        self.seconds += time.perf_counter() - start
        self.cores += time.process_time() - cores


def on_cpu(study: repeats.Study, replicas: list[Replica], size: int, block: int) -> str:
    ratios, totals = [], [0.0, 0.0, 0.0, 0.0]
    for first in range(0, len(replicas), size):
        group = replicas[first : first + size]
        beside = Beside(products(len(group), block, "cpu"))
        start, cores = time.perf_counter(), time.process_time()
        repeats._Group(study, group, keep=False).run(beside)
        own = time.perf_counter() - start - beside.seconds
        own_cores = time.process_time() - cores - beside.cores
        for i, value in enumerate((own, beside.seconds, own_cores, beside.cores)):
            totals[i] += value
        ratios.append(own / beside.seconds)
    own, bare, own_cores, bare_cores = totals
    return (
        f"engine {own:.2f} s, products {bare:.2f} s, ratio {own / bare:.3f} (groups "
        f"{min(ratios):.3f} .. {statistics.median(ratios):.3f} .. {max(ratios):.3f}); seconds of "
        f"all cores {own_cores:.2f} and {bare_cores:.2f}, ratio {own_cores / bare_cores:.3f}"
    )


def on_gpu(study: repeats.Study, replicas: list[Replica], size: int, block: int) -> str:
    bare = products(size, block, "cuda")
    steps = replicas[0].steps

    def engine() -> None:
        for first in range(0, len(replicas), size):
            repeats._Group(study, replicas[first : first + size], keep=False).run(lambda _: None)

    def floor() -> None:
        for _ in range(steps * -(-len(replicas) // size)):
            bare()

    engine()
    floor()
    rounds = [(clock(engine), clock(floor)) for _ in range(9)]
    ratios = sorted(a / b for a, b in rounds)
    own, bottom = (statistics.median(column) for column in zip(*rounds, strict=True))
    return (
        f"engine {own * 1e3:.0f} ms, products {bottom * 1e3:.0f} ms, ratio "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} .. {ratios[-1]:.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
    replicas = [
        Replica(sigmas=[14.0] * options.steps, lr=0.1, clip=4.0, seed=seed)
        for seed in range(options.replicas)
    ]
    study = repeats.Study.of(network, (x, y), replicas, "cross-entropy", {}, None, device)
    size = options.at_once or study.at_once(len(replicas))
    block = study.block(size)
    said = (on_gpu if device == "cuda" else on_cpu)(study, replicas, size, block)
    print(
        f"{device}: {len(replicas)} replicas, {INPUTS}→{HIDDEN}→{CLASSES}, N = {EXAMPLES}, "
        f"T = {options.steps}, {size} at once, blocks of {block}: {said}"
    )


if __name__ == "__main__":
    main()

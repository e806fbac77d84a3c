"""A hundred replicas of the paper's network beside the arithmetic's own time.

    python benchmarks/replicas.py                   # on the CPU; on a GPU where there is one

The arithmetic is the same matrix products (two forward, one back, two for the clipped sums), bare,
on buffers of the same shapes: *as arranged*, piece by piece and in the layouts that the engine
chose; and *as written*, each product as one `bmm` of all replicas that torch spreads over its
threads. On a CPU they alternate with the engine step by step, and seconds of all cores are shown
beside the clock's, since other programs disturb them less; on a GPU, where a step is only launched,
they alternate run by run. Everything counts: initialisation, noise, the last assessment.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from diminuendo.replicas import Replica
from diminuendo.replicas.engine import Group
from diminuendo.replicas.perceptrons import Perceptrons
from diminuendo.replicas.study import Study

Step = Callable[[], object]
EXAMPLES, INPUTS, HIDDEN, CLASSES = 1000, 60, 1000, 10


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def products(replicas: int, block: int, device: str, arranged: bool) -> Step:
    """One step's matrix products for a piece of so many replicas, in blocks of examples."""
    x = torch.randn(EXAMPLES, INPUTS + 1, device=device)
    first = torch.randn(replicas, INPUTS + 1, HIDDEN, device=device)
    second = torch.randn(replicas, CLASSES, HIDDEN, device=device)
    hidden, back = (torch.randn(replicas * block * HIDDEN, device=device) for _ in range(2))
    narrow = [torch.randn(replicas * block * CLASSES, device=device) for _ in range(2)]
    scaled = torch.randn(replicas * block * (INPUTS + 1), device=device)
    sums = torch.zeros_like(first), torch.zeros_like(second)

    def step() -> None:
        for start in range(0, EXAMPLES, block):
            part = x[start : start + block]
            n = len(part)
            h, b = (_cut(buffer, replicas, n, HIDDEN) for buffer in (hidden, back))
            inputs = _cut(scaled, replicas, n, INPUTS + 1)
            torch.bmm(part.expand(replicas, n, INPUTS + 1), first, out=h)
            if arranged:
                out, slopes = (_cut(buffer, replicas, CLASSES, n) for buffer in narrow)
                torch.bmm(second, h.mT, out=out)
                slopes = slopes.mT
            else:
                out, slopes = (_cut(buffer, replicas, n, CLASSES) for buffer in narrow)
                torch.bmm(h, second.mT, out=out)
            torch.bmm(slopes, second, out=b)
            sums[0].baddbmm_(inputs.mT, b)
            sums[1].baddbmm_(slopes.mT, h)

    return step


def _cut(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """As much of a buffer as a block needs: the last one may be shorter."""
    return buffer[: math.prod(shape)].view(shape)


def in_pieces(batch: Perceptrons, block: int) -> Step:
    """The products of all replicas, in the engine's own pieces, side by side."""
    rows = slice(0, len(batch.state[0]))
    made: dict[int, Step] = {}

    def make(piece: slice, _: slice) -> None:
        made[piece.start] = products(piece.stop - piece.start, block, "cpu", arranged=True)

    batch.each(rows, make)
    return lambda: batch.each(rows, lambda piece, _: made[piece.start]())


def clock(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Beside:
    """Runs and times the bare products after every step of the engine."""

    def __init__(self, *bare: Step) -> None:
        self.bare, self.spent = bare, np.zeros((len(bare), 2))

    def __call__(self, active: int) -> None:
        del active
        for step, spent in zip(self.bare, self.spent, strict=True):
            before = now()
            step()
            spent += now() - before


def now() -> np.ndarray:
    """The clock's seconds, and those of all cores."""
    return np.array([time.perf_counter(), time.process_time()])


def on_cpu(study: Study, replicas: list[Replica], size: int) -> str:
    timings = []
    for first in range(0, len(replicas), size):
        before = now()
        group = Group(study, replicas[first : first + size], keep=False)
        assert isinstance(group.batch, Perceptrons)
        begun = now() - before
        block = group.batch.blocks(group.data)[0].stop
        written = products(len(group.replicas), block, "cpu", arranged=False)
        beside = Beside(in_pieces(group.batch, block), written)
        before = now()
        group.run(beside)
        own = now() - before - beside.spent.sum(0) + begun
        timings.append([own, *beside.spent])
    totals = np.sum(timings, 0)
    lines = [f"engine {totals[0, 0]:.2f} s ({totals[0, 1]:.2f} of all cores)"]
    for i, name in enumerate(("as arranged", "as written"), 1):
        ratios = sorted(own[0] / bare[i - 1][0] for own, *bare in timings)
        lines.append(
            f"products {name} {totals[i, 0]:.2f} s ({totals[i, 1]:.2f}): ratio "
            f"{totals[0, 0] / totals[i, 0]:.3f} (groups {ratios[0]:.3f} .. "
            f"{statistics.median(ratios):.3f} .. {ratios[-1]:.3f}), of all cores' seconds "
            f"{totals[0, 1] / totals[i, 1]:.3f}"
        )
    return "\n  ".join(lines)


def on_gpu(study: Study, replicas: list[Replica], size: int) -> str:
    bare = products(size, study.piece(size)[1], "cuda", arranged=False)
    steps = replicas[0].steps

    def engine() -> None:
        for first in range(0, len(replicas), size):
            Group(study, replicas[first : first + size], keep=False).run(lambda _: None)

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
    parser.add_argument("--threads", type=int, default=2, help="on a CPU; beside a GPU, all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
    replicas = [
        Replica(sigmas=[14.0] * options.steps, lr=0.1, clip=4.0, seed=seed)
        for seed in range(options.replicas)
    ]
    study = Study.of(network, (x, y), replicas, "cross-entropy", {}, None, device)
    size = options.at_once or study.group_size(len(replicas))
    report = (on_gpu if device == "cuda" else on_cpu)(study, replicas, size)
    together, block = study.piece(size)
    print(
        f"{device}: {len(replicas)} replicas, {INPUTS}→{HIDDEN}→{CLASSES}, N = {EXAMPLES}, "
        f"T = {options.steps}, {size} at once, "
        f"pieces of at most {together} and {block} examples\n  {report}"
    )


if __name__ == "__main__":
    main()

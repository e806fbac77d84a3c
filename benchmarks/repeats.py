"""A hundred replicas of the paper's network beside the arithmetic's own time.

    python benchmarks/repeats.py                   # on the CPU; on a GPU where there is one

The arithmetic is the same matrix products (two forward, one back, two for the clipped sums), bare,
on buffers of the same shapes. Rounds alternate between both, group by group; the ratio is of the
summed times, with the quartiles over groups beside it.
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


def clock(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, steps = options.device, options.steps
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
    replicas = [
        Replica(sigmas=[14.0] * steps, lr=0.1, clip=4.0, seed=seed)
        for seed in range(options.replicas)
    ]
    study = repeats.Study.of(network, (x, y), replicas, "cross-entropy", {}, None, device)
    size = options.at_once or study.at_once(len(replicas))
    block = study.block(size)

    def engine(group: list[Replica]) -> list[repeats.Outcome]:
        return repeats.train(network, (x, y), group, at_once=size, device=device, progress=False)

    bare = products(size, block, device)
    engine([Replica(sigmas=[14.0] * 3, lr=0.1, clip=4.0, seed=seed) for seed in range(size)])
    bare()
    rows = []
    for start in range(0, len(replicas), size):
        group = replicas[start : start + size]
        share = len(group) / size
        before = clock(lambda: [bare() for _ in range(steps // 2)], device)
        whole = clock(lambda group=group: engine(group), device)  # type: ignore[misc]
        after = clock(lambda: [bare() for _ in range(steps - steps // 2)], device)
        rows.append((whole, share * (before + after)))
    own, floor = (sum(column) for column in zip(*rows, strict=True))
    ratios = sorted(a / b for a, b in rows)
    spread = f"; groups {ratios[0]:.3f} .. {statistics.median(ratios):.3f} .. {ratios[-1]:.3f}"
    print(
        f"{device}: {len(replicas)} replicas, {INPUTS}→{HIDDEN}→{CLASSES}, N = {EXAMPLES}, "
        f"T = {steps}, {size} at once, blocks of {block}: engine {own:.2f} s, products "
        f"{floor:.2f} s, ratio {own / floor:.3f}{spread}"
    )


if __name__ == "__main__":
    main()

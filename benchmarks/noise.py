"""How fast the exact noise is, and which share of it goes where.

    python benchmarks/noise.py                     # on the CPU
    python benchmarks/noise.py --device cuda       # needs Triton, which comes with PyTorch there
    python benchmarks/noise.py --sizes 71010 100000000

Beside it: PyTorch's normal numbers in float32 and float64, which `noise="fast"` uses, and the
inverse normal of PyTorch alone. Every round times each once, in turn; medians are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from diminuendo.training.mechanism import cipher, cpu, exact, kernels
from diminuendo.training.mechanism.grid import Grid

KEYS = (os.urandom(32), os.urandom(32))


def parts(size: int, device: str) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    total = torch.zeros(size, dtype=torch.float64, device=device)
    single = torch.empty(size, device=device)
    chances = torch.rand(size, dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(0)
    grid = Grid.of(1.0)
    calls: dict[str, Callable[[], object]] = {
        "exact noise, added": lambda: exact.add_rounded_gaussian(total, 1.0, KEYS),
        "normal, float32": lambda: single.normal_(generator=generator),
        "normal, float64": lambda: total.normal_(generator=generator),
        "inverse normal, float64": lambda: torch.special.ndtri(chances, out=total),
        "one number refined": lambda: exact.settle(0.1, grid, KEYS, 5),
    }
    if device == "cpu":
        calls["of it the cipher"] = lambda: cipher.keystream(KEYS[0], size)
    elif kernels.available:
        words = size // 1024 * 1024
        calls["of it the cipher"] = lambda: kernels.keystream(KEYS[0], words, device)
    return calls


def measure(size: int, device: str, rounds: int) -> None:
    calls = parts(size, device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            _settled(device)
            start = time.perf_counter()
            call()
            _settled(device)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    cores = torch.get_num_threads() if device == "cpu" else 1
    whole = medians["exact noise, added"]
    print(f"\n{size:,} coordinates on {device}" + f", {cores} threads" * (device == "cpu"))
    for name, taken in medians.items():
        if name == "one number refined":
            print(f"  {name:26} {taken * 1e6:10.0f} µs, on the CPU")
            continue
        rate = size / taken / 1e6
        print(f"  {name:26} {taken * 1e3:10.3f} ms  {rate:12,.1f} M/s  {taken / whole:6.2f} ×")


def undecided(size: int) -> None:
    grid = Grid.of(1.5)
    places, _ = cpu.add_rounded_gaussian(torch.zeros(size, dtype=torch.float64), grid, KEYS[0])
    expected = 2 * (0.5 - grid.limit) + 2.0**-25
    print(f"\n{len(places)} of {size:,} refined; about {expected * size:.1f} expected")


def _settled(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[71_010, 1_000_000, 20_000_000])
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        threads = torch.get_num_threads()
        for cores in sorted({1, threads}):
            torch.set_num_threads(cores)
            for size in chosen.sizes:
                measure(size, chosen.device, chosen.rounds)
        undecided(20_000_000)
    else:
        for size in chosen.sizes:
            measure(size, chosen.device, chosen.rounds)


if __name__ == "__main__":
    main()

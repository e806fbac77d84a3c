"""The accountant against its peers: times, ratios and brackets, in one run.

python benchmarks/accounting.py            peers on 100 distinct steps (about 2 minutes)
python benchmarks/accounting.py --full     peers on 1,000 distinct steps (about 10 minutes)
"""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
from rich.progress import track
from timing import show, timed

import diminuendo as dim
from diminuendo.accounting import bracket, epsilon, running_epsilon
from diminuendo.cli.options import print_table

RATE, DELTA = 0.01, 1e-5


def own_times() -> None:
    rng = np.random.default_rng(0)
    few = np.linspace(1.5, 0.8, 50)[rng.integers(0, 50, 1_000_000)] * 8
    budget = dim.Budget(epsilon=2, delta=DELTA)
    shape = dim.schedules.shapes.falling("exponential", 1000, 0.5)
    rows = []
    for name, must, call in (
        ("ε of 1,000 distinct σ", 0.5, lambda: epsilon(falling(1000), DELTA, RATE)),
        ("ε of 10,000 distinct σ", 2.0, lambda: epsilon(falling(10_000), DELTA, RATE)),
        ("bracket of 1,000 distinct σ", None, lambda: bracket(falling(1000), DELTA, RATE)),
        ("ε after each of 1,000 steps", None, lambda: running_epsilon(falling(1000), DELTA, RATE)),
        ("calibrate 1,000 steps to (2, 1e-5)", 5.0, lambda: dim.calibrate(shape, budget, RATE)),
        ("ε of 1,000,000 steps, 50 distinct σ", 1.0, lambda: epsilon(few, DELTA, RATE)),
    ):
        seconds, _ = timed(call, repeats=3)
        rows.append([name, show(seconds), "" if must is None else show(must)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows.append(["peak memory so far", f"{peak:.2f} GiB", "1 GiB"])
    print_table("Accounting, median of 3", ["what", "took", "must be under"], rows)


def falling(steps: int) -> np.ndarray:
    return np.linspace(1.5, 0.8, steps)


def peers(steps: int) -> None:
    sigmas = falling(steps)
    ours, ends = timed(lambda: bracket(sigmas, DELTA, RATE), repeats=3)
    alone, _ = timed(lambda: epsilon(sigmas, DELTA, RATE), repeats=3)
    rows = [
        ["diminuendo, upper bound", f"{ends.upper:.5f}", show(alone), "1"],
        [
            "diminuendo, bracket",
            f"[{ends.lower:.5f}, {ends.upper:.5f}]",
            show(ours),
            f"{ours / alone:.1f}",
        ],
    ]
    for name, call in track(
        {
            "dp-accounting PLD, grid 1e-3": lambda: pld(sigmas, 1e-3),
            "dp-accounting PLD, grid 1e-4": lambda: pld(sigmas, 1e-4),
            "dp-accounting RDP": lambda: rdp(sigmas),
            "Opacus PRV": lambda: prv(sigmas),
        }.items(),
        description="peers",
        transient=True,
    ):
        seconds, value = timed(call, repeats=1)
        rows.append([name, f"{value:.5f}", show(seconds), f"{seconds / alone:,.0f}"])
    print_table(
        f"{steps} distinct steps, σ 1.5 → 0.8, rate 0.01, δ = 1e-5",
        ["accountant", "ε", "took", "× ours"],
        rows,
    )


def pld(sigmas: np.ndarray, grid: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=grid)
    for sigma in sigmas:
        accountant.compose(PoissonSampledDpEvent(RATE, GaussianDpEvent(sigma)))
    return float(accountant.get_epsilon(DELTA))


def rdp(sigmas: np.ndarray) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for sigma in sigmas:
        accountant.compose(PoissonSampledDpEvent(RATE, GaussianDpEvent(sigma)))
    return float(accountant.get_epsilon(DELTA))


def prv(sigmas: np.ndarray) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    for sigma in sigmas:
        accountant.step(noise_multiplier=float(sigma), sample_rate=RATE)
    return float(accountant.get_epsilon(DELTA))


def widths() -> None:
    """The widest bracket over the grid, and the slowest answer."""
    worst: dict[str, tuple[float, str]] = {}
    slowest = (0.0, "")
    grid = [
        (s, p, t, d)
        for s in (0.3, 0.6, 1.0, 3.0, 20.0, 100.0)
        for p in (1e-6, 1e-4, 1e-2, 0.3, 1.0)
        for t in (1, 100, 10_000, 1_000_000)
        for d in (1e-12, 1e-8, 1e-5, 1e-2)
    ]
    for sigma, rate, steps, delta in track(grid, description="grid", transient=True):
        start = time.perf_counter()
        ends = one_sigma(sigma, rate, steps, delta)
        seconds = time.perf_counter() - start
        label = f"σ {sigma:g}, rate {rate:g}, T {steps:,}, δ {delta:g}: ε {ends.upper:.4g}"
        if 1e-3 <= ends.upper <= 100:
            width = (ends.upper - ends.lower) / ends.upper
            band = "ε in [0.1, 20]" if 0.1 <= ends.upper <= 20 else "ε in [0.001, 100] elsewhere"
            worst[band] = max(worst.get(band, (0.0, "")), (width, label))
        slowest = max(slowest, (seconds, label))
    rows = [[band, f"{width:.3%}", label] for band, (width, label) in worst.items()]
    rows.append(["slowest", show(slowest[0]), slowest[1]])
    print_table(f"Brackets over {len(grid)} settings", ["", "widest", "where"], rows)


def one_sigma(sigma: float, rate: float, steps: int, delta: float) -> dim.accounting.Bracket:
    from diminuendo.accounting.account import Releases

    one = Releases(np.array([sigma]), np.array([rate]), np.array([float(steps)]))
    return one.bracket(delta)


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    jobs: list[Callable[[], None]] = [
        own_times,
        widths,
        lambda: peers(1000 if "--full" in arguments else 100),
    ]
    for job in jobs:
        job()


if __name__ == "__main__":
    main(sys.argv[1:])

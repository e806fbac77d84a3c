"""Fading against uniform noise at equal learning rate, clip norm and number of steps.

    python benchmarks/equal_settings.py --out equal.csv [--data-dir FOLDER]

Tuning decides more than the shape of the noise, so nothing is tuned here: both methods of a pair
have the same settings, samples, starts and noise streams, and only the noise's distribution over
the steps differs. MNIST in 8×8 blocks, the linear model; --data-dir holds the full MNIST's four
files, without it 5,000 embedded digits are used. About two minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path

import torch

from diminuendo._progress import bar
from diminuendo.compare import Bench, Cell, Effort, Entry
from diminuendo.replicas.statistics import Interval, paired

EXAMPLES, EPSILONS = (250, 1000), (0.5, 1.0, 3.0, 8.0)
LENGTHS, STEPS = (3.0, 10.0), (20, 80)
FADING: dict[str, dict[str, float]] = {"exponential": {"fall": 0.5}, "optimal": {"gamma": 0.95}}
CLIP = 0.5


def difference(one: Entry, other: Entry) -> Interval:
    """Paired difference of test accuracies with its 95% interval."""
    return paired(*([math.nan if a is None else a for a in e.accuracy] for e in (one, other)))


def main() -> None:
    """Run all pairs and write one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--repeats", type=int, default=16)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    folders = {} if wanted.data_dir is None else {"mnist": wanted.data_dir}
    bench = Bench(Effort(repeats=wanted.repeats), folders)
    methods: dict[str, dict[str, float]] = {"uniform": {}, **FADING}
    grid = list(itertools.product(EXAMPLES, EPSILONS, LENGTHS, STEPS))
    header = ["examples", "epsilon", "length", "clip", "steps", "uniform"]
    header += [f"{key}_minus_uniform{end}" for key in FADING for end in ("", "_half")]
    with (
        wanted.out.open("w", newline="", encoding="utf-8") as handle,
        bar("pairs", total=len(grid)) as progress,
    ):
        lines = csv.writer(handle)
        lines.writerow(header)
        for examples, epsilon, length, steps in grid:
            given = {"length": length, "clip": CLIP, "steps": float(steps)}
            found = [
                replace(bench, effort=replace(bench.effort, given={**given, **more})).run(
                    Cell("mnist", "linear", examples, epsilon, key)
                )
                for key, more in methods.items()
            ]
            gains = [number for one in found[1:] for number in difference(one, found[0])]
            row = [examples, epsilon, length, CLIP, steps, found[0].mean.mean, *gains]
            lines.writerow([f"{value:.6g}" for value in row])
            progress.advance()


if __name__ == "__main__":
    main()

"""What filling Poisson draws up to static shapes costs: whole steps with and without blank rows.

    python benchmarks/padding.py                       # workloads A to D of training.py, on the CPU
    python benchmarks/padding.py --workloads B --rounds 50

Both variants draw the same samples (expected size: the workload's batch) and take their steps in
turn, so that the ratio of their times is over the same rows. Beside it, the rows computed more. The
ratio of whole runs has in it that shapes which are new are tried out first: blank rows save some.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator

import torch
from torch.nn import functional as F
from training import workload

import diminuendo as dim
from diminuendo.training import PrivateGradients
from diminuendo.training.padding import cost

RATE = 0.1
_WARM = 6


def steps(name: str, pad: bool, rounds: int) -> Iterator[float]:
    """Seconds of one whole step after another: draw, forward, backward, noise, update."""
    model, x, y = workload(name)
    again = round(1 / RATE)
    data = x.repeat(again, *[1] * (x.dim() - 1)), y.repeat(again)
    plan = dim.plan(
        dim.Budget(epsilon=1, delta=1e-5),
        examples=len(data[0]),
        parameters=1,
        steps=_WARM + rounds,
        sampling_rate=RATE,
        schedule="uniform",
    )
    private = PrivateGradients(model, plan, seed=0, pad=pad)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = private.batches(data)
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        private.backward(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
        optimiser.step()
        optimiser.zero_grad()
        yield time.perf_counter() - start


def main() -> None:
    """Print one line for each workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", default="ABCD")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    for name in options.workloads:
        examples = round(len(workload(name)[1]) / RATE)
        pairs = list(
            zip(
                steps(name, False, options.rounds),
                steps(name, True, options.rounds),
                strict=True,
            )
        )[_WARM:]
        ratios = sorted(filled / plain for plain, filled in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4)
        total = sum(filled for _, filled in pairs) / sum(plain for plain, _ in pairs)
        plain = statistics.median(plain for plain, _ in pairs)
        print(
            f"{name}  {examples} examples at rate {RATE}: {plain * 1e3:.2f} ms without;"
            f" with blank rows the run × {total:.3f}, a step × {middle:.3f} (quartiles {low:.3f}"
            f" .. {high:.3f}), rows × {1 + cost(examples, RATE).more:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

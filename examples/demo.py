"""Plan the paper's setting, draw schedules and bounds into out/, print what was drawn."""

from __future__ import annotations

import warnings
from pathlib import Path

import diminuendo as dim
from diminuendo.cli.options import print_table
from diminuendo.report import figures
from diminuendo.report.text import rounded_up

OUT = Path("out")
EXAMPLES, PARAMETERS, CLIP, STEPS, GAMMA = 1000, 71_010, 4.0, 100, 0.98


def main() -> None:
    warnings.simplefilter("ignore", dim.PlanWarning)
    OUT.mkdir(exist_ok=True)
    budgets = {
        "paper's conversion": dim.Budget(epsilon=4, delta=1e-8, conversion="zcdp"),
        "exact": dim.Budget(epsilon=4, delta=1e-8),
    }
    plans = {}
    for budget_name, budget in budgets.items():
        for label, schedule, momentum in (
            ("uniform", "uniform", None),
            ("optimal", "optimal", None),
            ("optimal, momentum 0.9", "optimal", 0.9),
        ):
            plans[f"{label}, {budget_name}"] = dim.plan(
                budget,
                examples=EXAMPLES,
                parameters=PARAMETERS,
                clip=CLIP,
                gamma=GAMMA,
                steps=STEPS,
                schedule=schedule,
                momentum=momentum,
            )
    exact = {name: plan for name, plan in plans.items() if name.endswith("exact")}
    picture = figures.schedules(
        {name: plan.sigmas for name, plan in exact.items()},
        OUT / "schedules.svg",
        title="(4, 1e-8), 100 steps",
    )
    print_table(
        f"The paper's setting: N = {EXAMPLES}, D = {PARAMETERS:,}, clip {CLIP:g}, "
        f"(4, 1e-8), {STEPS} steps, gamma {GAMMA}",
        ["plan", "R", "σ first", "σ last", "ε", "noise left, uniform = 1"],
        [
            [
                name,
                f"{plan.budget.R:.5f}",
                f"{plan.sigmas[0]:.2f}",
                f"{plan.sigmas[-1]:.2f}",
                rounded_up(plan.epsilon),
                f"{plan.noise_ratio:.3f}",
            ]
            for name, plan in plans.items()
        ],
    )
    counts = [1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
    bounds = _bounds(counts)
    bounds_picture = figures.against_examples(
        counts,
        bounds,
        OUT / "bounds.svg",
        title="ERUB at its best number of steps, κ = 20",
        ylabel="excess risk over the initial gap",
        dashed=["uniform, 1000 parameters"],
    )
    print_table(
        "ERUB at the best number of steps: κ = 20, 1000 parameters, clip 1, (4, 1e-8)",
        ["schedule", *(f"N = {n:,}" for n in counts)],
        [[name, *(f"{value:.3g}" for value in values)] for name, values in bounds.items()],
    )
    print(f"Drawn: {picture} and {bounds_picture}")


def _bounds(counts: list[int]) -> dict[str, list[float]]:
    budget = dim.Budget(epsilon=4, delta=1e-8)
    plans = [dim.plan(budget, examples=n, parameters=1000, kappa=20) for n in counts]
    return {
        "optimal, 1000 parameters": [plan.erub for plan in plans],
        "uniform, 1000 parameters": [plan.erub_uniform for plan in plans],
    }


if __name__ == "__main__":
    main()

"""Draw the README's picture into docs/."""

from __future__ import annotations

import diminuendo as dim
from diminuendo.report import figures

R = dim.Budget(epsilon=4, delta=1e-8).R
steps = 100

figures.schedules(
    {
        "uniform": dim.schedules.uniform(steps, R),
        "gradient descent": dim.schedules.optimal(
            dim.influence.gradient_descent(gamma=0.95, steps=steps), R
        ),
        "momentum 0.9": dim.schedules.optimal(
            dim.influence.momentum(gamma=0.95, beta=0.9, steps=steps), R
        ),
    },
    "docs/schedules.svg",
    title="one budget, three ways to spend it",
)

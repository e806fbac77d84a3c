"""ERUB (the excess-risk upper bound over the initial gap), the best number of steps, true risk.

Under the paper's assumptions: G-Lipschitz losses (the clip norm stands for G), an M-smooth mean
loss that satisfies the Polyak-Łojasiewicz condition with constant μ, κ = M/μ, γ = 1 − 1/κ.
"""

from diminuendo.bounds.erub import (
    gradient_descent_dynamic,
    gradient_descent_uniform,
    noise_level,
    order_of_dynamic,
    order_of_uniform,
    quadratic,
    weighted_noise,
)
from diminuendo.bounds.momentum import (
    admissible_step,
    admissible_step_at,
    momentum_dynamic,
    momentum_uniform,
    zeta,
)
from diminuendo.bounds.risk import (
    psgd_batch_size,
    psgd_sampling_term,
    true_risk_by_stability,
    true_risk_in_probability,
)
from diminuendo.bounds.steps import (
    BestSteps,
    best_steps_dynamic,
    best_steps_momentum_dynamic,
    best_steps_momentum_uniform,
    best_steps_uniform,
)
from diminuendo.bounds.tables import Row, empirical_risk_table, true_risk_table

__all__ = [
    "BestSteps",
    "Row",
    "admissible_step",
    "admissible_step_at",
    "best_steps_dynamic",
    "best_steps_momentum_dynamic",
    "best_steps_momentum_uniform",
    "best_steps_uniform",
    "empirical_risk_table",
    "gradient_descent_dynamic",
    "gradient_descent_uniform",
    "momentum_dynamic",
    "momentum_uniform",
    "noise_level",
    "order_of_dynamic",
    "order_of_uniform",
    "psgd_batch_size",
    "psgd_sampling_term",
    "quadratic",
    "true_risk_by_stability",
    "true_risk_in_probability",
    "true_risk_table",
    "weighted_noise",
    "zeta",
]

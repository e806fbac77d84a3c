"""Events to ε. Full batch: the closed form. Poisson subsampling: a certified bracket."""

from diminuendo.accounting.account import (
    Bracket,
    bracket,
    claim,
    delta,
    epsilon,
    running_epsilon,
)
from diminuendo.accounting.calibrate import (
    largest_clip_to_noise,
    largest_sampling_rate,
    most_steps,
)
from diminuendo.accounting.filters import GaussianFilter, RenyiFilter, best_order

__all__ = [
    "Bracket",
    "GaussianFilter",
    "RenyiFilter",
    "best_order",
    "bracket",
    "claim",
    "delta",
    "epsilon",
    "largest_clip_to_noise",
    "largest_sampling_rate",
    "most_steps",
    "running_epsilon",
]

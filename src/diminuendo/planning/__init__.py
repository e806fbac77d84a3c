"""From (ε, δ) and what is publicly known to a plan: the number of steps and the noise of each.

`planner` decides, by what `constants` assume; `noise` finds the noise multipliers, `joint` the
learning rates, `gain` what the schedule is worth, `mismatch` what other learning rates cost;
`value` is the result, `schema` writes and reads it, `text` puts it into words.
"""

from diminuendo.planning.constants import Guesses
from diminuendo.planning.mismatch import Mismatch, mismatch
from diminuendo.planning.noise import SCHEDULES, optimal_sigmas
from diminuendo.planning.planner import plan
from diminuendo.planning.schema import SCHEMA
from diminuendo.planning.value import MOST_STEPS, Plan, PlanWarning

__all__ = [
    "MOST_STEPS",
    "SCHEDULES",
    "SCHEMA",
    "Guesses",
    "Mismatch",
    "Plan",
    "PlanWarning",
    "mismatch",
    "optimal_sigmas",
    "plan",
]

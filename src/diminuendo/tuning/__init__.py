"""Choose a schedule, steps, learning rate, clip norm and momentum for a privacy budget.

auxiliary_tuning    `tune`: on public or synthetic data, which costs no privacy
private_tuning      `tune_on_private`: on the private data, every trial charged to the budget
private_selection   `select_on_private`: a random number of private runs, only the best released
auxiliary           `Shape`, the public facts about a private data set, and synthetic data of it
space               `Space`, what is searched, and `Candidate`, one point of it
search              the candidates of one family in an Optuna study
results             what `tune` returns
networks            `TwoLayers`, the paper's network
"""

from diminuendo import _extras

with _extras.needed("torch", extra="all", purpose="Tuning"):
    from diminuendo.tuning.auxiliary import Shape
    from diminuendo.tuning.auxiliary_tuning import tune
    from diminuendo.tuning.networks import TwoLayers
    from diminuendo.tuning.private_selection import SelectionResult, select_on_private
    from diminuendo.tuning.private_tuning import PrivateTuningResult, tune_on_private
    from diminuendo.tuning.results import FamilyResult, Trial, TuningResult
    from diminuendo.tuning.space import Candidate, Space

__all__ = [
    "Candidate",
    "FamilyResult",
    "PrivateTuningResult",
    "SelectionResult",
    "Shape",
    "Space",
    "Trial",
    "TuningResult",
    "TwoLayers",
    "select_on_private",
    "tune",
    "tune_on_private",
]

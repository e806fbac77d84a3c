"""Choose noise, steps, learning rate, clipping, momentum and model for a privacy budget.

choosing            `tune`: on public or synthetic data, which costs no privacy
defaults            `settings_for`: good settings for whoever gives none, kept on disk
preview             `preview`: what accuracy to expect for which ε
regression          the same for least squares
tabular             synthetic data like tables of measurements
joint               everything chosen together: `proposals`, judged by a `judge` on auxiliary `sets`
restrictions        what is taken away to see what it gives
auxiliary_tuning    families of schedules compared, each in an Optuna study
private_tuning      `tune_on_private`: on the private data, every trial charged to the budget
private_selection   `select_on_private`: a random number of private runs, only the best released
auxiliary           `Shape`, the public facts about a private data set, and synthetic data of it
space               `Space`, what is searched, and `Candidate`, one point of it
search              the candidates of one family in an Optuna study
results             what `tune` returns: `Choice`, ablations, their JSON, table and picture
networks            models to choose from: `Linear`, `TwoLayers` (the paper's network)
"""

from diminuendo import _extras

with _extras.needed("torch", extra="all", purpose="Tuning"):
    from diminuendo.tuning.auxiliary import Shape
    from diminuendo.tuning.choosing import tune
    from diminuendo.tuning.defaults import (
        ChosenSettings,
        Settings,
        learning_rate_for,
        settings_for,
        settings_for_regression,
    )
    from diminuendo.tuning.networks import Linear, TwoLayers
    from diminuendo.tuning.preview import Expected, Preview, preview
    from diminuendo.tuning.private_selection import SelectionResult, select_on_private
    from diminuendo.tuning.private_tuning import PrivateTuningResult, tune_on_private
    from diminuendo.tuning.results import Ablation, Choice, FamilyResult, Trial, TuningResult
    from diminuendo.tuning.space import Candidate, Space

__all__ = [
    "Ablation",
    "Candidate",
    "Choice",
    "ChosenSettings",
    "Expected",
    "FamilyResult",
    "Linear",
    "Preview",
    "PrivateTuningResult",
    "SelectionResult",
    "Settings",
    "Shape",
    "Space",
    "Trial",
    "TuningResult",
    "TwoLayers",
    "learning_rate_for",
    "preview",
    "select_on_private",
    "settings_for",
    "settings_for_regression",
    "tune",
    "tune_on_private",
]

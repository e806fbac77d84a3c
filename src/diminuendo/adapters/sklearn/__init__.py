"""scikit-learn estimators whose every `fit` is a private run, and is paid for.

PrivateClassifier   logistic regression, or a network with one hidden layer
PrivateRegressor    least squares, linear or with one hidden layer
PublicScaler        scales by stated bounds: looks at nothing, costs nothing
PublicEncoder       columns for stated categories: looks at nothing, costs nothing
PrivateScaler       means and deviations with noise: paid for, like a step of training

Tuning is spending: a grid search fits once for each candidate and fold, and once more at the end.
What all of that costs is stated (`SearchCost`) before the first fit. With `ledger` and `budget`
each fit is charged, whether or not its model wins, and a search that does not fit in is refused as
a whole. Without a ledger each fit is private to its own (ε, δ), and what several of them cost
together is stated and kept by nobody.

Not covered, and charged to nobody: a search's scores. They are computed without noise on held-out
rows, which are private too, and so is the choice that they make. Score on public data (`cv` with a
predefined split of it), or charge the scores yourself (`diminuendo.tuning.tune_on_private`). The
data are not compared with the budget's: a fold is a part of them.
"""

from diminuendo import _extras

_NEEDED = {"extra": "torch,experiments", "purpose": "The scikit-learn adapter"}
with _extras.needed("torch", **_NEEDED), _extras.needed("sklearn", **_NEEDED):
    from diminuendo.adapters.sklearn.around import NotCovered, SearchCost
    from diminuendo.adapters.sklearn.estimators import PrivateClassifier, PrivateRegressor
    from diminuendo.adapters.sklearn.preprocessing import (
        PrivateScaler,
        PublicEncoder,
        PublicScaler,
    )

__all__ = [
    "NotCovered",
    "PrivateClassifier",
    "PrivateRegressor",
    "PrivateScaler",
    "PublicEncoder",
    "PublicScaler",
    "SearchCost",
]

"""A scikit-learn classifier whose every `fit` is a private run, and is paid for.

Tuning is spending: a grid search fits once for each candidate and fold, and once more at the end.
With `ledger` and `budget` each of those fits is charged, whether or not its model wins; a fit that
does not fit in is refused. Without a ledger each fit is private to its own (ε, δ), and what several
of them cost together is for the caller to add up.

Not covered, and charged to nobody: a search's scores. They are computed without noise on held-out
rows, which are private too, and so is the choice that they make. Score on public data (`cv` with a
predefined split of it), or charge the scores yourself (`diminuendo.tuning.tune_on_private`). The
data are not compared with the budget's: a fold is a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _extras, _validate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.planning import plan

_NEEDED = {"extra": "torch,experiments", "purpose": "The scikit-learn adapter"}
with _extras.needed("torch", **_NEEDED), _extras.needed("sklearn", **_NEEDED):
    import torch
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
    from torch import nn

    from diminuendo.training import fit


class PrivateClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Logistic regression, or a network with one hidden layer, by private gradient descent.

    epsilon, delta  what one fit may spend
    steps, lr, clip, gamma, schedule, momentum, sampling_rate
                    as for `dim.plan` and `fit`; choose them without looking at these data, or pay
    hidden          units of the hidden layer; 0 for none
    classes         the labels there can be, public; those that occur in `y` unless given
    ledger, budget  URL of a ledger, and the name of the budget that pays for every fit
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        steps: int = 100,
        lr: float = 0.1,
        clip: float = 1.0,
        gamma: float = 0.98,
        schedule: str = "optimal",
        momentum: float | None = None,
        sampling_rate: float = 1.0,
        hidden: int = 0,
        classes: Sequence[Any] | None = None,
        ledger: str | None = None,
        budget: str | None = None,
        progress: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.steps = steps
        self.lr = lr
        self.clip = clip
        self.gamma = gamma
        self.schedule = schedule
        self.momentum = momentum
        self.sampling_rate = sampling_rate
        self.hidden = hidden
        self.classes = classes
        self.ledger = ledger
        self.budget = budget
        self.progress = progress

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Plan, pay, train. `result_` says what was spent."""
        features, labels = validate_data(self, X, y, dtype=np.float32)
        known = np.unique(labels) if self.classes is None else np.asarray(self.classes)
        self.classes_ = np.sort(known)
        codes = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if (self.classes_[codes] != labels).any():
            raise InputError("among classes", name="a label in y", value="another")
        model = self._network(features.shape[1])
        self.plan_ = plan(
            Budget(epsilon=self.epsilon, delta=self.delta),
            examples=len(features),
            parameters=sum(p.numel() for p in model.parameters()),
            clip=self.clip,
            steps=self.steps,
            gamma=self.gamma,
            schedule=self.schedule,
            momentum=self.momentum,
            sampling_rate=self.sampling_rate,
        )
        self.result_ = fit(
            model,
            (torch.as_tensor(features), torch.as_tensor(codes)),
            self.plan_,
            loss=nn.CrossEntropyLoss(reduction="none"),
            lr=self.lr,
            spending=self._spending(),
            progress=self.progress,
        )
        self.model_ = model
        return self

    def _spending(self) -> Any:
        """The ledger's budget; a fold of a grid search is a part of its data."""
        if self.ledger is None and self.budget is None:
            return None
        from diminuendo.spending import from_ledger

        if self.budget is None:
            raise InputError("given with a ledger", name="budget", value=None)
        return from_ledger(self.ledger, self.budget, self.plan_)

    def _network(self, features: int) -> nn.Module:
        outputs = len(self.classes_)
        hidden = _validate.count("hidden", self.hidden, at_least=0)
        if hidden == 0:
            return nn.Linear(features, outputs)
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """The model's outputs (logits), one row for each row of X and one column for each class."""
        check_is_fitted(self, "model_")
        features = validate_data(self, X, dtype=np.float32, reset=False)
        with torch.no_grad():
            scores: np.ndarray = self.model_(torch.as_tensor(features)).numpy()
        return scores

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities of the classes, in the order of `classes_`; rows add up to 1."""
        return np.asarray(torch.softmax(torch.as_tensor(self.decision_function(X)), 1).numpy())

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row."""
        best = self.decision_function(X).argmax(1)
        return np.asarray(self.classes_[best])

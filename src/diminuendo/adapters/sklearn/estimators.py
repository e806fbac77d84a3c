"""PrivateClassifier and PrivateRegressor: plan, pay, train, by scikit-learn's conventions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin, clone
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import nn

from diminuendo import _validate, accounting
from diminuendo.adapters.sklearn import around
from diminuendo.adapters.sklearn.planned import Planned
from diminuendo.adapters.sklearn.preprocessing import (
    PrivateScaler,
    event_of,
    nn_zero,
    paid_by,
)
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import Ledger
from diminuendo.planning import Plan
from diminuendo.spending import from_ledger
from diminuendo.training import fit
from diminuendo.training.groups import Groups
from diminuendo.tuning import (
    Settings,
    Space,
    settings_for_regression,
)


class _PrivateEstimator(Planned):
    """What both estimators do: check everything, then plan, pay and train.

    Fitted attributes: `model_` (a torch module), `plan_`, `result_` (what training spent),
    `scaler_`, `epsilon_` (the ε of everything that the fit released), `n_iter_` (steps).
    """

    def _read(self, X: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Features in the precision that comes next, and what `y` holds."""
        precision = np.float32 if self.scaler is None else np.float64
        features, targets = validate_data(self, X, y, dtype=precision)
        return features, targets

    def _train(
        self,
        features: np.ndarray,
        targets: torch.Tensor,
        outputs: int,
        loss: nn.Module,
        groups: Any,
    ) -> None:
        """Everything but reading `y`. Nothing is released before all of it has been checked."""
        around.warn_of_uncovered_steps(self, grouped=groups is not None)
        around.warn_of_seed(self.random_state)
        if self.scaler is not None and not getattr(self.scaler, "covered_by_privacy", False):
            raise InputError(
                "a PublicScaler or a PrivateScaler",
                name="scaler",
                value=self.scaler,
                remedy="What another one learns from the data is covered by no claim.",
            )
        persons = Groups.of(groups)
        rows, columns = features.shape
        examples = rows if persons is None else len(persons)
        if examples < 2:
            raise InputError("at least 2", name="the number of examples", value="1 sample")
        if self.scaler is None and (self.lr is None or self.clip is None):
            _refuse_unscaled(features)
        model = self._network(columns, outputs)
        parameters = sum(p.numel() for p in model.parameters())
        scaling = event_of(self.scaler, examples, columns)
        planned, rate = self._planned(examples, columns, outputs, parameters, scaling)
        account = paid_by(self.ledger, self.budget)
        if scaling is not None:
            _refuse_other_payer(self.scaler, account)
        events = (*([] if scaling is None else [scaling]), *planned.events)
        if account is not None and scaling is not None:
            _refuse_beyond(account, events)
        scaler = None if self.scaler is None else clone(self.scaler)
        if scaler is not None:
            if isinstance(scaler, PrivateScaler):
                scaler.set_params(random_state=self.random_state)
                scaler.fit_within(features, persons, account)
            else:
                scaler.fit(features)
            features = np.asarray(scaler.transform(features), dtype=np.float32)
        self.result_ = fit(
            model,
            (torch.tensor(features), targets),
            planned,
            loss=loss,
            groups=persons,
            lr=rate,
            spending=None if account is None else from_ledger(*account, planned),
            seed=self.random_state,
            progress=self.progress,
        )
        if self.result_.status == "interrupted":
            raise KeyboardInterrupt  # a search would otherwise go on with its next fit
        if scaler is not None:
            self.scaler_ = scaler
        self.plan_, self.model_, self.n_iter_ = planned, model, self.result_.steps
        released = (*([] if scaling is None else [scaling]), *self.result_.events)
        whole = planned.budget if scaling is None else self._budget()
        self.epsilon_ = accounting.claim(released, whole)

    def _network(self, features: int, outputs: int) -> nn.Module:
        """Linear from zero, or with one hidden layer from random weights."""
        hidden = _validate.count("hidden", self.hidden, at_least=0)
        if hidden == 0:
            return nn_zero(features, outputs, bias=True).float()
        seed = secrets.randbits(63) if self.random_state is None else self.random_state
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def _outputs(self, X: ArrayLike) -> np.ndarray:
        """What the model says about each row, one column for each of its outputs."""
        check_is_fitted(self, "model_")
        precision = np.float32 if self.scaler is None else np.float64
        features = validate_data(self, X, dtype=precision, reset=False)
        if self.scaler is not None:
            features = np.asarray(self.scaler_.transform(features), dtype=np.float32)
        with torch.no_grad():
            outputs: np.ndarray = self.model_(torch.tensor(features)).numpy()
        return outputs

    def __sklearn_clone__(self) -> Self:
        around.state_cost_of_search(self)
        copied: Self = super().__sklearn_clone__()
        return copied

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        return tags


def _refuse_unscaled(features: np.ndarray) -> None:
    """Raise where defaults cannot work: rows far longer than those of standardised features.

    A check of private data, which stops the fit with a message to whoever holds them (see
    `training.usable`); who gives lr and clip has chosen them for features of this size.
    """
    length, usual = float(np.median(np.linalg.norm(features.astype(float), axis=1))), 10.0
    most = usual * features.shape[1] ** 0.5
    if not 1e-2 <= length <= most:
        raise InputError(
            f"scaled (rows of length 0.01 to {most:.3g})",
            name="the features",
            value="most rows that are shorter" if length < 1e-2 else "most rows that are longer",
            remedy="State what they can be (scaler=PublicScaler(low, high)), pay for means and "
            "deviations (scaler=PrivateScaler(low, high)), or give both lr and clip for features "
            "of this size.",
        )


def _refuse_other_payer(scaler: PrivateScaler, account: tuple[str | None, str] | None) -> None:
    """The estimator's ledger pays for scaling; one that the scaler names would not be charged."""
    named = paid_by(scaler.ledger, scaler.budget)
    if named not in (None, account):
        raise InputError(
            "left out, or the same as the estimator's",
            name="ledger and budget of the scaler",
            value=named,
            remedy="Scaling and training are paid for together: give ledger and budget to the "
            "estimator.",
        )


def _refuse_beyond(account: tuple[str | None, str], events: Sequence[GaussianStep]) -> None:
    """Scaling is paid for first: refuse it where the training after it would not fit."""
    url, name = account
    with Ledger(url, create=False) as ledger:
        if not ledger.fits(name, events):
            raise BudgetRefused(
                f"The budget {name!r} has too little left for scaling and training together. "
                "Nothing was spent."
            )


class PrivateClassifier(ClassifierMixin, _PrivateEstimator):  # type: ignore[misc]
    """Logistic regression, or a network with one hidden layer, by private gradient descent.

    epsilon, delta  what one fit may spend, a PrivateScaler included
    plan            a `dim.plan`, or what `dim.tune` found, in place of epsilon, delta and what
                    follows; a plan alone needs lr, too
    steps, epochs, lr, clip, gamma, schedule, momentum, sampling_rate
                    as for `dim.plan` and `fit`. Where lr, clip or steps is left out, it is chosen
                    on synthetic data of the same public shape (`tuning.settings_for`), together
                    with momentum and the fall of noise and learning rate where those are left out
                    too. Give none that was found by looking at these data, or pay
    hidden          units of the hidden layer; 0 for none
    classes         the labels there can be, public. Unless given, those that occur in `y`, which no
                    claim covers: a label that one row alone has is then seen (`NotCovered`)
    scaler          PublicScaler or PrivateScaler for the features; None: they come scaled
    ledger, budget  URL of a ledger, and the name of the budget that pays for every fit
    random_state    only for tests: with a number the noise can be predicted, and is not private
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        plan: Plan | Any = None,
        steps: int | None = None,
        epochs: float | None = None,
        lr: float | None = None,
        clip: float | None = None,
        gamma: float | None = None,
        schedule: str | None = None,
        momentum: float | None = None,
        sampling_rate: float = 1.0,
        hidden: int = 0,
        classes: Sequence[Any] | None = None,
        scaler: Any = None,
        ledger: str | None = None,
        budget: str | None = None,
        random_state: int | None = None,
        progress: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.plan = plan
        self.steps = steps
        self.epochs = epochs
        self.lr = lr
        self.clip = clip
        self.gamma = gamma
        self.schedule = schedule
        self.momentum = momentum
        self.sampling_rate = sampling_rate
        self.hidden = hidden
        self.classes = classes
        self.scaler = scaler
        self.ledger = ledger
        self.budget = budget
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: ArrayLike, y: ArrayLike, groups: Any = None) -> Self:
        """Plan, pay, train. `result_` says what training spent, `epsilon_` what the fit did.

        groups  whose each row is, where several are one person's: the claim is then for persons
        """
        features, labels = self._read(X, y)
        check_classification_targets(labels)
        labels = column_or_1d(labels, warn=True)
        if self.classes is None:
            around.warn_of_labels()
        known = np.unique(labels if self.classes is None else np.asarray(self.classes))
        if len(known) < 2:
            raise InputError("at least two classes", name="y", value=f"{len(known)} class")
        codes = np.searchsorted(known, labels).clip(max=len(known) - 1)
        if (known[codes] != labels).any():
            raise InputError("among classes", name="a label in y", value="another")
        loss = nn.CrossEntropyLoss(reduction="none")
        self._train(features, torch.tensor(codes), len(known), loss, groups)
        self.classes_ = known
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """How much the model is for each class, one column for each (logits).

        For two classes one number for each row: how much more it is for `classes_[1]`.
        """
        scores = self._outputs(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities of the classes, in the order of `classes_`; rows add up to 1."""
        return np.asarray(torch.softmax(torch.as_tensor(self._outputs(X)).double(), 1).numpy())

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row."""
        best = self._outputs(X).argmax(1)
        return np.asarray(self.classes_[best])


class PrivateRegressor(RegressorMixin, _PrivateEstimator):  # type: ignore[misc]
    """Least squares, linear or with one hidden layer, by private gradient descent.

    target_bounds   (low, high): what `y` can be, public. Values outside are clamped; the model
                    learns y mapped to [−1, 1], and predictions are mapped back
    All others are as for `PrivateClassifier`.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        target_bounds: tuple[float, float] | None = None,
        plan: Plan | Any = None,
        steps: int | None = None,
        epochs: float | None = None,
        lr: float | None = None,
        clip: float | None = None,
        gamma: float | None = None,
        schedule: str | None = None,
        momentum: float | None = None,
        sampling_rate: float = 1.0,
        hidden: int = 0,
        scaler: Any = None,
        ledger: str | None = None,
        budget: str | None = None,
        random_state: int | None = None,
        progress: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.target_bounds = target_bounds
        self.plan = plan
        self.steps = steps
        self.epochs = epochs
        self.lr = lr
        self.clip = clip
        self.gamma = gamma
        self.schedule = schedule
        self.momentum = momentum
        self.sampling_rate = sampling_rate
        self.hidden = hidden
        self.scaler = scaler
        self.ledger = ledger
        self.budget = budget
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: ArrayLike, y: ArrayLike, groups: Any = None) -> Self:
        """Plan, pay, train. `result_` says what training spent, `epsilon_` what the fit did.

        groups  whose each row is, where several are one person's: the claim is then for persons
        """
        features, values = validate_data(
            self,
            X,
            y,
            dtype=np.float32 if self.scaler is None else np.float64,
            y_numeric=True,
        )
        low, high = self._bounds()
        unit = (np.asarray(values, dtype=np.float64) - (low + high) / 2) / ((high - low) / 2)
        if (np.abs(unit) > 1).mean() > 0.5:
            raise InputError(
                "around the data",
                name="target_bounds",
                value="bounds that most values of y lie outside of",
                remedy="State bounds in the unit of y.",
            )
        targets = torch.as_tensor(unit.clip(-1, 1), dtype=torch.float32)[:, None]
        self._train(features, targets, 1, HalfSquares(), groups)
        return self

    def _settings(self, examples: int, columns: int, outputs: int, fixed: Space) -> Settings:
        del outputs
        if self.hidden:
            raise InputError(
                "all given for a network",
                name="lr, clip and steps",
                value="left out",
                remedy="They are chosen for a linear model only (hidden=0).",
            )
        return settings_for_regression(
            self._budget(), examples=examples, features=columns, fixed=fixed
        )

    def _bounds(self) -> tuple[float, float]:
        """The stated bounds of `y`, low < high."""
        try:
            low, high = self.target_bounds  # type: ignore[misc]
        except (TypeError, ValueError):
            raise InputError(
                "a pair (low, high): what y can be, public",
                name="target_bounds",
                value=self.target_bounds,
                remedy="Not what y is in these data: that would have to be paid for.",
            ) from None
        low = _validate.real("target_bounds[0]", low)
        return low, _validate.real("target_bounds[1]", high, above=low)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """A number for each row, in the unit of `y`; within the bounds of what it learned from."""
        check_is_fitted(self, "model_")
        low, high = self._bounds()
        unit = self._outputs(X)[:, 0].astype(np.float64).clip(-1, 1)
        return np.asarray((low + high) / 2 + unit * (high - low) / 2)


class HalfSquares(nn.Module):
    """Half the squared error of each example."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One number ≥ 0 for each row."""
        return 0.5 * (outputs - targets).square().sum(1)

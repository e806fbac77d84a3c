"""Scaling and encoding that a privacy claim covers: by public facts, or paid for.

Formal guarantee of `PrivateScaler`: with N rows, each clamped to stated bounds and mapped to
u ∈ [−1, 1]^d, what is released is S/N, S = Σ_i f(u_i) + noise, f(u) = (u, u² − ½) entry by entry.
For every entry u² + (u² − ½)² = u⁴ + ¼ ≤ 5/4, so that ‖f(u)‖ ≤ C = √(5d/4): adding or removing a
row moves the sum by at most C. S/N is the gradient of the loss ⟨θ, f(u_i)⟩ at any θ, so one step of
`fit` with clip norm C releases it: the noise, the rounding, the charge and the record are those of
a training step. Means and deviations are computed from S/N alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.validation import check_is_fitted, validate_data

from diminuendo import _validate
from diminuendo.adapters.sklearn.around import Cost, state_cost_of_search, warn_of_seed
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan, PlanWarning, plan
from diminuendo.spending import from_ledger
from diminuendo.training import fit
from diminuendo.training.groups import Groups

_MOST_OUTSIDE = 0.5


class _Scaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Clamps to public bounds `low` and `high`, one number for all columns or one for each."""

    covered_by_privacy = True
    low: ArrayLike | None
    high: ArrayLike | None

    def _fit_bounds(self, X: ArrayLike) -> np.ndarray:
        """Check data and bounds; the data, clamped and mapped to [−1, 1]."""
        values: np.ndarray = validate_data(self, X, dtype=np.float64)
        self.low_, self.high_ = _bounds(self.low, self.high, values.shape[1])
        outside = ((values < self.low_) | (values > self.high_)).mean(axis=0)
        if (outside > _MOST_OUTSIDE).any():
            # Reaches who holds the data, as a wrong shape does; nothing has been released.
            raise InputError(
                "around the data",
                name="low and high",
                value=f"bounds that most values of column {int(outside.argmax())} lie outside of",
                remedy="State bounds in the unit of the data.",
            )
        return self._to_unit(values)

    def _to_unit(self, values: np.ndarray) -> np.ndarray:
        middle, half = (self.low_ + self.high_) / 2, (self.high_ - self.low_) / 2
        return np.asarray(np.clip((values - middle) / half, -1.0, 1.0))


def _bounds(low: Any, high: Any, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Both as one finite number for each column, low < high."""
    both = []
    for name, value in (("low", low), ("high", high)):
        try:
            array = np.broadcast_to(np.asarray(value, dtype=np.float64), (columns,))
            usable = value is not None and bool(np.isfinite(array).all())
        except (TypeError, ValueError):
            usable = False
        if not usable:
            raise InputError(
                f"a finite number, or one for each of the {columns} columns",
                name=name,
                value=value,
                remedy="Public facts about the features: what they can be, not what they are.",
            )
        both.append(array)
    lower, upper = both
    if not (lower < upper).all():
        column = int(np.argmin(lower < upper))
        raise InputError(f"above low ({lower[column]:g})", name="high", value=float(upper[column]))
    return lower, upper


class PublicScaler(_Scaler):
    """Maps each column from its stated bounds to [−1, 1]; what lies outside is clamped to them.

    low, high  what the features can be, public: one number for all columns, or one for each

    Learns nothing from the data, so nothing is to be paid for. Bounds that most values of a column
    lie outside of are refused.
    """

    def __init__(self, low: ArrayLike | None = None, high: ArrayLike | None = None) -> None:
        self.low = low
        self.high = high

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Check bounds and data; keeps nothing of the data but how many columns there are."""
        del y
        self._fit_bounds(X)
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """The features in [−1, 1], float64."""
        check_is_fitted(self, "low_")
        return self._to_unit(validate_data(self, X, dtype=np.float64, reset=False))


class PrivateScaler(_Scaler):
    """Centres and scales each column by means and deviations that are released with noise.

    low, high       what the features can be, public; values outside are clamped
    epsilon, delta  what a fit of the scaler may spend
    ledger, budget  URL of a ledger, and the name of the budget that pays
    random_state    only for tests: with a number the noise can be predicted, and is not private

    `PrivateClassifier(scaler=PrivateScaler(...))` accounts it together with the training, within
    the classifier's (ε, δ). As a step of a Pipeline it spends beside the classifier, on the same
    ledger if both name it. Columns come out with deviations near 1 where the noise is small beside
    them; no deviation is taken to be less than a hundredth of half the range, or than its noise.
    """

    def __init__(
        self,
        low: ArrayLike | None = None,
        high: ArrayLike | None = None,
        *,
        epsilon: float = 0.2,
        delta: float = 1e-5,
        ledger: str | None = None,
        budget: str | None = None,
        random_state: int | None = None,
    ) -> None:
        self.low = low
        self.high = high
        self.epsilon = epsilon
        self.delta = delta
        self.ledger = ledger
        self.budget = budget
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: Any = None, groups: Any = None) -> Self:
        """Pay, then release means and deviations. `result_` says what was spent.

        groups  whose each row is, where several are one person's: the claim is then for persons
        """
        del y
        warn_of_seed(self.random_state)
        return self.fit_within(X, Groups.of(groups), paid_by(self.ledger, self.budget))

    def fit_within(self, X: ArrayLike, groups: Any, account: tuple[str | None, str] | None) -> Self:
        """`fit` for an estimator that accounts for it: on its account, for persons if it has any.

        account  the ledger's URL and the budget that pay, or None
        """
        unit = self._fit_bounds(X)
        persons = len(unit) if groups is None else len(groups)
        self._release(unit, self.plan_for(persons, unit.shape[1]), groups, account)
        return self

    def plan_for(self, examples: int, columns: int) -> Plan:
        """The one noisy step that releases the moments of so many columns."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)  # they are about learning
            return plan(
                Budget(epsilon=self.epsilon, delta=self.delta),
                examples=examples,
                parameters=2 * columns,
                clip=math.sqrt(5 * columns / 4),
                steps=1,
                schedule="uniform",
            )

    def _release(
        self, unit: np.ndarray, step: Plan, groups: Any, account: tuple[str | None, str] | None
    ) -> None:
        moments = nn_zero(2 * unit.shape[1])
        spending = None if account is None else from_ledger(*account, step)
        self.result_ = fit(
            moments,
            (torch.from_numpy(np.hstack([unit, unit**2 - 0.5])), torch.zeros(len(unit))),
            step,
            loss=lambda products, _: products[:, 0],
            groups=groups,
            lr=1.0,
            spending=spending,
            seed=self.random_state,
            progress=False,
        )
        means, squares = -moments.weight.detach().numpy().reshape(2, -1)
        noise = float(step.sigmas[0]) * step.clip / step.examples
        least = max(1e-4, 2 * noise)  # of a variance, in units of half the range
        variances = np.maximum(squares + 0.5 - means**2, least)
        half = (self.high_ - self.low_) / 2
        self.mean_ = (self.low_ + self.high_) / 2 + half * means.clip(-1, 1)
        self.scale_ = half * np.sqrt(variances.clip(max=1.0))

    def transform(self, X: ArrayLike) -> np.ndarray:
        """The clamped features less the noisy means, over the noisy deviations; float64."""
        check_is_fitted(self, "scale_")
        values = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray((np.clip(values, self.low_, self.high_) - self.mean_) / self.scale_)

    def cost_of_a_fit(self, changed: dict[str, Any]) -> Cost:
        """What one fit costs with these parameters changed."""
        own = type(self)(**{**self.get_params(deep=False), **changed})
        step = own.plan_for(2, 1)  # the noise multiplier depends on the budget alone
        return Cost(step.events, step.budget, paid_by(own.ledger, own.budget))

    def __sklearn_clone__(self) -> Self:
        state_cost_of_search(self)
        copied: Self = super().__sklearn_clone__()
        return copied


def nn_zero(inputs: int, outputs: int = 1, *, bias: bool = False) -> torch.nn.Linear:
    """A linear map in float64 that begins at zero."""
    layer = torch.nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    return layer


def paid_by(ledger: str | None, budget: str | None) -> tuple[str | None, str] | None:
    """The account that pays, or None; a ledger without a budget is refused."""
    if ledger is None and budget is None:
        return None
    if budget is None:
        raise InputError("given with a ledger", name="budget", value=None)
    return ledger, budget


def event_of(scaler: Any, examples: int, columns: int) -> GaussianStep | None:
    """What a scaler releases when it is fitted; None for one that releases nothing."""
    if not isinstance(scaler, PrivateScaler):
        return None
    return scaler.plan_for(examples, columns).events[0]


class PublicEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A column of zeros and ones for each stated category of each input column.

    categories  for each column the values that it can have, public
    unknown     what another value becomes: "zeros" in all its columns, or an "error"

    Learns nothing from the data, so nothing is to be paid for.
    """

    covered_by_privacy = True

    def __init__(
        self, categories: Sequence[Sequence[Any]] | None = None, *, unknown: str = "zeros"
    ) -> None:
        self.categories = categories
        self.unknown = unknown

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Check categories and data; keeps nothing of the data but the names of the columns."""
        del y
        if self.categories is None or isinstance(self.categories, str):
            raise InputError(
                "a list of values for each column",
                name="categories",
                value=self.categories,
                remedy='Public facts: PublicEncoder([["no", "yes"], ["A", "B", "C"]]), say.',
            )
        _validate.choice("unknown", self.unknown, ("zeros", "error"))
        stated = [list(values) for values in self.categories]
        self._encoder = OneHotEncoder(
            categories=stated,
            sparse_output=False,
            handle_unknown="ignore" if self.unknown == "zeros" else "error",
        ).fit(X)
        self.categories_ = self._encoder.categories_
        self.n_features_in_ = self._encoder.n_features_in_
        if hasattr(self._encoder, "feature_names_in_"):
            self.feature_names_in_ = self._encoder.feature_names_in_
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """One row of zeros and ones for each row, float64."""
        check_is_fitted(self, "categories_")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found unknown categories", UserWarning)
            return np.asarray(self._encoder.transform(X))

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names like "colour_red"."""
        check_is_fitted(self, "categories_")
        return np.asarray(self._encoder.get_feature_names_out(input_features))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

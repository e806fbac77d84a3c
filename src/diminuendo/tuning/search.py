"""The candidates of one family of schedules, proposed and kept by an Optuna study."""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diminuendo import _extras
from diminuendo.errors import InputError
from diminuendo.tuning.results import Trial
from diminuendo.tuning.space import LOGARITHMIC, Candidate, Space

if TYPE_CHECKING:
    import optuna

_RANDOM_TRIALS = 8
"""Candidates drawn at random before the sampler learns from scores."""
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds between attempts where two processes collide."""
_COLLISIONS = ("already exists", "unique", "duplicate", "locked")
Result = TypeVar("Result")


class Search:
    """One family's Optuna study.

    Two processes that share a storage may both be handed a candidate that was enqueued, and train
    it twice; with ends_first=False none is enqueued.
    """

    def __init__(
        self,
        family: str,
        space: Space,
        settings: Mapping[str, Any],
        storage: str | None,
        name: str,
        seed: int,
        *,
        ends_first: bool = True,
    ) -> None:
        self.family, self.space = family, space
        self.study = _open_study(name, storage, seed)
        _check_settings(self.study, {**settings, "family": family}, name)
        if ends_first and not self.study.get_trials(deepcopy=False):
            for point in self._first_points():
                self.study.enqueue_trial(point, skip_if_exists=True)

    def _first_points(self) -> list[dict[str, float]]:
        """Both ends and the middle of T, the rest in the middle: the best T is often an end."""
        names = self.space.searched(self.family)
        middle: dict[str, float] = {}
        for name in names:
            low, high = getattr(self.space, name)
            middle[name] = math.sqrt(low * high) if name in LOGARITHMIC else (low + high) / 2
        steps = self.space.steps
        if not isinstance(steps, tuple):
            return [middle]
        low, high = steps
        return [{**middle, "steps": t} for t in (low, high, (low + high) // 2)]

    def run(
        self,
        scores: Callable[[Sequence[Candidate]], list[float | None]],
        trials: int,
        batch: int,
        advance: Callable[[int], None],
    ) -> None:
        """Propose, score and record batches of candidates until `trials` of them are finished."""
        advance(min(trials, self._finished()))
        while (left := trials - self._finished()) > 0:
            proposals = [self.study.ask() for _ in range(min(batch, left))]
            candidates = [self.candidate(trial) for trial in proposals]
            for trial, score in zip(proposals, scores(candidates), strict=True):
                self.finish(trial.number, score)
            advance(len(proposals))

    def finish(self, number: int, score: float | None) -> None:
        """End a trial: as failed without a score. A trial that has ended already stays as it is."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        state = TrialState.FAIL if score is None else TrialState.COMPLETE
        with suppress(UpdateFinishedTrialError):
            self.study.tell(number, score, state=state, skip_if_finished=True)

    def proposed(self) -> int:
        """How many candidates were ever handed out, finished or not."""
        from optuna.trial import TrialState

        return sum(
            trial.state != TrialState.WAITING for trial in self.study.get_trials(deepcopy=False)
        )

    def _finished(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))

    def candidate(self, trial: Any) -> Candidate:
        """The candidate that an Optuna trial stands for."""

        def choose(name: str, low: float, high: float) -> float:
            if name == "steps":
                return int(trial.suggest_int(name, low, high))
            return float(trial.suggest_float(name, low, high, log=name in LOGARITHMIC))

        return self.space.candidate(self.family, choose)

    def trials(self, most: int) -> tuple[Trial, ...]:
        """The first `most` to finish: machines that share a study may finish more."""
        from optuna.trial import FixedTrial

        finished = [
            trial
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.is_finished() and trial.params
        ]
        finished.sort(key=lambda trial: (trial.datetime_complete, trial.number))
        return tuple(
            Trial(candidate=self.candidate(FixedTrial(trial.params)), score=trial.value)
            for trial in sorted(finished[:most], key=lambda trial: trial.number)
        )


def _open_study(name: str, storage: str | None, seed: int) -> optuna.Study:
    with _extras.needed("optuna", extra="tune", purpose="Tuning"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=_RANDOM_TRIALS,
            multivariate=True,
            constant_liar=True,
            seed=seed if storage is None else None,
        )
    if storage is not None and storage.endswith(".journal") and not Path(storage).parent.is_dir():
        raise InputError("in a folder that exists", name="storage", value=storage)

    def create() -> optuna.Study:
        place: Any = storage
        if storage is not None and storage.endswith(".journal"):
            from optuna.storages.journal import JournalFileBackend, JournalStorage

            place = JournalStorage(JournalFileBackend(storage))
        return optuna.create_study(
            study_name=name, storage=place, sampler=sampler, load_if_exists=True
        )

    try:
        return _with_retries(create)
    except Exception as error:
        if storage is None:
            raise
        raise InputError(
            "a database URL that can be reached, or a file ending in .journal",
            name="storage",
            value=re.sub(r"//[^/]*@", "//***@", storage.split("?")[0]),
            remedy=f"({type(error).__name__})",
        ) from None


def _with_retries(call: Callable[[], Result]) -> Result:
    """The call's result; tried again where another process created the same thing meanwhile."""
    for pause in _PAUSES:
        try:
            return call()
        except Exception as error:
            message = f"{error} {error.__cause__}".lower()
            if not any(words in message for words in _COLLISIONS):
                raise
            time.sleep(pause)
    return call()


def _check_settings(study: optuna.Study, settings: Mapping[str, Any], name: str) -> None:
    """Refuse to resume a study that was begun with other settings."""
    wanted = json.loads(json.dumps(settings))
    stored = study.user_attrs.get("settings")
    if stored is None:
        _with_retries(lambda: study.set_user_attr("settings", wanted))
        return
    differing = sorted(key for key in {*wanted, *stored} if wanted.get(key) != stored.get(key))
    if differing:
        raise InputError(
            "resumed with the settings that it was begun with",
            name=f"the study {name!r}",
            value=f"others: {', '.join(differing)}",
            remedy="Use these settings, or give the study another name.",
        )

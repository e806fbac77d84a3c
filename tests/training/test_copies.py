"""Copies of a run's folder: together they release no step twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BUDGET, LINEAR, LOSS, run

import diminuendo as dim
from diminuendo.accounting import GaussianFilter
from diminuendo.spending import AdaptiveSpending
from diminuendo.training import Checkpoints, PrivateGradients, Result


class Stopped(Exception):
    pass


def stopped_at(step: int) -> Any:
    def after(done: int, _: object) -> None:
        if done == step:
            raise Stopped

    return after


def begun(folder: Path, plan: dim.Plan, **options: Any) -> None:
    """A run that an error ended after its seventh step."""
    with pytest.raises(Stopped):
        run(LINEAR.model(), plan, folder=folder, every=3, after_step=stopped_at(7), **options)


def gone_on(folder: Path, plan: dim.Plan, **options: Any) -> tuple[Result, set[int]]:
    """The result, and the steps (1, 2, …) that were taken now."""
    taken: set[int] = set()
    result = run(
        LINEAR.model(),
        plan,
        folder=folder,
        every=3,
        after_step=lambda done, _: taken.add(done),
        **options,
    )
    return result, taken


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine: nothing is known here of the runs there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state elsewhere"))
    return tmp_path


def test_a_copy_goes_on_after_the_steps_of_all(tmp_path: Path) -> None:
    plan = LINEAR.plan()
    begun(tmp_path / "run", plan)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    result, taken = gone_on(tmp_path / "run", plan)
    assert (result.status, taken) == ("done", set(range(8, 21)))
    result, again = gone_on(tmp_path / "copy", plan)
    assert (again, result.lost) == (set(), 16), "the checkpoint is of step 4"


def test_an_old_copy_put_back_in_place_goes_on_after_the_steps_of_all(tmp_path: Path) -> None:
    plan = LINEAR.plan()
    begun(tmp_path / "run", plan)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(Stopped):
        run(LINEAR.model(), plan, folder=tmp_path / "run", every=3, after_step=stopped_at(12))
    shutil.copytree(tmp_path / "copy", tmp_path / "run", dirs_exist_ok=True)
    _, taken = gone_on(tmp_path / "run", plan)
    assert taken == set(range(13, 21))


def test_two_copies_at_a_time(tmp_path: Path) -> None:
    """The first reserves steps, the second goes on after them, and the first gets no more."""
    plan, seen = LINEAR.plan(), []
    begun(tmp_path / "run", plan)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    first: set[int] = set()

    def after(done: int, _: object) -> None:
        first.add(done)
        if done == 9:
            seen.append(gone_on(tmp_path / "copy", plan)[1])

    with pytest.raises(dim.UsageError, match="taken up again"):
        run(LINEAR.model(), plan, folder=tmp_path / "run", every=3, after_step=after)
    assert not first & seen[0]
    assert max(seen[0]) == plan.steps


def test_one_s_own_loop_and_a_copied_journal(tmp_path: Path) -> None:
    plan = LINEAR.plan()
    private = PrivateGradients(LINEAR.model(), plan, journal=tmp_path / "journal.json")
    x, y = LINEAR.data()
    for _ in range(5):
        private.backward(LOSS(private.model(x), y))
    state = private.state_dict()
    private.close()
    shutil.copy(tmp_path / "journal.json", tmp_path / "second.json")
    steps = []
    for name in ("journal.json", "second.json"):
        other = PrivateGradients(LINEAR.model(), plan, journal=tmp_path / name)
        other.load_state_dict(state)
        steps.append(other.step)
        for _ in range(4):
            other.backward(LOSS(other.model(x), y))
        other.close()
    assert steps == [5, 9]


def test_a_policy_s_copy_whose_steps_nobody_knows(tmp_path: Path) -> None:
    plan = LINEAR.plan()
    options: dict[str, Any] = {"policy": lambda _: 30.0}

    def spending() -> AdaptiveSpending:
        return AdaptiveSpending(GaussianFilter(BUDGET))

    begun(tmp_path / "run", plan, spending=spending(), **options)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(Stopped):
        run(
            LINEAR.model(),
            plan,
            folder=tmp_path / "run",
            every=3,
            after_step=stopped_at(14),
            spending=spending(),
            **options,
        )
    with pytest.raises(dim.InputError, match="nobody knows"):
        gone_on(tmp_path / "copy", plan, spending=spending(), **options)


@pytest.mark.parametrize("where", ["copy", "run"])
def test_elsewhere_a_copy_has_to_be_stated_to_be_none(elsewhere: Path, where: str) -> None:
    plan = LINEAR.plan()
    with pytest.MonkeyPatch.context() as here:
        here.setenv("XDG_STATE_HOME", str(elsewhere / "state here"))
        begun(elsewhere / "run", plan)
    shutil.copytree(elsewhere / "run", elsewhere / "copy")
    if where == "run":  # the folder itself, on a disk that another machine sees
        assert gone_on(elsewhere / "run", plan)[0].status == "done"
        return
    with pytest.raises(dim.InputError, match="moved=True"):
        gone_on(elsewhere / "copy", plan)
    result = run(LINEAR.model(), plan, folder=Checkpoints(elsewhere / "copy", every=3, moved=True))
    assert (result.status, result.steps) == ("done", plan.steps)


def test_a_folder_that_was_renamed_is_no_copy(elsewhere: Path) -> None:
    plan = LINEAR.plan()
    with pytest.MonkeyPatch.context() as here:
        here.setenv("XDG_STATE_HOME", str(elsewhere / "state here"))
        begun(elsewhere / "run", plan)
    (elsewhere / "run").rename(elsewhere / "renamed")
    assert gone_on(elsewhere / "renamed", plan)[0].status == "done"


def test_a_home_that_cannot_be_written_leaves_the_folder_s_own_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    plan = LINEAR.plan()
    begun(tmp_path / "run", plan)
    assert gone_on(tmp_path / "run", plan)[0].status == "done"


def test_seeded_runs_may_be_copied(tmp_path: Path) -> None:
    """They are experiments: the same noise again, and no claim."""
    plan = LINEAR.plan()
    begun(tmp_path / "run", plan, seed=3)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    models = []
    for name in ("run", "copy"):
        models.append(LINEAR.model())
        run(models[-1], plan, folder=tmp_path / name, every=3, seed=3)
    assert torch.equal(models[0].weight, models[1].weight)

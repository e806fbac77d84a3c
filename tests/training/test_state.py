"""One's own loop, saved and gone on from: no step is released twice for the price of one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BUDGET, LINEAR, LOSS, weights

import diminuendo as dim
from diminuendo.accounting import GaussianFilter
from diminuendo.errors import InputError
from diminuendo.spending import AdaptiveSpending
from diminuendo.training import PrivateGradients


def train(
    private: PrivateGradients, upto: int, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """Steps of one's own, until so many are over; what was released."""
    released = []
    for x, y in private.batches(LINEAR.data()):
        before = private.step
        private.backward(LOSS(private.model(x), y))
        if private.step == before:
            continue
        released.append(torch.cat([part.flatten() for part in private.released]))
        optimizer.step()
        optimizer.zero_grad()
        if private.step == upto:
            break
    return released


def made(plan: dim.Plan, **options: Any) -> tuple[PrivateGradients, torch.optim.Optimizer]:
    model = LINEAR.model()
    return PrivateGradients(model, plan, **options), torch.optim.SGD(model.parameters(), lr=0.5)


def everything(private: PrivateGradients, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": {name: part.clone() for name, part in private.model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "private": private.state_dict(),
    }


def gone_on(
    plan: dim.Plan, state: dict[str, Any], **options: Any
) -> tuple[PrivateGradients, torch.optim.Optimizer]:
    private, optimizer = made(plan, **options)
    private.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    private.load_state_dict(state["private"])
    return private, optimizer


def test_a_seeded_loop_goes_on_bit_for_bit() -> None:
    plan = LINEAR.plan(sampling_rate=0.3, gamma=0.95)
    straight, optimizer = made(plan, seed=3)
    train(straight, plan.steps, optimizer)
    first, optimizer = made(plan, seed=3)
    train(first, 8, optimizer)
    state = everything(first, optimizer)
    train(first, 13, optimizer)  # and then it crashed
    second, optimizer = gone_on(plan, state, seed=3)
    assert (second.step, second.lost) == (8, 0)
    train(second, plan.steps, optimizer)
    assert torch.equal(weights(second.model), weights(straight.model))
    assert second.spending.granted == plan.events


CRASH = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {here!r})
    import torch
    from test_state import LINEAR, everything, made, train
    from diminuendo.training import Journal
    plan = LINEAR.plan()
    private, optimizer = made(plan, journal=Journal({folder!r} + "/journal.json", plan, every=4))
    train(private, 5, optimizer)
    torch.save(everything(private, optimizer), {folder!r} + "/state.pt")
    train(private, 10, optimizer)
    os._exit(9)
"""


def test_after_a_crash_the_journal_knows_what_was_released(tmp_path: Path) -> None:
    script = textwrap.dedent(CRASH.format(here=str(Path(__file__).parent), folder=str(tmp_path)))
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    journal = tmp_path / "journal.json"
    assert json.loads(journal.read_text())["reserved"] == 12
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    plan = LINEAR.plan()
    private, optimizer = gone_on(plan, state, journal=journal)
    assert (private.step, private.lost) == (12, 7), "steps 6 to 12 may have been released"
    assert len(train(private, plan.steps, optimizer)) == plan.steps - 12
    assert private.spending.granted == plan.events
    private.close()
    fresh, optimizer = made(plan, journal=journal)
    assert train(fresh, plan.steps, optimizer) == [], "a journal remembers without a state, too"


def test_a_clean_stop_loses_nothing(tmp_path: Path) -> None:
    plan, journal = LINEAR.plan(), tmp_path / "journal.json"
    private, optimizer = made(plan, journal=journal)
    train(private, 5, optimizer)
    state = everything(private, optimizer)
    assert json.loads(journal.read_text())["reserved"] == 8
    private.close()
    assert json.loads(journal.read_text())["reserved"] == 5
    private, optimizer = gone_on(plan, state, journal=journal)
    assert (private.step, private.lost) == (5, 0)
    assert len(train(private, plan.steps, optimizer)) == plan.steps - 5


def test_two_that_go_on_from_one_state_never_release_a_step_twice(tmp_path: Path) -> None:
    plan, journal = LINEAR.plan(), tmp_path / "journal.json"
    private, optimizer = made(plan, journal=journal)
    train(private, 5, optimizer)
    state = everything(private, optimizer)
    private.close()
    one, optimizer = gone_on(plan, state, journal=journal)
    train(one, 9, optimizer)
    one.close()
    two, optimizer = gone_on(plan, state, journal=journal)
    assert (two.step, two.lost) == (9, 4)


def test_without_a_journal_or_a_ledger_nobody_knows() -> None:
    plan = LINEAR.plan()
    private, optimizer = made(plan)
    train(private, 5, optimizer)
    with pytest.raises(dim.UsageError, match="journal="):
        gone_on(plan, everything(private, optimizer))


def test_a_lost_journal_is_refused(tmp_path: Path) -> None:
    plan, journal = LINEAR.plan(), tmp_path / "journal.json"
    private, optimizer = made(plan, journal=journal)
    train(private, 5, optimizer)
    state = everything(private, optimizer)
    journal.unlink()
    with pytest.raises(dim.InputError, match="journal"):
        gone_on(plan, state, journal=journal)


def test_states_of_something_else_are_refused(tmp_path: Path) -> None:
    plan, options = LINEAR.plan(), {"journal": tmp_path / "journal.json"}
    private, optimizer = made(plan, **options)
    train(private, 5, optimizer)
    state = everything(private, optimizer)
    with pytest.raises(dim.InputError, match="plan"):
        gone_on(LINEAR.plan(steps=21), state, **options)
    with pytest.raises(dim.InputError, match="seed"):
        gone_on(plan, state, seed=4)
    with pytest.raises(dim.UsageError, match="before the first batch"):
        private.load_state_dict(state["private"])


def test_a_policy_s_events_are_in_the_journal(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        spending = AdaptiveSpending(GaussianFilter(BUDGET))
        journal = tmp_path / "journal.json"
        policy = lambda released: 10.0 + released.step  # noqa: E731
        return {"spending": spending, "policy": policy, "journal": journal}

    plan = LINEAR.plan()
    private, optimizer = made(plan, **options())
    train(private, 3, optimizer)
    state = everything(private, optimizer)
    train(private, 7, optimizer)  # and then it crashed
    again, _ = gone_on(plan, state, **options())
    assert (again.step, again.lost) == (7, 4)
    sigmas = [event.noise_multiplier for event in again.spending.granted]
    assert sigmas == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]


def test_a_ledger_knows_without_a_journal(tmp_path: Path) -> None:
    ledger, plan = dim.Ledger(tmp_path / "ledger.sqlite"), LINEAR.plan()
    ledger.create("b", BUDGET)
    first, optimizer = made(plan, spending=ledger.pay("b", plan))
    train(first, 5, optimizer)
    state = everything(first, optimizer)
    train(first, 10, optimizer)  # and then it crashed
    started = ledger.runs("b")[0].started
    second, optimizer = gone_on(plan, state, spending=ledger.pay("b", plan))
    assert second.step == started >= 10
    train(second, plan.steps, optimizer)
    second.spending.close()
    assert len(ledger.runs("b")) == 1
    assert ledger.status("b").spent <= 1


@pytest.mark.parametrize("place", ["missing/journal.json", "file/journal.json"])
def test_a_journal_without_a_folder_costs_nothing(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    private = PrivateGradients(LINEAR.model(), LINEAR.plan(), journal=tmp_path / place)
    with pytest.raises(InputError, match="a folder that is there"):
        next(private.batches(LINEAR.data()))
    assert private.spending.steps == 0


def test_a_journal_that_cannot_be_written_costs_the_step_and_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LINEAR.plan()
    private, optimizer = made(plan, journal=tmp_path / "journal.json", micro_batch=20)

    def full(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr("diminuendo._files.write_text", full)
        drawn = private.batches(LINEAR.data())
        x, y = next(drawn)
        with pytest.raises(OSError, match="full"):
            private.backward(LOSS(private.model(x), y))
    x, y = next(drawn)
    with pytest.raises(dim.UsageError, match="its step is over"):
        private.backward(LOSS(private.model(x), y))
    assert private.released == ()
    assert (private.charged, private.spending.steps) == (1, 1)
    train(private, plan.steps, optimizer)
    assert private.spending.granted == plan.events


@pytest.mark.parametrize("state", [{}, {"plan": "x"}, None, [1]])
def test_what_is_no_state_is_said_so(state: Any, tmp_path: Path) -> None:
    private, optimizer = made(LINEAR.plan(), journal=tmp_path / "journal.json")
    with pytest.raises(
        dim.InputError, match=r"what private\.state_dict\(\) gave.*without examples"
    ):
        private.load_state_dict(state)
    assert len(train(private, 2, optimizer)) == 2, "nothing has changed"


@pytest.mark.parametrize(
    "spoilt",
    [
        {"step": "two"},
        {"step": float("nan")},
        {"step": -1},
        {"lost": -1},
        {"lost": 5},
        {"spending": {}},
        {"spending": None},
        {"released": None},
    ],
)
def test_a_spoilt_state_is_said_so(spoilt: dict[str, Any], tmp_path: Path) -> None:
    plan = LINEAR.plan()
    first, optimizer = made(plan, journal=tmp_path / "journal.json")
    train(first, 2, optimizer)
    state = {**first.state_dict(), **spoilt}
    first.close()
    private, _ = made(plan, journal=tmp_path / "journal.json")
    with pytest.raises(dim.InputError, match="the state"):
        private.load_state_dict(state)


@pytest.mark.parametrize(
    ("rate", "sizes"), [(1.0, [1] * 20), (0.3, [4, 4, 4, 4, 4]), (0.1, [10, 10])]
)
def test_batches_come_epoch_by_epoch(rate: float, sizes: list[int]) -> None:
    plan = LINEAR.plan(sampling_rate=rate, gamma=0.95)
    private, optimizer = made(plan)
    seen = []
    while not private.finished:
        seen.append(0)
        for x, y in private.batches(LINEAR.data(), epochs=1):
            private.backward(LOSS(private.model(x), y))
            optimizer.step()
            seen[-1] += 1
    assert seen == sizes
    assert private.spending.granted == plan.events
    assert list(private.batches(LINEAR.data(), epochs=1)) == []
    with pytest.raises(dim.InputError, match="epochs"):
        next(private.batches(LINEAR.data(), epochs=0))


def test_epochs_of_a_seeded_run_are_the_run_itself() -> None:
    plan = LINEAR.plan(sampling_rate=0.3, gamma=0.95)
    straight, optimizer = made(plan, seed=3)
    train(straight, plan.steps, optimizer)
    parts, optimizer = made(plan, seed=3)
    while not parts.finished:
        for x, y in parts.batches(LINEAR.data(), epochs=1.5):
            parts.backward(LOSS(parts.model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(weights(parts.model), weights(straight.model))


def test_a_policy_s_epochs_end_with_its_budget() -> None:
    spending = AdaptiveSpending(GaussianFilter(BUDGET))
    private, optimizer = made(LINEAR.plan(), spending=spending, policy=lambda _: 10.0)
    epochs = 0
    while not private.finished:
        epochs += 1
        for x, y in private.batches(LINEAR.data(), epochs=1):
            private.backward(LOSS(private.model(x), y))
            optimizer.step()
    assert epochs == private.step == private.spending.steps > 20


def test_small_parts_before_a_pause_count_after_it(tmp_path: Path) -> None:
    """What rounding may add to δ grows with the number of parts, and earlier steps had more."""
    plan = LINEAR.plan()
    first, optimizer = made(plan, journal=tmp_path / "journal.json", micro_batch=7)
    train(first, 3, optimizer)
    state = everything(first, optimizer)
    first.close()
    second, _ = gone_on(plan, state, journal=tmp_path / "journal.json", micro_batch=30)
    assert second.delta_added == first.delta_added


def test_steps_on_a_gpu_count_after_the_run_has_left_it(tmp_path: Path) -> None:
    """What a GPU leaves open of the noise stays part of δ, wherever the run goes on."""
    plan = LINEAR.plan()
    first, optimizer = made(plan, journal=tmp_path / "journal.json")
    train(first, 3, optimizer)
    without = first.delta_added
    first.mechanism.leaves_open = True  # as after a step there
    state = everything(first, optimizer)
    first.close()
    second, _ = gone_on(plan, state, journal=tmp_path / "journal.json")
    size = sum(p.numel() for p in second.model.parameters())
    assert second.delta_added == first.delta_added == without + 2.0**-79 * size * plan.steps
    assert second.delta_missed > 0

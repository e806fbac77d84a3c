"""Keys are made once, used once, and stay where they were made."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable

import pytest
import torch
from small_runs import in_a_fork

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.mechanism.keys import Keys

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def test_fresh_keys_are_32_bytes_and_never_the_same() -> None:
    one, other = Keys.make(), Keys.make()
    drawn = [*one.noise(0), *one.noise(1), *other.noise(0), one.sampling(0), other.sampling(0)]
    drawn += [one.shared, other.shared, one.noise(0, rank=1)[0]]
    assert all(len(key) == 32 for key in drawn)
    assert len(set(drawn)) == len(drawn)
    assert one.private


def test_a_seed_gives_the_same_keys_and_no_privacy() -> None:
    assert Keys.make(3).noise(5) == Keys.make(3).noise(5) != Keys.make(4).noise(5)
    assert Keys.make(3).sampling(5) == Keys.make(3).sampling(5) != Keys.make(3).sampling(6)
    assert not Keys.make(3).private
    with pytest.raises(InputError):
        Keys.make(-1)


@pytest.mark.parametrize("again", [4, 3, 0])
def test_noise_of_a_step_is_refused_the_second_time(again: int) -> None:
    keys = Keys.make()
    keys.noise(4)
    with pytest.raises(DiminuendoError, match="drawn before"):
        keys.noise(again)
    keys.noise(5)
    keys.noise(4, rank=1)


def test_sampling_may_be_asked_for_again() -> None:
    """A loader that prefetches, or is begun anew, must draw the same."""
    keys = Keys.make()
    assert keys.sampling(2) == keys.sampling(2)


def test_ranks_share_the_sample_and_nothing_of_the_noise() -> None:
    first, second = Keys.make(), Keys.make()
    second.share(first.shared)
    assert first.sampling(7) == second.sampling(7)
    assert first.noise(7) != second.noise(7)


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("seed", [None, 1])
def test_keys_are_not_copied(act: Callable[[object], object], seed: int | None) -> None:
    with pytest.raises(DiminuendoError, match="neither copied nor written"):
        act(Keys.make(seed))


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps])
def test_keys_are_not_copied_inside_of_something(act: Callable[[object], object]) -> None:
    with pytest.raises(DiminuendoError, match="neither copied nor written"):
        act({"inside": [Keys.make()]})


def test_keys_do_not_reach_a_checkpoint_or_a_message() -> None:
    keys = Keys.make()
    with pytest.raises(DiminuendoError):
        torch.save({"keys": keys}, io.BytesIO())
    assert repr(keys) == "Keys()"
    assert keys.shared.hex()[:8] not in str(keys)


def test_a_forked_process_is_refused_everything() -> None:
    keys = Keys.make()
    for act in (lambda: keys.noise(0), lambda: keys.sampling(0), lambda: keys.shared):
        assert in_a_fork(act).startswith("refused: This process was forked")
    assert keys.noise(0)  # the parent goes on


def test_a_fork_of_a_fork_is_refused_even_with_the_number_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process numbers come round again; the count of forks does not."""
    keys = Keys.make()
    number = os.getpid()

    def act() -> object:
        monkeypatch.setattr(os, "getpid", lambda: number)
        return keys.noise(0)

    assert in_a_fork(act).startswith("refused")


def test_seeded_keys_go_through_a_fork() -> None:
    """They are no secret: processes that share work on an experiment may draw alike."""
    keys = Keys.make(1)
    assert in_a_fork(lambda: keys.noise(0)) == repr(Keys.make(1).noise(0))

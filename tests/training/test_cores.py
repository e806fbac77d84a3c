"""Pieces of work side by side: in order, on one core each, and nothing changes for anybody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from diminuendo.training.cores import side_by_side


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_threads_of_one_core() -> None:
    meet = threading.Barrier(2)

    def call(i: int) -> tuple[int, int, str]:
        if i < 2:
            meet.wait(300)  # both are under way at once
        return i, torch.get_num_threads(), threading.current_thread().name

    found = side_by_side(call, 7)
    assert [i for i, _, _ in found] == list(range(7))
    assert {cores for _, cores, _ in found} == {1}
    assert len({name for _, _, name in found}) == 2


def test_others_keep_their_threads() -> None:
    side_by_side(lambda i: i, 3)
    assert torch.get_num_threads() == 2
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [2]


def test_a_single_piece_stays_where_it_is_and_has_all_cores() -> None:
    assert side_by_side(lambda _: (torch.get_num_threads(), threading.current_thread()), 1) == [
        (2, threading.current_thread())
    ]


def test_an_error_reaches_the_caller() -> None:
    def call(i: int) -> int:
        if i == 3:
            raise ValueError("three")
        return i

    with pytest.raises(ValueError, match="three"):
        side_by_side(call, 5)
    assert side_by_side(lambda i: i * i, 3) == [0, 1, 4]

"""Several processes, one release: shares of one sample, one sum, one noise, one voice.

Every rank draws the same Poisson sample (they share the key for it) and takes every world-th
example of it. The first rank asks the spending and adds the noise; sums are reduced. A rank that
dies makes the collective operations of the others fail: they stop with an error rather than train
on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from diminuendo.budget import Budget
from diminuendo.errors import DiminuendoError
from diminuendo.events import GaussianStep
from diminuendo.spending import Spending
from diminuendo.training.mechanism.keys import Keys

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """This process's place among the ranks; alone, every operation is a no-op."""

    rank: int
    world: int

    @classmethod
    def current(cls) -> Group:
        """The group that torch.distributed was initialised with, or a world of one."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which asks, writes and shows for all."""
        return self.rank == 0

    def share(self, indices: Tensor) -> Tensor:
        """This rank's part of a sample."""
        return indices[self.rank :: self.world]

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor, everywhere; other ranks' is written on."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def any(self, here: bool) -> bool:
        """Whether it holds on some rank: the same answer everywhere."""
        if self.world == 1:
            return here
        flag = torch.tensor([int(here)], device=_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def same_sample(self, keys: Keys) -> None:
        """Have every rank draw the first one's sample."""
        if self.world > 1:
            keys.share(self._broadcast(keys.shared))

    def agree(self, ask: Callable[[], T]) -> T:
        """Ask on the first rank alone; every rank returns its answer, or raises its error.

        An error is of the same type on every rank, so that a ledger that cannot be reached is not
        taken for a budget that is spent.
        """
        if self.world == 1:
            return ask()
        answer: Any = None
        error: Exception | None = None
        if self.first:
            try:
                answer = ask()
            except Exception as raised:
                error = raised
        answer, copy = self._broadcast((answer, None if error is None else _sent(error)))
        if error is not None:
            raise error
        if copy is not None:
            raise _received(copy)
        return cast(T, answer)

    def _broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=_device())
        return box[0]


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


_Sent = tuple[bytes, str]
"""An error as its pickled type and attributes, and its message."""


def _sent(error: Exception) -> _Sent:
    try:
        return pickle.dumps((type(error), error.__dict__)), str(error)
    except Exception:  # a type or an attribute that only the first rank knows
        return pickle.dumps((DiminuendoError, {})), f"{type(error).__name__}: {error}"


def _received(sent: _Sent) -> Exception:
    """The first rank's error, made anew without its constructor, which may want other arguments."""
    try:
        kind, attributes = pickle.loads(sent[0])
        error: Exception = kind.__new__(kind)
    except Exception:  # a type that cannot be imported or made here
        return DiminuendoError(sent[1])
    error.args = (sent[1],)
    error.__dict__.update(attributes)
    return error


def for_all_ranks(group: Group, make: Callable[[], Spending]) -> Spending:
    """A spending that the first rank makes and asks for all; alone, simply that spending."""
    if group.world == 1:
        return make()
    made: list[Spending] = []

    def on_first() -> tuple[Budget, bool, bool, str]:
        made.append(make())
        return made[0].budget, made[0].adaptive, made[0].durable, made[0].unit

    budget, adaptive, durable, unit = group.agree(on_first)
    return RankSpending(group, made[0] if made else None, budget, adaptive, durable, unit)


class RankSpending(Spending):
    """Any spending, asked by the first of several ranks; all of them keep the same record.

    Every verb but `close` is a collective operation: all ranks call it, with the same event.
    """

    def __init__(
        self,
        group: Group,
        asked: Spending | None,
        budget: Budget,
        adaptive: bool,
        durable: bool,
        unit: str = "example",
    ) -> None:
        super().__init__(budget)
        self._group, self._asked = group, asked
        self.adaptive, self.durable, self.unit = adaptive, durable, unit

    @property
    def _first(self) -> Spending:
        assert self._asked is not None
        return self._asked

    def fits(self, event: GaussianStep) -> bool:
        """Whether the first rank's request would be granted now."""
        return self._group.agree(lambda: self._first.fits(event))

    def _charge(self, event: GaussianStep) -> None:
        self._group.agree(lambda: self._first.request(event))

    def resume(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        seen: int | None = None,
        receipt: Mapping[str, Any] | None = None,
        events: Iterable[GaussianStep] = (),
    ) -> int:
        """Begin or go on, on the first rank; returns how many steps are spent."""

        def on_first() -> tuple[GaussianStep, ...]:
            self._first.resume(state, seen=seen, receipt=receipt, events=events)
            return self._first.granted

        granted = self._group.agree(on_first)
        self._granted, self.steps = [], 0
        for event in granted:
            self._record(event)
        return self.steps

    def receipt(self, upto: int | None = None) -> dict[str, Any]:
        """The first rank's receipt, on all ranks."""
        return self._group.agree(lambda: self._first.receipt(upto))

    def close(self, reason: str = "done") -> None:
        """End the first rank's; not collective, so that one rank alone can end after an error."""
        if self._asked is not None:
            self._asked.close(reason)

    def state(self) -> dict[str, Any]:
        """The first rank's state; what was granted, on the others."""
        return super().state() if self._asked is None else self._asked.state()

    def cite(self) -> dict[str, Any]:
        """Where the first rank's spending is on record; empty on the others."""
        return super().cite() if self._asked is None else self._asked.cite()

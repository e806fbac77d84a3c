"""Several processes, one release: shares of one sample, one sum, one noise, one voice.

Every rank draws the same Poisson sample (the seeds are shared) and takes every world-th example of
it. The first rank talks to the spending and adds the noise; sums are reduced. A rank that dies
makes the collective operations of the others fail: they stop with an error rather than train on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from diminuendo.errors import BudgetRefused, DiminuendoError
from diminuendo.training.seeds import Seeds

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """This process's place among the ranks; alone, every operation is a no-op."""

    rank: int
    world: int

    @classmethod
    def current(cls) -> Group:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, indices: Tensor) -> Tensor:
        return indices[self.rank :: self.world]

    def sum(self, tensor: Tensor) -> None:
        if self.world > 1:
            dist.all_reduce(tensor)

    def any(self, here: bool) -> bool:
        """Whether it holds on some rank: the same answer everywhere."""
        if self.world == 1:
            return here
        flag = torch.tensor([int(here)], device=_device())
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def same_seeds(self, seeds: Seeds) -> Seeds:
        """The first rank's seeds, everywhere."""
        return seeds.shared(self._from_first(seeds.root)) if self.world > 1 else seeds

    def agree(self, ask: Callable[[], T]) -> T:
        """Ask on the first rank alone; every rank returns its answer or raises its refusal."""
        if self.world == 1:
            return ask()
        answer: tuple[bool, Any] = (False, "")
        if self.first:
            try:
                answer = (True, ask())
            except DiminuendoError as error:
                answer = (False, str(error))
        granted, value = self._from_first(answer)
        if not granted:
            raise BudgetRefused(value)
        return cast(T, value)

    def _from_first(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=_device())
        return box[0]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

"""What the pieces of one backward pass report: norms, or gradients of examples to be joined."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.contract import shared_size, upcast
from diminuendo.training.clipping.lanes import Lanes
from diminuendo.training.clipping.lift import MetPiece, returned
from diminuendo.training.clipping.rounding import (
    DOUBLE,
    TF32,
    cancelled,
    coarse,
    joint_norm,
    row_norm,
)
from diminuendo.training.clipping.sums import Rows, Term
from diminuendo.training.clipping.tape import Kind, Piece, Report, kept_rows
from diminuendo.training.clipping.watch import Root

# Per-example gradients with at most this many entries are joined with those of other parameters,
# so that one kernel measures them all and one sums them: on a GPU kernels cost more than copies.
_JOINED = 1 << 20
_JOINED_CPU = 1 << 15


class Group:
    """What is known of the gradients of parameters that are clipped together."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []
        self._rows: list[tuple[int, Tensor]] = []
        self._joined: Tensor | None = None

    def add(self, slot: int, report: Report) -> None:
        """Take one report."""
        value = report.value
        if report.kind is Kind.NORM:
            self._norms.append(value)
        else:
            self._rows.append((slot, value if value.dim() == 2 else value.flatten(1)))

    def parts(self) -> list[Tensor]:
        """Norms whose squares add up to that of all together; none if there is nothing."""
        if self._rows and self._joined is None:
            rows = [value for _, value in self._rows]
            self._joined = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            self._norms.append(row_norm(self._joined))
        return self._norms

    def norms(self) -> Tensor | None:
        """The norms of all together, or None if there is nothing."""
        parts = self.parts()
        return joint_norm(parts) if parts else None

    def purge(self, keep: Tensor) -> None:
        """Set the rows of the examples that are not kept to zero."""
        if self._joined is not None:
            self._joined = kept_rows(self._joined, keep)

    def terms(self, factors: Tensor) -> list[tuple[int, Term]]:
        """What the weighted sums of the parameters whose rows were joined consist of, by slot."""
        if self._joined is None:
            return []
        sizes = [value.shape[1] for _, value in self._rows]
        parts = torch.split(self._joined, sizes, 1)
        return [
            (slot, Rows(part, factors)) for (slot, _), part in zip(self._rows, parts, strict=True)
        ]

    def sums(self, factors: Tensor) -> list[tuple[int, Tensor]]:
        """The weighted sums of the parameters whose rows were joined, by slot, flat."""
        if self._joined is None:
            return []
        total = torch.mv(self._joined.t(), factors)
        slots = [slot for slot, _ in self._rows]
        if len(slots) == 1:
            return [(slots[0], total)]
        sizes = [value.shape[1] for _, value in self._rows]
        return list(zip(slots, torch.split(total, sizes), strict=True))


class Norms:
    """Collects the pieces of one backward pass and what they report.

    A piece is processed as soon as its gradient arrives, except for parameters that other
    pieces use too: those need the cross terms and wait for the end.
    """

    def __init__(self, slot: dict[int, int], examples: int, root: Root) -> None:
        self.slot, self.examples, self.root = slot, examples, root
        self.live: list[Piece] = []
        self._reports: list[tuple[int, Report]] = []
        self._lanes: Lanes | None = None
        self._seen: set[int] = set()

    def arrive(self, piece: Piece) -> None:
        """Take a piece one of whose output gradients has just arrived."""
        if piece.engaged:
            return
        piece.engaged = True
        pending = piece.retire()
        self.live.append(piece)
        seen, alone = self._seen, set()
        for param in piece.params:
            key = id(param)
            if key not in seen:
                seen.add(key)
                if pending is None or not pending[key]:
                    alone.add(key)
        if piece.eager:
            self._process(piece)
            self._measure(piece, alone)

    def finish(self, params: list[nn.Parameter]) -> list[tuple[int, Report]]:
        """All reports, each with the slot of its parameter."""
        users: list[list[Piece]] = [[] for _ in params]
        for piece in self.live:
            if not piece.processed:
                self._process(piece)
        if self._lanes is not None:
            self._lanes.join()
        with self.root.again(self.examples):  # checkpoints run forward again
            back = returned([p for p in self.live if isinstance(p, MetPiece)], self.examples)
        if back is not None:
            self.live.append(back)
        for piece in self.live:
            for param in piece.params:
                users[self.slot[id(param)]].append(piece)
        for piece in self.live:
            if len(piece.measured) < len(piece.params):
                ready = {
                    id(param) for param in piece.params if len(users[self.slot[id(param)]]) == 1
                }
                self._measure(piece, ready - piece.measured)
        if self._lanes is not None:
            self._lanes.join()  # of what was measured since
        reports = [report for report in self._reports if len(users[report[0]]) == 1]
        for slot, pieces in enumerate(users):
            if len(pieces) > 1:
                param = params[slot]
                reports.append((slot, Report(id(param), Kind.NORM, _shared(param, pieces))))
        return reports

    def _process(self, piece: Piece) -> None:
        piece.check_examples(self.examples)
        piece.check()
        piece.receive(piece.arrived)
        piece.arrived, piece.processed = [], True

    def _measure(self, piece: Piece, todo: set[int]) -> None:
        if not todo:
            return
        piece.measured |= todo
        if piece.briefly and todo:
            if self._lanes is None:
                self._lanes = Lanes(piece.params[0].device)
            self._lanes.do(lambda: self._report(piece, todo))
        else:
            self._report(piece, todo)

    def _report(self, piece: Piece, todo: set[int]) -> None:
        for report in piece.measure(todo):
            key, kind, value = report
            if kind is Kind.ROWS:
                limit = _JOINED_CPU if value.device.type == "cpu" else _JOINED
                if value.numel() > limit:
                    report = Report(key, Kind.NORM, row_norm(value))
            self._reports.append((self.slot[key], report))


def _shared(param: nn.Parameter, pieces: list[Piece]) -> Tensor:
    """Norms of the summed gradients of a parameter used several times."""
    factors = [piece.factor(param) for piece in pieces]
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(factors):
        size = shared_size(known)
        rounded = any(coarse(factor.cols, convolved=True) for factor in known)
        return size.rounded().norm if rounded else size.norm
    total, bulk = pieces[0].instantiate(param), pieces[0].bulk(param)
    for piece in pieces[1:]:
        total, bulk = total + piece.instantiate(param), bulk + piece.bulk(param)
    rough = DOUBLE * (max(piece.tokens for piece in pieces) + len(pieces) + 8)
    like = upcast(param.detach())
    if coarse(like, convolved=True):
        rough += 1.01 * TF32
    return row_norm(total).add_(bulk, alpha=rough).maximum(bulk / cancelled(like))

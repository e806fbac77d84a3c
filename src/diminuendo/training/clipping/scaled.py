"""Sums of the examples' gradients, each times its factor, over what one backward pass left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.certified import Buffers, Located, Summation
from diminuendo.training.clipping.contract import upcast
from diminuendo.training.clipping.reports import Group
from diminuendo.training.clipping.tape import WHOLE, Piece
from diminuendo.training.cores import FEW, Beside, few


class Scaled:
    """The pieces of one backward pass, with the factors of their examples.

    ``groups`` are the parameters that are clipped together, each with its row of ``factors``;
    ``slot`` says where a parameter stands among ``parameters``, ``layer_of`` to which layer it
    belongs.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        slot: dict[int, int],
        layer_of: Sequence[int],
        live: list[Piece],
        groups: list[Group],
        factors: Sequence[Tensor],
    ) -> None:
        self._parameters, self._slot, self._layer_of = parameters, slot, layer_of
        self._live, self._groups, self._factors = live, groups, factors

    def purge(self, finite: Tensor) -> None:
        """Let the examples whose norms are not finite contribute nothing."""
        self._factors = [torch.where(finite, row, 0.0) for row in self._factors]
        for piece in self._live:
            piece.purge(finite)
        for group in self._groups:
            group.purge(finite)

    def sums(self, accumulate: Buffers | None, scale: float, keep: bool = False) -> list[Tensor]:
        """``sum_i c_i g_i`` for every parameter, in the type of the gradients; the pieces let go of
        their data unless told to ``keep`` it."""
        params = self._parameters
        sums: list[Tensor | None] = [None] * len(params)
        if accumulate is not None:
            sums = list(made(accumulate))
        done: set[int] = set()
        for group, row in zip(self._groups, self._factors, strict=True):
            parts = {slot: part.view(params[slot].shape) for slot, part in group.sums(row)}
            done.update(parts)
            if parts and accumulate is not None:
                totals = [total for slot in parts if (total := sums[slot]) is not None]
                torch._foreach_add_(totals, list(parts.values()), alpha=scale)
            else:
                for slot, part in parts.items():
                    sums[slot] = part
        for piece in self._live:
            for param in piece.params:
                slot = self._slot[id(param)]
                if slot not in done:
                    total = sums[slot]
                    if total is None:
                        sums[slot] = piece.weighted_sum(param, self._row(slot))
                    else:
                        piece.add_weighted(total, param, self._row(slot), scale)
            if not keep:
                piece.release()
        return [
            torch.zeros_like(upcast(param.detach())) if total is None else total
            for param, total in zip(params, sums, strict=True)
        ]

    def add_certified(
        self,
        sums: list[Tensor],
        summation: Summation,
        sensitivity: float,
        allowance: float,
        beside: Beside | None = None,
    ) -> None:
        """Add ``sum_i c_i g_i`` to ``sums`` in float64, with an error of at most ``allowance *
        sensitivity`` over all parameters. ``beside`` may be done meanwhile."""
        terms = self._terms()
        parts = summation.parts(terms, len(self._factors[0]), sensitivity, allowance, beside)
        for (slot, rows, _, _), part in zip(terms, parts, strict=True):
            total = sums[slot] if rows is WHOLE else sums[slot][rows]
            with few(part.numel()):
                # Of two cores, adding a transposed matrix takes longer than transposing it first.
                part = part if part.numel() <= FEW else part.contiguous()
                total.add_(part.reshape(total.shape))

    def certified(
        self,
        places: Sequence[Tensor],
        summation: Summation,
        sensitivity: float,
        allowance: float,
    ) -> list[Tensor]:
        """The same sums on their own, float32 or float64, each contiguous and in the shape of its
        parameter; those that are float32 lie in ``places``."""
        terms = self._terms()
        users = Counter(term.slot for term in terms if term.rows is WHOLE)
        users.update({term.slot for term in terms if term.rows is not WHOLE})
        summation.places = {slot: places[slot] for slot, count in users.items() if count == 1}
        try:
            parts = summation.parts(terms, len(self._factors[0]), sensitivity, allowance)
        finally:
            summation.places = {}
        # A parameter whose rows come from several terms lies in its place if all of them do.
        there = {slot for slot, count in users.items() if count == 1}
        there -= {
            term.slot
            for term, part in zip(terms, parts, strict=True)
            if part.dtype is not torch.float32
        }
        found: list[Tensor | None] = [None] * len(places)
        for (slot, rows, _, _), part in zip(terms, parts, strict=True):
            shape, total = places[slot].shape, found[slot]
            if rows is WHOLE and total is None:
                found[slot] = part.contiguous().view(shape)
            elif slot in there:
                found[slot] = places[slot]
            else:
                if total is None:
                    total = places[slot].new_zeros(shape, dtype=torch.float64)
                elif total.dtype is torch.float32:
                    total = total.double()
                target = total if rows is WHOLE else total[rows]
                target.add_(part.view(target.shape))
                found[slot] = total
        return [
            place.zero_() if total is None else total
            for place, total in zip(places, found, strict=True)
        ]

    def _terms(self) -> list[Located]:
        """Everything that the sums consist of."""
        terms: list[Located] = []
        users = Counter(self._slot[id(param)] for piece in self._live for param in piece.params)
        for group, row in zip(self._groups, self._factors, strict=True):
            terms += [Located(slot, WHOLE, part, row) for slot, part in group.terms(row)]
        done = {term.slot for term in terms}
        for piece in self._live:
            for param in piece.params:
                slot = self._slot[id(param)]
                if slot not in done:
                    row = self._row(slot)
                    for rows, term in piece.terms(param, row):
                        part = term.of_shared(upcast(param.detach())) if users[slot] > 1 else term
                        terms.append(Located(slot, rows, part, row))
        return terms

    def _row(self, slot: int) -> Tensor:
        """The factors of a parameter's examples."""
        return self._factors[self._layer_of[slot] if len(self._factors) > 1 else 0]


def made(buffers: Buffers) -> list[Tensor]:
    """The buffers themselves, where a function makes them."""
    return list(buffers() if callable(buffers) else buffers)

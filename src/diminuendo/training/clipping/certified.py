"""Clipped sums with a bounded error: quick ones where a certificate allows, else precise ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from diminuendo.training.clipping.certificate import Certificate, normal, on_device
from diminuendo.training.clipping.device import DeviceTerm
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.lanes import Lanes
from diminuendo.training.clipping.sums import Job, Product, Term, multiply
from diminuendo.training.clipping.tape import WHOLE
from diminuendo.training.cores import Beside
from diminuendo.training.mechanism.kernels import sent

# Calls for which a sum stays precise after its quick sum was too coarse.
_CAUTION = 64
# What sums in float32 with an error that is known beforehand may take of the allowance, together.
_KNOWN = 0.48
TAME = 2.0**-60, 2.0**60
"""Clip bounds, and factors that are not zero, for which float32 neither over- nor underflows."""

Buffers = Sequence[Tensor] | Callable[[], Sequence[Tensor]]
"""Where sums go; a function is called once the backward pass has let go of its memory."""


class Located(NamedTuple):
    """A term of the sum of the parameter at ``slot``: some of its rows, with the factors."""

    slot: int
    rows: slice
    term: Term
    factors: Tensor


class Summation:
    """Takes certified sums, and remembers whose quick sums were too coarse (``precise``: for how
    many calls each slot is summed precisely)."""

    def __init__(self) -> None:
        self.precise: dict[int, int] = {}
        self.checks = False
        """Whether some call had a sum of a shape that is checked, rather than known beforehand."""
        self.static = False
        """Whether nothing is decided by looking at data: what a GPU does not check is float64."""
        self.key: Tensor | None = None
        """The key of the random vectors, in a GPU's memory; None for a fresh one for each call."""
        self.places: dict[int, Tensor] = {}
        """Where the quick sums of some parameters may go, float32, on a GPU; by slot."""

    def parts(
        self,
        terms: list[Located],
        examples: int,
        sensitivity: float,
        allowance: float,
        beside: Beside | None = None,
    ) -> list[Tensor]:
        """The sums of the terms. Together they are off by at most ``allowance * sensitivity``,
        but for the probability ``certificate.FAILURE``. ``beside`` may be done meanwhile."""
        _check_reach(terms, examples, allowance)
        if not self.static and _tame(terms, sensitivity):
            for part in terms:
                part.term.relax(_KNOWN * allowance / examples)
        may_check = [self._may_check(part) for part in terms]
        self.checks = self.checks or any(may_check)
        quick = [
            may and part.slot not in self.precise
            for may, part in zip(may_check, terms, strict=True)
        ]
        self.precise = {slot: left - 1 for slot, left in self.precise.items() if left > 1}
        checked = [position for position, fast in enumerate(quick) if fast]
        longest = max([terms[position].term.probes() for position in checked], default=0)
        certificate = Certificate(sensitivity, allowance, self._vectors(terms, longest))
        multiply(
            [
                Job(part.term, certificate.vectors(part.term), quick=True)
                if fast
                else Job(part.term, None)
                for part, fast in zip(terms, quick, strict=True)
                if isinstance(part.term, Product) and len(part.term.pieces) > 1
            ],
            beside,
        )
        sums: list[Tensor] = []
        lanes = Lanes(terms[0].factors.device) if terms else None
        for part, fast in zip(terms, quick, strict=True):
            sums.append(self._quick(part, certificate) if fast else part.term.precise())
            if not fast:
                certificate.count(part.term, part.factors)
            elif lanes is not None:
                certificate.measure(part.term, sums[-1], part.factors, lanes)
        if not checked or lanes is None:
            return sums
        lanes.join()
        on_device = [place for place in checked if isinstance(terms[place].term, DeviceTerm)]
        if on_device:
            holds = certificate.flag()
            # too many, too small or too large for a float32 sum that is taken again
            wide = examples * 2.0**-24 > allowance / 4 or not TAME[0] <= sensitivity <= TAME[1]
            for place in on_device:
                if wide:
                    sums[place] = sums[place].double()
                cast(DeviceTerm, terms[place].term).repair(sums[place], holds)
        elif not certificate.holds():
            for position, excessive in zip(checked, certificate.excessive(), strict=True):
                sums[position] = terms[position].term.precise()
                if excessive:
                    self.precise[terms[position].slot] = _CAUTION
        return sums

    def _may_check(self, part: Located) -> bool:
        """Whether a sum may be quick: one on a GPU is decided about there, whatever the data."""
        if isinstance(part.term, DeviceTerm):
            return True
        return part.term.checked and not self.static and not part.factors.is_cuda

    def _vectors(self, terms: list[Located], longest: int) -> Tensor:
        device = terms[0].factors.device if terms else torch.device("cpu")
        if not longest or device.type == "cpu":
            return normal(longest)
        key = sent(os.urandom(32), device) if self.key is None else self.key
        return on_device(longest, key)

    def _quick(self, part: Located, certificate: Certificate) -> Tensor:
        term, place = part.term, self.places.get(part.slot)
        if not isinstance(term, DeviceTerm):
            return term.quick()
        if place is not None and part.rows is not WHOLE:
            place = place[part.rows]
        if place is not None:
            place = place.view(term.probes(), -1)
        return term.quick_into(place, certificate.vectors(term))


def _tame(terms: list[Located], sensitivity: float) -> bool:
    """Whether float32 has the range for products of factors and gradients."""
    if not TAME[0] <= sensitivity <= TAME[1]:
        return False
    rows = {id(part.factors): part.factors for part in terms if not part.factors.is_cuda}
    return all(
        factors.min().item() >= TAME[0] or bool(((factors == 0) | (factors >= TAME[0])).all())
        for factors in rows.values()
    )


def _check_reach(terms: list[Located], examples: int, allowance: float) -> None:
    """Raise where not even float64 is known to be close enough; looks at shapes alone."""
    worst = max([part.term.error * part.term.cancelled for part in terms], default=0.0)
    if worst * examples > allowance / 2:
        raise EngineError(
            "the rounding error of a sum over so many examples cannot be bounded by "
            f"{allowance:.1e} of the sensitivity; use smaller micro-batches"
        )


def check_request(accumulate: Buffers | None, scale: float = 1.0, share: float = 1.0) -> None:
    """Raise unless a certified sum can be added to these buffers; changes nothing."""
    if scale != 1.0 or not 0.0 < share <= 1.0:
        raise EngineError(
            f"a certified sum needs scale 1 and a share in (0, 1], got {scale} and {share}"
        )
    if accumulate is not None and not callable(accumulate):
        narrow = next((total.dtype for total in accumulate if total.dtype != torch.float64), None)
        if narrow is not None:
            raise EngineError(
                f"a certified sum needs buffers of float64, got {narrow}; use "
                "engine.zeros(torch.float64)"
            )

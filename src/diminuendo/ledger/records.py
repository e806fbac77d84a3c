"""Append-only records: each carries the digest of the one before it.

digest_n = SHA-256(canonical JSON of (seq, at, kind, budget, run, token, body, digest_{n−1})). A
change, a deletion in the middle or another order breaks the chain where it happened. That the
*end* was cut off shows only against a head that was kept elsewhere: every report cites one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger.mechanisms import Mechanism, from_json, to_json

Event = GaussianStep | Mechanism
"""What a budget can be charged for."""

START = "sha256:" + "0" * 64
"""The digest that the first record of a version 1 ledger follows; see `start_of`."""


@dataclass(frozen=True)
class Head:
    """The last record of the chain. Cite it, and `verify` can check later that it was there."""

    ledger: str
    seq: int
    digest: str


def start_of(ledger: str) -> str:
    """The digest that the first record of a ledger follows: the ledger's id is in the chain."""
    return "sha256:" + hashlib.sha256(f"diminuendo ledger {ledger}".encode()).hexdigest()


KINDS = (
    "create",
    "open",
    "resume",
    "grant",
    "start",
    "close",
    "reclaim",
    "import",
    "upgrade",
    "anchor",
    "share",
    "propose",
)
"""What a record can be. Ledgers of the version before have "release" for "reclaim"."""


def canonical(value: Any) -> str:
    """The one JSON text of a value that is hashed and stored."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record. `token` is the client's: a request that is repeated with it is done once."""

    seq: int
    at: str
    kind: str
    budget: str
    run: str
    token: str
    body: Mapping[str, Any]
    previous: str
    digest: str
    signature: str = ""

    @classmethod
    def link(
        cls,
        *,
        seq: int,
        at: str,
        kind: str,
        budget: str,
        run: str,
        token: str,
        body: Mapping[str, Any],
        previous: str,
    ) -> Record:
        """The record that follows the one whose digest is `previous`."""
        digest = digest_of(seq, at, kind, budget, run, token, canonical(body), previous)
        return cls(
            seq=seq,
            at=at,
            kind=kind,
            budget=budget,
            run=run,
            token=token,
            body=body,
            previous=previous,
            digest=digest,
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values; the signature only if there is one."""
        signature = {"signature": self.signature} if self.signature else {}
        return {
            "seq": self.seq,
            "at": self.at,
            "kind": self.kind,
            "budget": self.budget,
            "run": self.run,
            "token": self.token,
            "body": self.body,
            "previous": self.previous,
            "digest": self.digest,
            **signature,
        }


def digest_of(
    seq: int, at: str, kind: str, budget: str, run: str, token: str, body: str, previous: str
) -> str:
    """The record's digest; `body` is text already, as it is stored."""
    text = canonical([seq, at, kind, budget, run, token, body, previous])
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def pack(events: Sequence[Event]) -> list[list[Any]]:
    """Events in a record: [noise multiplier, sampling rate, count] or [kind, parameters, count]."""
    return [
        [e.noise_multiplier, e.sampling_rate, e.count]
        if isinstance(e, GaussianStep)
        else to_json(e)
        for e in events
    ]


def unpack(rows: Any) -> list[Event]:
    """The events that `pack` wrote, checked."""
    try:
        return [
            from_json(first, second, count)
            if isinstance(first, str)
            else GaussianStep(noise_multiplier=first, sampling_rate=second, count=count)
            for first, second, count in rows
        ]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            "[noise multiplier, sampling rate, count] each", name="events", value=rows
        ) from None

"""Anchors: heads of the chain that are published to a second place as they move.

Whoever can change the ledger's database can cut off its end or rewrite all of it, consistently. A
head that is kept elsewhere shows it: `verify(anchors=…)` wants every published head in the chain.

    file:/mnt/other/heads.jsonl    lines appended to a file, on disk at once
    git:/path/to/repository        the same in heads.jsonl, one commit each
    ledger:postgresql://…          records of a second ledger
    https://host/path              POST with $DIMINUENDO_ANCHOR_TOKEN; GET returns the lines
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from diminuendo.errors import InputError, LedgerError
from diminuendo.ledger.records import Head, canonical
from diminuendo.ledger.store import Change

VARIABLE = "DIMINUENDO_LEDGER_ANCHORS"
TOKEN = "DIMINUENDO_ANCHOR_TOKEN"
_SECONDS = 10.0
"""Least time between two heads that are published to a place where that takes long."""
_PATIENCE = 10.0


class LedgerWarning(UserWarning):
    """A ledger works, but something about it is weaker than it should be."""


class Anchor(ABC):
    """A place for heads. `seconds` is the least time between two of them."""

    seconds = 0.0

    def __init__(self, place: str) -> None:
        self.place = place
        self._last = -float("inf")

    def due(self) -> bool:
        """Whether the place wants another head by now."""
        return time.monotonic() - self._last >= self.seconds

    def publish(self, head: Head) -> None:
        """Keep a head there."""
        self._last = time.monotonic()
        self._keep(head)

    @abstractmethod
    def _keep(self, head: Head) -> None: ...

    @abstractmethod
    def heads(self, ledger: str) -> list[Head]:
        """Every head of a ledger that is kept there."""


class FileAnchor(Anchor):
    """A file to which a line is appended for each head."""

    def __init__(self, place: str, path: Path) -> None:
        super().__init__(place)
        self.path = path

    def _keep(self, head: Head) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            os.write(handle, _line(head).encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def heads(self, ledger: str) -> list[Head]:
        """Every head of a ledger in the file."""
        return _heads(self.path.read_text(encoding="utf-8"), ledger)


class GitAnchor(FileAnchor):
    """The file heads.jsonl of a git repository, with a commit for each head."""

    seconds = _SECONDS

    def __init__(self, place: str, repository: Path) -> None:
        super().__init__(place, repository / "heads.jsonl")

    def _keep(self, head: Head) -> None:
        super()._keep(head)
        git = ["git", "-C", str(self.path.parent), "-c", "user.name=diminuendo",
               "-c", "user.email=ledger@localhost"]  # fmt: skip
        message = f"Record {head.seq} of ledger {head.ledger}"
        for words in (["add", self.path.name], ["commit", "--quiet", "-m", message]):
            subprocess.run([*git, *words], check=True, capture_output=True, timeout=_PATIENCE)


class LedgerAnchor(Anchor):
    """Records of a second ledger."""

    seconds = _SECONDS

    def __init__(self, place: str, open_ledger: Callable[[str], Any], url: str) -> None:
        super().__init__(place)
        self._open, self._url = open_ledger, url

    def _keep(self, head: Head) -> None:
        def work(change: Change) -> Any:
            body = {"seq": head.seq, "digest": head.digest}
            return change.append("anchor", budget="", run=head.ledger, body=body)

        with self._open(self._url) as ledger:
            ledger.write_transaction(work)

    def heads(self, ledger: str) -> list[Head]:
        """Every head of a ledger on record there."""
        with self._open(self._url) as second:
            records = [record for record in second.records(run=ledger) if record.kind == "anchor"]
        return [Head(ledger, record.body["seq"], record.body["digest"]) for record in records]


class HttpAnchor(Anchor):
    """A web address that keeps what is sent to it and returns the lines."""

    seconds = _SECONDS

    def _keep(self, head: Head) -> None:
        self._ask(_line(head).encode())

    def heads(self, ledger: str) -> list[Head]:
        """Every head of a ledger that the address returns."""
        return _heads(self._ask(None), ledger)

    def _ask(self, body: bytes | None) -> str:
        request = urllib.request.Request(self.place, data=body)
        request.add_header("Content-Type", "application/json")
        if token := os.environ.get(TOKEN):
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
            return str(answer.read().decode())


def parse(place: str | Anchor, open_ledger: Callable[[str], Any]) -> Anchor:
    """The anchor that a text names.

    open_ledger  opens a second ledger by its URL
    """
    if isinstance(place, Anchor):
        return place
    kind, _, where = place.partition(":")
    if kind == "file" and where:
        return FileAnchor(place, Path(where).expanduser())
    if kind == "git" and where:
        return GitAnchor(place, Path(where).expanduser())
    if kind == "ledger" and where:
        return LedgerAnchor("ledger", open_ledger, where)
    if kind in ("http", "https"):
        return HttpAnchor(place)
    raise InputError(
        "file:/path, git:/repository, ledger:URL or https://…", name="the anchor", value=kind
    )


def configured() -> list[str]:
    """The places in $DIMINUENDO_LEDGER_ANCHORS, separated by spaces."""
    return os.environ.get(VARIABLE, "").split()


def publish(anchors: Iterable[Anchor], head: Head | None, *, all_of_them: bool = False) -> None:
    """Send a head to the anchors that want one; a failure is a warning, since it is charged."""
    for anchor in anchors:
        if head is None or not (all_of_them or anchor.due()):
            continue
        try:
            anchor.publish(head)
        except (OSError, LedgerError, subprocess.SubprocessError) as error:
            warnings.warn(
                f"The head of the ledger could not be published to {anchor.place} "
                f"({type(error).__name__}). What was charged is charged.",
                LedgerWarning,
                stacklevel=3,
            )


def published(anchor: Anchor, ledger: str) -> list[Head]:
    """What an anchor has of a ledger; raises LedgerError if that is nothing or out of reach."""
    try:
        heads = anchor.heads(ledger)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"The anchor {anchor.place} could not be read ({type(error).__name__})."
        ) from None
    if not heads:
        raise LedgerError(
            f"The anchor {anchor.place} has no head of the ledger {ledger}: it belongs to another "
            "ledger, or the ledger's id was changed."
        )
    return heads


def _line(head: Head) -> str:
    return canonical({"ledger": head.ledger, "seq": head.seq, "digest": head.digest}) + "\n"


def _heads(lines: str, ledger: str) -> list[Head]:
    entries = [json.loads(line) for line in lines.splitlines() if line.strip()]
    return [
        Head(entry["ledger"], int(entry["seq"]), str(entry["digest"]))
        for entry in entries
        if entry["ledger"] == ledger
    ]

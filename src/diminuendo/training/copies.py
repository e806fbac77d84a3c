"""A copied journal is not a second budget: the newest word of a run, outside of its folder.

Whoever copies the folder of a run and goes on in both copies would release the same steps twice for
the price of one. So each journal has a random name for its run, and what it says last is also kept
once for each user of a machine, under that name, in

    $XDG_STATE_HOME/diminuendo/runs        (~/.local/state unless set)

A run that is taken up again takes its turn there. From then on nobody who was there before may
reserve another step, and whoever comes later goes on after the steps of all.

Elsewhere, where nothing is known of the run, a folder is taken for the one in which the journal was
written if it has the same inode number; any other may be a copy, and has to be stated not to be.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from diminuendo.errors import InputError


def folder() -> Path:
    """Where the newest words of runs are kept for this user on this machine."""
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "diminuendo" / "runs"


def place_of(journal: Path) -> dict[str, Any]:
    """Where a journal is: the inode number of its folder tells a folder from its copies."""
    parent = Path(os.path.realpath(journal)).parent
    return {
        "host": platform.node(),
        "folder": str(parent),
        "inode": parent.stat().st_ino,
        "file": journal.name,
    }


def refuse_copy(journal: Path, written: Mapping[str, Any] | None) -> None:
    """Raise where the journal is not in the place in which it was written, by its own word."""
    here = place_of(journal)
    if written is None or all(here[key] == written[key] for key in ("inode", "file")):
        return
    raise InputError(
        f"in the folder in which it was written ({written['folder']} on {written['host']})",
        name=f"the journal {journal}",
        value="a copy",
        remedy="If both go on, steps are released twice for the price of one. If this folder was "
        "moved here or restored, and no other copy of it has gone on or will, say so: "
        "Checkpoints(folder, moved=True), Journal(path, plan, moved=True), or diminuendo train "
        "--moved. A ledger keeps count without this.",
    )


@contextmanager
def newest(run: str) -> Iterator[NewestWord]:
    """What is known of a run here, while no other process can change it."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle = os.open(folder() / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        yield NewestWord(None)
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield NewestWord(folder() / f"{run}.json")
    finally:
        os.close(handle)


class NewestWord:
    """The last content of a run's journal, of whichever copy; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] | None = None
        if path is not None:
            with suppress(OSError, ValueError):
                self.content = json.loads(path.read_text(encoding="utf-8"))

    def replace(self, content: Mapping[str, Any]) -> None:
        """Keep this as the last word. Not on disk at once: the journal itself is."""
        if self._path is None:
            return
        with (
            suppress(OSError),
            tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as temporary,
        ):
            json.dump(content, temporary)
            temporary.close()
            os.replace(temporary.name, self._path)

"""A table in a folder: every cell is a file of its own.

A folder can be extended by methods, data sets, sizes and budgets; what is there is not run again,
and what an interruption left out is run next time. Several machines can work in one folder: a cell
that one has begun is left to it, as long as its claim is renewed every minute.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from diminuendo import _files
from diminuendo.compare.methods import METHODS
from diminuendo.compare.table import Bench, Cell, Effort, Entry
from diminuendo.errors import InputError
from diminuendo.paper.setting import ResultsFolder

ABANDONED, RENEWED = 1800.0, 60.0
"""Seconds after which a claim that nobody renewed is taken for abandoned, and how often whoever is
at work renews it."""


class TableFolder:
    """The cells that are done, in a folder, and the claims of those under way."""

    def __init__(self, path: str | Path, effort: Effort) -> None:
        setting = asdict(effort)
        if not effort.given:
            del setting["given"]  # tables that were begun before settings could be given
        self.folder = ResultsFolder(path, setting)
        self.path = Path(path)
        _files.make_folder(self.path / "claims")

    def entries(self) -> list[Entry]:
        """All cells that are done, by whoever."""
        found = []
        for path in sorted((self.path / "runs").glob("*.json")):
            text = _files.read_text(path, name="a cell")
            data = _files.parse_json(text, name="a cell", source=str(path))
            found.append(self._checked(Entry.from_dict(data), path))
        return sorted(found, key=lambda entry: entry.cell)

    def _check_sources(self, wanted: Sequence[Cell], bench: Bench) -> None:
        tasks = {cell.task for cell in wanted}
        for entry in self.entries():
            if entry.cell.task in tasks:
                source = bench.pool(entry.cell.task).source
                if source != entry.source:
                    raise InputError(
                        f"that of the cells in {self.path} ({entry.source})",
                        name="the data",
                        value=source,
                        remedy="Give the same --data-dir, or another folder for the results.",
                    )

    @staticmethod
    def _checked(entry: Entry, path: Path) -> Entry:
        """Refuse a cell under another name, or of a method that has other tuned numbers, or is not
        known, by now."""
        if entry.cell.name != path.stem:
            raise InputError(
                f"{entry.cell.name}.json, by what is in it",
                name="the cell's file",
                value=str(path),
                remedy="Give it this name, or remove it.",
            )
        known = METHODS.get(entry.cell.method)
        if known is None or known.digest != entry.definition:
            raise InputError(
                "of a method as it is now",
                name="the cell",
                value=entry.cell.name,
                remedy=f"The method was tuned otherwise then. Remove {path}, or use another "
                "folder.",
            )
        return entry

    def has(self, cell: Cell) -> bool:
        """Whether the cell is done."""
        return (self.path / "runs" / f"{cell.name}.json").exists()

    def run(
        self, wanted: Sequence[Cell], bench: Bench, done: Callable[[Cell], None] = lambda _: None
    ) -> list[Cell]:
        """Run what is missing; returns the cells that others have under way.

        Refused, before anything is run, where cells of a task were drawn from other data.
        """
        self._check_sources(wanted, bench)
        others = []
        for cell in wanted:
            if self.has(cell):
                done(cell)
                continue
            if not self._claim(cell):
                others.append(cell)
                continue
            with self._renewed(cell):
                self.folder.stored_or(cell.name, partial(_run, bench, cell))
            done(cell)
        return [cell for cell in others if not self.has(cell)]

    def _claim(self, cell: Cell) -> bool:
        """Take the cell, unless a process that may be alive has taken it."""
        path = self.path / "claims" / cell.name
        if self._create(path):
            return not self._finished_meanwhile(cell, path)
        try:
            age = time.time() - path.stat().st_mtime
            content = path.read_bytes()
        except OSError:
            return False
        if age < ABANDONED and not _dead_here(content):
            return False
        try:
            taken = path.rename(path.with_name(f"{cell.name}.{uuid.uuid4().hex}"))
        except OSError:
            return False  # somebody else took the abandoned claim first
        taken.unlink(missing_ok=True)
        return self._create(path) and not self._finished_meanwhile(cell, path)

    def _finished_meanwhile(self, cell: Cell, path: Path) -> bool:
        """Whether the cell was stored between the look for it and the claim, which is given back
        then."""
        if not self.has(cell):
            return False
        path.unlink(missing_ok=True)
        return True

    @staticmethod
    def _create(path: Path) -> bool:
        try:
            with path.open("x", encoding="utf-8") as handle:
                handle.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
        except FileExistsError:
            return False
        return True

    @contextmanager
    def _renewed(self, cell: Cell) -> Iterator[None]:
        """Renew the claim while the cell is run; then give it back, whatever happened."""
        path = self.path / "claims" / cell.name
        over = threading.Event()

        def renew() -> None:
            while not over.wait(RENEWED):
                with suppress(OSError):
                    os.utime(path)

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            path.unlink(missing_ok=True)


def _run(bench: Bench, cell: Cell) -> dict[str, Any]:
    return bench.run(cell).to_dict()


def _dead_here(claim: bytes) -> bool:
    """Whether the claim is of a process of this machine that is gone. A spoilt one may be alive."""
    try:
        holder = json.loads(claim)
        return bool(holder["host"] == socket.gethostname() and not _alive(int(holder["process"])))
    except (ValueError, TypeError, KeyError, OverflowError):
        return False


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0

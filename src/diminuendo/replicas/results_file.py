"""Results on disk: one JSON line for each replica, written before the next group starts.

The first line holds the digest of the study that the file belongs to. The file of another study is
refused. A last line that a crash cut short is dropped, and its replica is trained again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from diminuendo import _files
from diminuendo.errors import InputError, SchemaError

VERSION = 1


class ResultsFile:
    """The results of one study in one file; `entries` holds its lines by the replica's index."""

    def __init__(self, path: str | Path, study: str) -> None:
        self.path = Path(path)
        self.entries: dict[int, dict[str, Any]] = {}
        _files.make_folder(self.path.parent)
        if self.path.exists() and self.path.stat().st_size:
            self._read(study)
        else:
            self._append([{"version": VERSION, "study": study}])
            _files.sync_folder(self.path.parent)

    def _read(self, study: str) -> None:
        text = _files.read_text(self.path, name="the study")
        whole = text[: text.rfind("\n") + 1]
        lines = [self._parsed(line) for line in whole.splitlines()]
        if not lines or "study" not in lines[0]:
            raise InputError(
                "a file with results of a study",
                name="the store",
                value=str(self.path),
                remedy="Choose another file.",
            )
        if lines[0].get("version") != VERSION:
            raise SchemaError(f"of version {VERSION}", name="the store", value=str(self.path))
        if lines[0]["study"] != study:
            raise InputError(
                f"of this study ({study})",
                name=f"the store {self.path}",
                value=lines[0]["study"],
                remedy="It was written with other data, another model or other settings. Use the "
                "same ones, or choose another file.",
            )
        self.entries = {int(line["index"]): line for line in lines[1:]}
        if len(whole) < len(text):
            with self.path.open("r+", encoding="utf-8") as handle:
                handle.truncate(len(whole.encode()))

    def _parsed(self, line: str) -> dict[str, Any]:
        parsed = _files.parse_json(line, name="a line of the store", source=str(self.path))
        if not isinstance(parsed, dict):
            raise InputError("a JSON object", name=f"a line of {self.path}", value=line)
        return parsed

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Append lines so that they survive a loss of power."""
        self._append(entries)
        self.entries |= {int(entry["index"]): entry for entry in entries}

    def _append(self, entries: list[dict[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as handle:
            handle.writelines(json.dumps(entry) + "\n" for entry in entries)
            handle.flush()
            os.fsync(handle.fileno())

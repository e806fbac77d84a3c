"""Reading numbers that people keep in files, and writing files whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from diminuendo.errors import InputError


def read_text(path: str | Path, *, name: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(
            "a readable text file", name=name, value=str(path), remedy=f"({reason})"
        ) from None


def parse_json(text: str, *, name: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            "valid JSON", name=name, value=source, remedy=f"Line {error.lineno}: {error.msg}."
        ) from None


def read_numbers(path: str | Path, *, name: str, hint: str) -> list[Any]:
    """The list called `name` in a JSON or CSV file. The caller checks the numbers themselves."""
    text = read_text(path, name=f"the {name} file")
    if Path(path).suffix.lower() == ".csv":
        return _csv_column(text, name=name, source=str(path), hint=hint)
    data = parse_json(text, name=f"the {name} file", source=str(path))
    if isinstance(data, dict):
        data = data.get(name)
    if not isinstance(data, list):
        raise InputError("a list of numbers", name=f"{name} in {path}", value=data, remedy=hint)
    return data


def read_optional(path: str | Path, *, name: str, hint: str) -> Any:
    """The entry called `name` in a JSON object or CSV, or None where there is none."""
    text = read_text(path, name=f"the {name} file")
    if Path(path).suffix.lower() == ".csv":
        header = [cell.strip().lower() for cell in next(csv.reader(io.StringIO(text)), [])]
        return _csv_column(text, name=name, source=str(path), hint=hint) if name in header else None
    data = parse_json(text, name=f"the {name} file", source=str(path))
    return data.get(name) if isinstance(data, dict) else None


def _csv_column(text: str, *, name: str, source: str, hint: str) -> list[float]:
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if not rows:
        raise InputError("a list of numbers", name=f"{name} in {source}", value="", remedy=hint)
    header = [cell.strip().lower() for cell in rows[0]]
    column = header.index(name) if name in header else 0
    titled = name in header or not _is_number(rows[0][0])
    if name not in header and len(rows[0]) > 1:
        raise InputError(
            f"a column named '{name}'", name=f"the header of {source}", value=rows[0], remedy=hint
        )
    numbers = []
    for line, row in enumerate(rows[titled:], start=1 + titled):
        cell = row[column] if column < len(row) else ""
        if not _is_number(cell):
            raise InputError("a number", name=f"{source} row {line}", value=cell, remedy=hint)
        numbers.append(float(cell))
    return numbers


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(handle.name, 0o666 & ~umask)
        os.replace(handle.name, target)
    except OSError as error:
        raise InputError(
            "a file that can be written",
            name="the output",
            value=str(path),
            remedy=f"({error.strerror})",
        ) from None

"""Files: numbers that people keep in them, and writing them whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from diminuendo.errors import InputError


def read_text(path: str | Path, *, name: str) -> str:
    """The file's text (UTF-8, with or without a byte order mark)."""
    with os_errors("a readable text file", name=name, path=path):
        return Path(path).read_text(encoding="utf-8-sig")


def read_bytes(path: str | Path, *, name: str) -> bytes:
    """The file's bytes."""
    with os_errors("a file that can be read", name=name, path=path):
        return Path(path).read_bytes()


def parse_json(text: str, *, name: str, source: str) -> Any:
    """The value that the text holds; `source` is where the text came from, for the message."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"Line {error.lineno}: {error.msg}."
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"({type(error).__name__})"
    raise InputError("valid JSON", name=name, value=source, remedy=reason)


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
        titled = name in _header(_rows(text))
        return _csv_column(text, name=name, source=str(path), hint=hint) if titled else None
    data = parse_json(text, name=f"the {name} file", source=str(path))
    return data.get(name) if isinstance(data, dict) else None


def _rows(text: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]


def _header(rows: list[list[str]]) -> list[str]:
    return [cell.strip().lower() for cell in rows[0]] if rows else []


def _csv_column(text: str, *, name: str, source: str, hint: str) -> list[float]:
    """The column titled `name`; a file without titles must be one column of numbers throughout."""
    rows = _rows(text)
    header = _header(rows)
    titled = name in header
    column = header.index(name) if titled else 0
    width = len(header)
    if not rows or (not titled and (width > 1 or not _is_number(rows[0][0]))):
        raise InputError(
            f"numbers in a column titled '{name}', or one column without a title",
            name=f"{name} in {source}",
            value=rows[0] if rows else "",
            remedy=hint,
        )
    numbers = []
    for line, row in enumerate(rows[titled:], start=1 + titled):
        cell = row[column] if len(row) == width else ",".join(row)
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
    write_lines(path, [text])


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """`write_text` for what is too long to hold at once."""
    with writing(path) as handle:
        handle.writelines(line.encode() for line in lines)


@contextmanager
def writing(path: str | Path, *, name: str = "the output") -> Iterator[IO[bytes]]:
    """A handle whose content takes the file's place, on disk, when the block ends without an error.

    After an error the old file is untouched. A link is followed, and what is no regular file (a
    pipe, a device) is written to as it is.
    """
    with os_errors("a file that can be written", name=name, path=path):
        if Path(path).exists() and not Path(path).is_file():
            with Path(path).open("wb") as handle:
                yield handle
            return
        target = Path(os.path.realpath(path))
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as temporary:
            try:
                yield temporary
                temporary.flush()
                os.fsync(temporary.fileno())
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(temporary.name, 0o666 & ~umask)
                os.replace(temporary.name, target)
                sync_folder(target.parent)
            except BaseException:
                Path(temporary.name).unlink(missing_ok=True)
                raise


@contextmanager
def os_errors(expected: str, *, name: str, path: str | Path) -> Iterator[None]:
    """Tell the block's OSErrors as an InputError: `expected` of `name`, and the system's reason."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(
            expected, name=name, value=str(path), remedy=f"({reason or error})"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: str | Path) -> Path:
    """The folder, made with its parents where it is missing."""
    folder = Path(path)
    with os_errors("a folder that can be made", name="the folder", path=path):
        folder.mkdir(parents=True, exist_ok=True)
    return folder

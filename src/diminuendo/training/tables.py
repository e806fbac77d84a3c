"""Columns of a CSV or Parquet file as numbers to train on.

Messages name files, columns and rows, never what a cell holds: a cell is private.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diminuendo import _extras, _files, _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError

SUFFIXES = (".csv", ".parquet")


class Table(Protocol):
    """A file with named columns."""

    names: tuple[str, ...]

    def numbers(self, names: Sequence[str]) -> Vector:
        """These columns as float64, one row for each row of the file."""
        ...

    def texts(self, name: str) -> list[str]:
        """One column as text."""
        ...


def read_table(path: str | Path) -> Table:
    """The file, by its ending: .csv (UTF-8, commas, a line of titles) or .parquet."""
    target = Path(path)
    with _files.os_errors("a readable table", name="the data file", path=target):
        if target.suffix.lower() == ".csv":
            return _Csv(target)
        return _Parquet(target)


def features(table: Table, names: Sequence[str] | None, apart: Iterable[str]) -> Vector:
    """The named columns, or all but those `apart`, as an array of rows and columns."""
    chosen = [name for name in table.names if name not in set(apart)] if names is None else names
    if not chosen:
        raise InputError("at least one column", name="features", value=list(chosen))
    return table.numbers([_known(table, name, "features") for name in chosen])


def numbers(table: Table, name: str, key: str) -> Vector:
    """One column; `key` is what the run file calls it."""
    return np.asarray(table.numbers([_known(table, name, key)])[:, 0])


def texts(table: Table, name: str, key: str) -> list[str]:
    """One column as text; `key` is what the run file calls it."""
    return table.texts(_known(table, name, key))


def labels(table: Table, name: str, classes: Sequence[str] | None) -> NDArray[np.int64]:
    """A column of classes 0, 1, …: whole numbers, or texts that stand in the public list."""
    _known(table, name, "target")
    if classes is not None:
        place = {text: number for number, text in enumerate(classes)}
        if len(place) != len(classes):
            raise InputError("different from each other", name="classes", value=list(classes))
        texts = table.texts(name)
        unknown = sum(text not in place for text in texts)
        if unknown:
            raise InputError(
                f"one of the {len(place)} classes in every row",
                name=f"the column {name!r}",
                value=f"something else in {unknown} of {len(texts)} rows",
                remedy="List every class that may occur, as public knowledge has it.",
            )
        return np.array([place[text] for text in texts], dtype=np.int64)
    found = numbers(table, name, "target")
    if not bool(((found >= 0) & (found == np.floor(found)) & (found < 2**31)).all()):
        raise InputError(
            "whole numbers 0, 1, … in every row",
            name=f"the column {name!r}",
            value="fractions, negative or missing ones",
            remedy='For a target that is a quantity set target_type = "number".',
        )
    return found.astype(np.int64)


def _known(table: Table, name: str, key: str) -> str:
    return _validate.choice(f"a column in {key}", name, table.names)


def _no_number(column: str, row: int | None = None) -> InputError:
    where = f"the column {column!r}" + ("" if row is None else f", row {row}")
    return InputError(
        "a number in every row",
        name=where,
        value="text or nothing",
        remedy="Leave the column out with features = […], list the classes of a target with "
        "classes = […], or encode it by a rule that looks at one row at a time.",
    )


class _Csv:
    """Read anew for each question; numpy's parser does the work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle)
            self.names = tuple(name.strip() for name in next(reader, []))
            self._titles = reader.line_num
        if not self.names or len(set(self.names)) != len(self.names) or "" in self.names:
            raise InputError(
                "a first line with a different title for each column",
                name="the CSV file",
                value=str(path),
            )

    def numbers(self, names: Sequence[str]) -> Vector:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a file without rows
            try:
                return np.loadtxt(
                    self._path,
                    delimiter=",",
                    quotechar='"',
                    comments=None,
                    encoding="utf-8-sig",
                    ndmin=2,
                    skiprows=self._titles,
                    usecols=[self.names.index(name) for name in names],
                )
            except ValueError as error:
                raise self._plain(str(error)) from None

    def texts(self, name: str) -> list[str]:
        place = self.names.index(name)
        with self._path.open(encoding="utf-8-sig", newline="") as handle:
            rows = [row for row in csv.reader(handle) if row][1:]
        for number, row in enumerate(rows, start=1):
            if len(row) != len(self.names):
                raise self._plain(f"at row {number}")
        return [row[place].strip() for row in rows]

    def _plain(self, message: str) -> InputError:
        """What the parser found wrong, without the cell that it quotes."""
        found = re.search(r"at row (\d+), column (\d+)\.$", message)
        if found and int(found[2]) <= len(self.names):
            return _no_number(self.names[int(found[2]) - 1], int(found[1]) + 1)
        row = re.search(r"at row (\d+)", message)
        return InputError(
            "a table with as many cells in every row",
            name="the CSV file",
            value=str(self._path),
            remedy=f"(row {row[1]} differs)" if row else "",
        )


class _Parquet:
    """Read column by column."""

    def __init__(self, path: Path) -> None:
        with _extras.needed("pyarrow", extra="parquet", purpose="Reading a Parquet file"):
            from pyarrow import ArrowInvalid
            from pyarrow.parquet import ParquetFile
        if not path.exists():
            raise FileNotFoundError(2, "No such file or directory")
        try:
            self._file: Any = ParquetFile(path)
        except ArrowInvalid:
            raise InputError("a Parquet file", name="the data file", value=str(path)) from None
        self.names = tuple(str(name) for name in self._file.schema_arrow.names)

    def numbers(self, names: Sequence[str]) -> Vector:
        return np.stack([self._column(name) for name in names], axis=1)

    def texts(self, name: str) -> list[str]:
        return [str(value) for value in self._read(name).to_pylist()]

    def _read(self, name: str) -> Any:
        return self._file.read(columns=[name]).column(0)

    def _column(self, name: str) -> Vector:
        from pyarrow import types

        column = self._read(name)
        kind = column.type
        numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        if not numeric or column.null_count:
            raise _no_number(name)
        return np.asarray(column.to_numpy(), dtype=np.float64)

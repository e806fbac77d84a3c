"""The tables of bounds, turned from one table for each N into one curve for each algorithm."""

from __future__ import annotations

from typing import Any

from diminuendo.bounds import Row
from diminuendo.errors import InputError
from diminuendo.report.text import number

Columns = list[list[Row]]
"""One evaluated table for each N."""


def parse_counts(text: str) -> list[int]:
    """Numbers of examples from "100,1000,1e4": whole, at least 2, increasing."""
    try:
        counts = [int(float(part)) for part in text.split(",")]
    except (ValueError, OverflowError):
        counts = []
    if not counts or min(counts) < 2 or counts != sorted(set(counts)):
        raise InputError(
            "increasing whole numbers of at least 2, separated by commas",
            name="--examples",
            value=text,
            remedy="For example 100,1000,10000.",
        )
    return counts


def curves(columns: Columns) -> dict[str, list[float]]:
    """The bounds of each algorithm, one for each N."""
    return {rows[0].algorithm: [row.bound for row in rows] for rows in zip(*columns, strict=True)}


def earlier_work(columns: Columns) -> list[str]:
    """The algorithms in the tables that are not the paper's own."""
    return [row.algorithm for row in columns[0] if not row.ours]


def as_data(columns: Columns) -> list[dict[str, Any]]:
    """One dictionary for each algorithm, ready for JSON."""
    return [
        {
            "algorithm": rows[0].algorithm,
            "formula": rows[0].formula,
            "ours": rows[0].ours,
            "bounds": [row.bound for row in rows],
        }
        for rows in zip(*columns, strict=True)
    ]


def as_text(columns: Columns) -> list[list[str]]:
    """Rows of text: the algorithm, then its bound for each N to four digits."""
    return [
        [rows[0].algorithm, *(number(row.bound) for row in rows)]
        for rows in zip(*columns, strict=True)
    ]

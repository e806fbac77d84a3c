"""What a table says: every cell beside the baselines, by paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diminuendo.compare.methods import BASELINE, METHODS, STRONG
from diminuendo.compare.table import Entry
from diminuendo.replicas.statistics import Interval, paired

Column = tuple[str, str, int, float]
"""Task, model, examples and ε: where methods stand beside each other."""


@dataclass(frozen=True)
class Row:
    """A method in one column: its accuracy, and paired differences to both uniform baselines
    (None where a baseline was not run)."""

    entry: Entry
    accuracy: Interval
    over_uniform: Interval | None
    over_strong: Interval | None

    @property
    def title(self) -> str:
        """The method in words."""
        return METHODS[self.entry.cell.method].title


def columns(entries: Sequence[Entry]) -> dict[Column, list[Row]]:
    """Rows of every column, the best first."""
    grouped: dict[Column, list[Entry]] = {}
    for entry in entries:
        cell = entry.cell
        grouped.setdefault((cell.task, cell.model, cell.examples, cell.epsilon), []).append(entry)
    table = {}
    for column in sorted(grouped):
        own = {entry.cell.method: entry for entry in grouped[column]}
        rows = [
            Row(
                entry,
                entry.mean,
                _difference(entry, own.get(BASELINE)),
                _difference(entry, own.get(STRONG)),
            )
            for entry in own.values()
        ]
        table[column] = sorted(rows, key=lambda row: -_number(row.accuracy.mean))
    return table


def _number(value: float) -> float:
    return value if math.isfinite(value) else -1.0


def _difference(entry: Entry, other: Entry | None) -> Interval | None:
    if other is None or len(other.accuracy) != len(entry.accuracy):
        return None
    values = ([math.nan if a is None else a for a in one.accuracy] for one in (entry, other))
    return paired(*values)


def verdict(row: Row) -> str:
    """Better, worse, or not told apart from uniform noise, by the paired 95% interval."""
    if row.over_uniform is None or row.entry.cell.method == BASELINE:
        return ""
    if row.over_uniform.low > 0:
        return "better"
    return "worse" if row.over_uniform.high < 0 else "not told apart"


def by_method(table: dict[Column, list[Row]]) -> list[list[str]]:
    """For every method: in how many columns it is better, worse, not told apart; mean gain."""
    lines = []
    for key, method in METHODS.items():
        rows = [row for rows in table.values() for row in rows if row.entry.cell.method == key]
        if not rows:
            continue
        verdicts = [verdict(row) for row in rows]
        gains = [row.over_uniform.mean for row in rows if row.over_uniform is not None]
        ranks = [
            1 + [row.entry.cell.method for row in column].index(key)
            for column in table.values()
            if any(row.entry.cell.method == key for row in column)
        ]
        lines.append(
            [
                method.title,
                str(len(rows)),
                str(verdicts.count("better")),
                str(verdicts.count("not told apart")),
                str(verdicts.count("worse")),
                f"{100 * sum(gains) / len(gains):+.1f}" if gains else "",
                f"{sum(ranks) / len(ranks):.1f}",
            ]
        )
    return lines

"""CSV files and pictures beside the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diminuendo import _files
from diminuendo.report import figures
from diminuendo.report.figures import Panel

PICTURES = ("png", "svg")


def write_csv(path: Path, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table as a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(rows)
    _files.write_text(path, text.getvalue())


def write_panels(panels: Sequence[Panel], folder: Path, name: str) -> Path:
    """Panels with intervals, as PNG and SVG; returns the SVG's path."""
    for ending in PICTURES:
        figures.with_intervals(panels, folder / f"{name}.{ending}")
    return folder / f"{name}.svg"

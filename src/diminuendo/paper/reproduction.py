"""reproduce(...): run parts of the paper, merge them with earlier ones, and write everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from diminuendo import _files
from diminuendo.paper import page
from diminuendo.paper.digits import Digits
from diminuendo.paper.figure import figure
from diminuendo.paper.joint import joint
from diminuendo.paper.results import FILE, Part, Results
from diminuendo.paper.setting import Run
from diminuendo.paper.sources import sources
from diminuendo.paper.tables import tables


def reproduce(
    digits: Digits, run: Run, parts: Iterable[Part], *, public: Digits | None = None
) -> tuple[Results, Path]:
    """The results of these parts, and the path of the page.

    `public` are images in MNIST's form on which the part `joint` tunes MNIST's settings; digits
    drawn from fonts unless given.

    Files are written from these parts and those that an earlier call left in the folder.
    """
    runners: dict[Part, Callable[[], Results]] = {
        "figure": lambda: Results(figure=figure(digits, run)),
        "tables": lambda: Results(tables=tables(run)),
        "joint": lambda: Results(joint=joint(sources(digits, public), run)),
    }
    folder = run.folder.path
    earlier, results = Results.read(folder), Results()
    for part in parts:
        results = results.merged(runners[part]())
    return results, write(folder, earlier.merged(results))


def write(folder: Path, results: Results) -> Path:
    """results.json, CSV files, pictures and the page; returns the page's path."""
    _files.write_text(folder / FILE, json.dumps(results.to_dict(), indent=1, ensure_ascii=False))
    return page.write(folder, results)

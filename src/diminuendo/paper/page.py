"""One page of HTML about a reproduction, and the CSV files and pictures beside it."""

from __future__ import annotations

from pathlib import Path

from diminuendo import __version__
from diminuendo.paper import figure_page, joint_page, table_page
from diminuendo.paper.data import NOT_COVERED
from diminuendo.paper.results import Results
from diminuendo.report import html

CLAIM = (
    "Each training run is T Gaussian steps on clipped, summed gradients of the whole sample, for "
    "add-remove neighbours and an adversary who sees every noisy gradient. Seeds are fixed so that "
    "these numbers can be reproduced: as releases, these very runs would not be private."
)
NOT_CLAIMED = (
    *NOT_COVERED,
    "Losses and accuracies on this page are computed on the training and test data without noise: "
    "they are the experiment's measurements, not private releases.",
    "Numbers of steps, falls, learning rates, clip norms and momenta were tuned on synthetic data "
    "only, and where noise, learning rate and model are chosen together on the public images named "
    "there, if any. Which kind of synthetic labels to use (those of a random linear teacher) and "
    "what to minimise (the training loss) was chosen by people who had seen MNIST results, and so "
    "was the tuner's effort: with fewer runs per candidate and without trying the ends of the "
    "range of T first, the exponential schedule did not beat uniform noise on MNIST35 at N = 250.",
)


def write(folder: Path, results: Results) -> Path:
    """Write the page with its CSV files and pictures into the folder; returns the page's path."""
    sections: list[html.Section] = []
    if results.figure is not None:
        sections += figure_page.sections(folder, results.figure)
    if results.tables is not None:
        sections += table_page.sections(folder, results.tables)
    if results.joint is not None:
        sections += joint_page.sections(folder, results.joint)
    sections.append(
        html.Section(
            "What the privacy claim covers, and what it does not", CLAIM, html.bullets(NOT_CLAIMED)
        )
    )
    document = html.page(
        "Falling noise schedules: the paper's figure and tables, reproduced",
        sections,
        lead="Private gradient descent at (4, 1e-8): what a schedule gains over uniform noise.",
        footer=f"diminuendo {__version__}. Every number here is also in results.json and the CSV "
        "files beside this page.",
    )
    return html.write_page(folder / "index.html", document)

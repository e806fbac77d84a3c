"""Pictures, through matplotlib (the `plots` extra). Each takes data and writes one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diminuendo._validate import Vector
from diminuendo.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0b5fa5", "#d1495b", "#3a7d44", "#8d6a9f", "#e09f3e", "#5c6b73")
_FORMATS = (".svg", ".png", ".pdf")


def _new(width: float, height: float, panels: int = 1) -> tuple[object, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "installed",
            name="matplotlib",
            value=None,
            remedy="Pictures need it: pip install 'diminuendo[plots]'.",
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, panels))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, list(axes)


def _save(figure: object, path: str | Path) -> Path:
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise InputError(
            f"a file name ending in {', '.join(_FORMATS)}", name="the picture", value=str(path)
        )
    try:
        figure.savefig(target, dpi=150)  # type: ignore[attr-defined]
    except OSError as error:
        raise InputError(
            "a file that can be written",
            name="the picture",
            value=str(path),
            remedy=f"({error.strerror})",
        ) from None
    return target


def schedules(curves: Mapping[str, Vector], path: str | Path, *, title: str = "") -> Path:
    """Noise multipliers by step, and the share of the budget spent so far."""
    figure, (noise, spent) = _new(9, 3.4, 2)
    for (name, sigmas), colour in zip(curves.items(), _COLOURS, strict=False):
        t = np.arange(1, sigmas.size + 1)
        noise.plot(t, sigmas, label=name, color=colour)
        cost = np.cumsum(sigmas**-2.0)
        spent.plot(t, cost / cost[-1], label=name, color=colour)
    noise.set(xlabel="step", ylabel="noise multiplier σ", title=title)
    noise.set_ylim(bottom=0)
    spent.set(xlabel="step", ylabel="share of the budget spent", ylim=(0, 1.02))
    noise.legend(frameon=False)
    return _save(figure, path)


def against_examples(
    examples: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str,
    ylabel: str,
    dashed: Sequence[str] = (),
) -> Path:
    """Bounds against the number of examples, on logarithmic axes."""
    figure, (axis,) = _new(8, 4.6)
    for i, (name, values) in enumerate(curves.items()):
        style = "--" if name in dashed else "-"
        axis.loglog(
            examples,
            values,
            style,
            label=name,
            color=_COLOURS[i % len(_COLOURS)],
            linewidth=1.2 if style == "--" else 2,
            marker="os^vDPX*"[i % 8],
            markersize=3,
        )
    axis.set(xlabel="examples N", ylabel=ylabel, title=title)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path)


def running(epsilon: Vector, path: str | Path, *, title: str) -> Path:
    """ε spent so far, by step."""
    figure, (axis,) = _new(6, 3.6)
    axis.plot(np.arange(1, epsilon.size + 1), epsilon, color=_COLOURS[0])
    axis.set(xlabel="step", ylabel="ε so far", title=title)
    axis.set_ylim(bottom=0)
    return _save(figure, path)

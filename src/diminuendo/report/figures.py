"""Pictures, through matplotlib (the `plots` extra). Each takes data and writes one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diminuendo import _extras, _files
from diminuendo._validate import Vector
from diminuendo.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0b5fa5", "#d1495b", "#3a7d44", "#8d6a9f", "#e09f3e", "#5c6b73")
_FORMATS = (".svg", ".png", ".pdf")


def _new(width: float, height: float, panels: int = 1) -> tuple[object, list[Axes]]:
    with _extras.needed("matplotlib", extra="plots", purpose="Drawing pictures"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, panels))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, list(axes)


def check_name(path: str | Path) -> Path:
    """The path, if its ending is one that can be drawn: to be asked before long computations."""
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise InputError(
            f"a file name ending in {', '.join(_FORMATS)}", name="the picture", value=str(path)
        )
    return target


def _save(figure: object, path: str | Path) -> Path:
    target = check_name(path)
    with _files.writing(target, name="the picture") as handle:
        kind = target.suffix.lower().removeprefix(".")
        figure.savefig(handle, format=kind, dpi=150)  # type: ignore[attr-defined]
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


class Series(NamedTuple):
    """Means over x with the half-widths of their intervals."""

    name: str
    x: Sequence[float]
    mean: Sequence[float]
    half: Sequence[float]


class Panel(NamedTuple):
    """One set of axes."""

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


def with_intervals(panels: Sequence[Panel], path: str | Path) -> Path:
    """Means with error bars, a panel beside the other."""
    figure, axes = _new(4.2 * len(panels), 3.6, len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        for i, series in enumerate(panel.series):
            axis.errorbar(
                series.x,
                series.mean,
                yerr=_drawable(series, panel.log_y),
                label=series.name,
                color=_COLOURS[i % len(_COLOURS)],
                marker="osD^v*"[i % 6],
                markersize=4,
                capsize=3,
                linewidth=1.4,
            )
        if panel.log_x:
            axis.set_xscale("log")
            ticks = sorted({float(x) for series in panel.series for x in series.x})
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
        if panel.log_y:
            axis.set_yscale("log")
        axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
        axis.legend(frameon=False, fontsize=8)
    return _save(figure, path)


def _drawable(series: Series, log_y: bool) -> list[list[float]]:
    """Error bars; on a logarithmic axis none reaches below a hundredth of its mean."""
    down, up = [], []
    for mean, half in zip(series.mean, series.half, strict=True):
        reach = half if np.isfinite(half) else 0.0
        down.append(min(reach, 0.99 * abs(mean)) if log_y else reach)
        up.append(reach)
    return [down, up]


class Band(NamedTuple):
    """Means at each x, and between which values most single runs lie."""

    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def band(
    shown: Band,
    path: str | Path,
    *,
    level: float,
    labels: tuple[str, str, str],
    xlabel: str,
    ylabel: str,
    title: str,
) -> Path:
    """A line of means in a band, over a logarithmic x, and a level to compare with.

    labels  of the means, the band and the level
    """
    figure, (axis,) = _new(5.2, 3.8)
    axis.fill_between(shown.x, shown.low, shown.high, color=_COLOURS[0], alpha=0.18, lw=0)
    axis.plot(shown.x, shown.mean, color=_COLOURS[0], marker="o", markersize=4, label=labels[0])
    axis.fill_between([], [], [], color=_COLOURS[0], alpha=0.18, label=labels[1])
    axis.axhline(level, color=_COLOURS[1], linestyle="--", linewidth=1.2, label=labels[2])
    axis.set_xscale("log")
    axis.set_xticks(list(shown.x), [f"{x:g}" for x in shown.x])
    axis.minorticks_off()
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return _save(figure, path)


def ranking(
    names: Sequence[str],
    means: Sequence[float],
    halves: Sequence[float],
    path: str | Path,
    *,
    title: str,
    xlabel: str,
) -> Path:
    """Means with intervals, one line each, the first on top."""
    figure, (axis,) = _new(8, 0.45 * len(names) + 1.2)
    rows = np.arange(len(names))[::-1]
    axis.errorbar(means, rows, xerr=halves, fmt="o", color=_COLOURS[0], capsize=3, markersize=5)
    axis.set_yticks(rows, list(names))
    axis.set(xlabel=xlabel, title=title)
    return _save(figure, path)


class Point(NamedTuple):
    """A candidate of a tuning study: where it was tried, and what it reached."""

    family: str
    values: Mapping[str, float]
    score: float


def landscape(points: Sequence[Point], path: str | Path, *, ylabel: str) -> Path:
    """The score against each tuned number, a colour for each family."""
    names = list(dict.fromkeys(n for p in points for n in p.values))
    if not names:
        raise InputError("at least one tuned number", name="points", value=list(points))
    figure, axes = _new(3.6 * len(names), 3.4, len(names))
    families = list(dict.fromkeys(p.family for p in points))
    for axis, name in zip(axes, names, strict=True):
        for family, colour in zip(families, _COLOURS * 2, strict=False):
            own = [p for p in points if p.family == family and name in p.values]
            axis.plot(
                [p.values[name] for p in own],
                [p.score for p in own],
                "o",
                color=colour,
                alpha=0.7,
                markersize=4,
                label=family if own else None,
            )
        if name in ("lr", "clip"):
            axis.set_xscale("log")
        axis.set(xlabel=name, ylabel=ylabel if name == names[0] else "")
    axes[0].legend(frameon=False, fontsize=8)
    return _save(figure, path)

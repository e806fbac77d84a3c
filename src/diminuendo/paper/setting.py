"""How much of the paper is reproduced, and the folder that keeps the parts that are done."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diminuendo import _files, _validate
from diminuendo.errors import InputError

PAPER = "paper's network"
"""The network with 1000 hidden units, by this name in the part `joint`."""


@dataclass(frozen=True, kw_only=True)
class JointTask:
    """One task of the part `joint`.

    name      the task
    cells     (N, ε, δ), in the order in which they are run
    models    chosen from: "linear", "hidden 32", "ordered linear", …
    compared  the models that are run in all four ways; others only where they are chosen
    paper     (N, ε) of the cells in which the paper's network is compared and chosen from, too
    """

    name: str
    cells: tuple[tuple[int, float, float], ...]
    models: tuple[str, ...] = ("linear", "hidden 128", "ordered linear", "ordered hidden 128")
    compared: tuple[str, ...] = ("linear",)
    paper: tuple[tuple[int, float], ...] = ()


BUDGETS = ((1.0, 1e-5), (4.0, 1e-8), (8.0, 1e-5))


def _grid(*examples: int) -> tuple[tuple[int, float, float], ...]:
    return tuple((n, *budget) for n in examples for budget in BUDGETS)


JOINT = (
    JointTask(
        name="MNIST",
        cells=(
            *_grid(500),
            *(cell for cell in _grid(1000) if cell[1] != 4),
            (3000, 1.0, 1e-5),
            (4000, 8.0, 1e-5),
            *(cell for cell in _grid(2000) if cell[1] != 4),
        ),
        paper=((500, 4.0),),
    ),
    JointTask(name="breast cancer", cells=_grid(400), models=("linear", "hidden 32")),
    JointTask(
        name="MNIST35",
        cells=_grid(250, 500, 1000),
        models=("linear", "hidden 32", "ordered linear", "ordered hidden 32"),
    ),
    JointTask(  # the longest last
        name="MNIST",
        cells=((1000, 4.0, 1e-8), (2000, 4.0, 1e-8)),
        paper=((1000, 4.0), (2000, 4.0)),
    ),
)
QUICK_JOINT = (
    JointTask(name="breast cancer", cells=((400, 1.0, 1e-5),), models=("linear", "hidden 32")),
    JointTask(
        name="MNIST", cells=((500, 4.0, 1e-8),), models=("linear", "hidden 32", "ordered linear")
    ),
)


@dataclass(frozen=True)
class Effort:
    """Rounds of proposals, and runs of each candidate, of `tuning.tune`."""

    rounds: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much is run. A candidate is trained at least `tuning_repeats` times, and as often as it
    takes to have trained on `tuning_examples`: where N is small, runs are noisy and cheap.

    repeats            runs of every variant, at least 2
    trials             candidates of every variant
    influence_steps    T of the runs whose influence is measured
    influence_repeats  independent runs of each
    influence_points   how many steps are measured
    hidden             hidden units of the network
    grids              by task: (numbers of examples, the one at which all variants are run)
    joint              the cells of the part `joint`
    joint_effort       how much is tried for each of their models
    joint_large        parameters × examples from which on less is tried
    """

    repeats: int = 100
    trials: int = 16
    tuning_repeats: int = 4
    tuning_examples: int = 3000
    influence_steps: int = 100
    influence_repeats: int = 12
    influence_points: int = 10
    hidden: int = 1000
    grids: Mapping[str, tuple[tuple[int, ...], int]]
    joint: tuple[JointTask, ...] = JOINT
    joint_effort: tuple[Effort, Effort] = (Effort(5, 6), Effort(3, 4))
    joint_large: int = 4_000_000

    def __post_init__(self) -> None:
        _validate.count("repeats", self.repeats, at_least=2)


def full(repeats: int = 100) -> Setting:
    """The whole comparison: at most 45 minutes on two cores."""
    return Setting(
        repeats=repeats,
        grids={"MNIST35": ((250, 500, 1000), 500), "MNIST": ((500, 1000, 2000), 1000)},
    )


def quick(repeats: int = 8) -> Setting:
    """A small comparison with wide intervals: at most three minutes on two cores."""
    return Setting(
        repeats=repeats,
        trials=6,
        tuning_repeats=2,
        tuning_examples=0,
        influence_steps=60,
        influence_repeats=4,
        influence_points=6,
        grids={"MNIST35": ((250, 500), 500), "MNIST": ((500,), 500)},
        joint=QUICK_JOINT,
        joint_effort=(Effort(2, 3), Effort(1, 2)),
    )


class ResultsFolder:
    """The results of one setting, each part in its own file.

    A folder that was begun with another setting is refused, so that nothing is mixed or lost.
    """

    def __init__(self, path: str | Path, setting: Mapping[str, Any]) -> None:
        self.path = _files.make_folder(path)
        _files.make_folder(self.path / "runs")
        wanted = json.loads(json.dumps(setting))
        marker = self.path / "setting.json"
        if not marker.exists():
            self._begin(marker, json.dumps(wanted, indent=1, ensure_ascii=False))
        stored = _files.parse_json(
            _files.read_text(marker, name="the setting"), name="the setting", source=str(marker)
        )
        if not isinstance(stored, dict):
            raise InputError(
                "the setting that the folder was begun with", name="the file", value=str(marker)
            )
        differing = sorted(k for k in {*wanted, *stored} if wanted.get(k) != stored.get(k))
        if differing:
            raise InputError(
                "a folder of the same setting, or a new one",
                name="--out",
                value=str(path),
                remedy=f"It was begun with other values of {', '.join(differing)}. Nothing was "
                "changed.",
            )

    @staticmethod
    def _begin(marker: Path, text: str) -> None:
        """Write the setting, unless another process does so first; then its setting counts."""
        own = marker.with_name(f".{marker.name}.{uuid.uuid4().hex}")
        _files.write_text(own, text)
        try:
            os.link(own, marker)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not marker.exists():
                _files.write_text(marker, text)
        finally:
            own.unlink(missing_ok=True)

    def stored_or(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part that is stored under this name, or the computed one, which is stored."""
        path = self.path / "runs" / f"{name}.json"
        if path.exists():
            text = _files.read_text(path, name="a stored part")
            return _files.parse_json(text, name="a stored part", source=str(path))
        value = json.loads(json.dumps(compute()))
        _files.write_text(path, json.dumps(value, ensure_ascii=False))
        return value


@dataclass(frozen=True)
class Run:
    """A reproduction in progress.

    folder    keeps the parts that are done
    device    where to train, or None for the default
    progress  whether progress bars are shown
    say       gets a line about each part that begins
    """

    folder: ResultsFolder
    setting: Setting
    device: str | None
    progress: bool
    say: Callable[[str], None]

    @classmethod
    def in_folder(
        cls,
        path: str | Path,
        setting: Setting,
        *,
        data: str,
        public: str | None = None,
        device: str | None = None,
        progress: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> Run:
        """A run whose parts are kept in this folder.

        `data` says where the digits come from, `public` where those do that `joint` is tuned on.
        """
        folder = ResultsFolder(path, {"data": data, "public": public, **asdict(setting)})
        return cls(folder, setting, device, progress, say)

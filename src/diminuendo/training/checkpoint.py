"""Stopping and going on: a checkpoint written whole or not at all, beside a journal of charges.

The journal says up to which step budget was reserved, and is on disk before those steps run. After
a crash, steps that were reserved and are not in the checkpoint may have been released; with fresh
noise they cannot be taken again for free, so they stay spent and the run goes on after them. With a
fixed seed (a run that is not private anyway) the same numbers are drawn again, and the resumed run
equals the uninterrupted one bit for bit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diminuendo import _files, _validate
from diminuendo.errors import InputError, SchemaError
from diminuendo.planning import Plan
from diminuendo.training.journal import Journal

VERSION = 2
_IDENTITY = {"plan", "examples", "model_shapes", "seed", "noise"}
_STATE = {"step", "model", "optimizer", "lr_scheduler", "kinds", "spending", "released", "lost"}
_KEYS = _IDENTITY | _STATE | {"generators"}


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must agree on with the run that resumes it."""

    plan: str
    examples: int
    model: dict[str, list[int]]
    seed: int | None
    noise: str

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        plan_digest: str,
        examples: int,
        seed: int | None,
        noise: str,
    ) -> Identity:
        """The identity of a run, with the shapes of everything in the model's state."""
        shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
        return cls(plan_digest, examples, shapes, seed, noise)

    def check(self, other: Identity, path: Path) -> None:
        """Raise where the other, read from a path, is not of this run."""
        for name, mine, theirs in (
            ("plan", self.plan, other.plan),
            ("number of examples", self.examples, other.examples),
            ("model", self.model, other.model),
            ("seed", self.seed, other.seed),
            ("noise", self.noise, other.noise),
        ):
            if mine != theirs:
                raise InputError(
                    f"of the run's {name} ({_short(mine)})",
                    name=f"the {name} of {path}",
                    value=theirs,
                    remedy="Resume with what the checkpoint was made for, or start "
                    "in another folder.",
                )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:59] + "…"


@dataclass(frozen=True)
class Checkpoints:
    """Where `fit` keeps its checkpoints, and how often it makes one.

    folder  made if it is not there; an interrupted run in it is taken up again
    every   most steps between checkpoints, and most that a crash can cost. The first ones come
            sooner, after 1, 2, 4, 8, … steps: a run is most likely to fail at its start
    moved   True states that the folder was moved here or restored, and that no other copy of it
            has gone on or will
    """

    folder: str | Path
    every: int = 50
    moved: bool = False

    def __post_init__(self) -> None:
        _validate.path("folder", self.folder)
        _validate.count("every", self.every)
        _validate.flag("moved", self.moved)

    def journal(self, plan: Plan, *, writes: bool) -> Journal:
        """The journal beside the checkpoint."""
        path = _files.make_folder(self.folder) / "journal.json"
        return Journal(path, plan, every=self.every, writes=writes, moved=self.moved)


class Checkpoint:
    """The checkpoint of a run in a folder: `checkpoint.pt`, beside its journal.

    One run at a time may `hold` the folder; ranks that do not write only read.
    """

    def __init__(
        self, folder: str | Path, identity: Identity, journal: Journal, *, writes: bool = True
    ) -> None:
        self.folder, self.identity, self.journal = Path(folder), identity, journal
        self.path = self.folder / "checkpoint.pt"
        self.writes = writes
        self._lock: int | None = None

    def hold(self) -> None:
        """Keep other runs out of the folder until `close`."""
        self._lock = _lock(self.folder)

    def close(self) -> None:
        """Let another run have the folder. The system does the same for a process that dies."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, then tell the journal; a crash leaves the old ones."""
        identity = self.identity
        content = {
            "version": VERSION,
            "plan": identity.plan,
            "examples": identity.examples,
            "model_shapes": identity.model,
            "seed": identity.seed,
            "noise": identity.noise,
            "step": step,
            **state,
        }
        write_tensors(self.path, content)
        self.journal.saved(step)

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None where there is none. Runs no code from the file."""
        if not self.path.exists():
            return None
        try:
            content = torch.load(self.path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise InputError(
                "a readable checkpoint",
                name="the checkpoint",
                value=str(self.path),
                remedy=f"({type(error).__name__})",
            ) from None
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise SchemaError(
                f"of version {VERSION}",
                name="the checkpoint",
                value=str(self.path),
                remedy="Resume with the version of diminuendo that wrote it.",
            )
        if not content.keys() >= _KEYS:
            raise InputError("whole", name="the checkpoint", value=str(self.path))
        saved = Identity(
            content["plan"],
            content["examples"],
            content["model_shapes"],
            content["seed"],
            content["noise"],
        )
        self.identity.check(saved, self.path)
        return content


def write_tensors(path: Path, content: Any) -> None:
    """`torch.save`, whole or not at all, and on disk when it returns."""
    with _files.writing(path) as handle:
        torch.save(content, handle)


def _lock(folder: Path) -> int:
    """An exclusive hold on the folder, which ends with the process."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise InputError(
            "free",
            name="the folder",
            value=str(folder),
            remedy="Another run is writing there: wait for it, or use another folder.",
        ) from None
    return handle

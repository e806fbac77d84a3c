"""Stopping and going on: a checkpoint written whole or not at all, and a journal of charges.

The journal says up to which step budget was reserved, and is on disk before those steps run. After
a crash, steps that were reserved and are not in the checkpoint may have been released; with fresh
noise they cannot be taken again for free, so they stay spent and the run goes on after them. With a
fixed seed (a run that is not private anyway) the same numbers are drawn again, and the resumed run
equals the uninterrupted one bit for bit.

Where a policy picks σ while training, nobody can know after a crash what it would have picked: the
journal then holds every event since the checkpoint, each on disk before it is released.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diminuendo import _files, events
from diminuendo.errors import InputError, SchemaError
from diminuendo.events import GaussianStep

VERSION = 1
_IDENTITY = {"plan", "examples", "model_shapes", "seed"}
_STATE = {"step", "model", "optimizer", "lr_scheduler", "kinds", "spending", "released", "lost"}
_KEYS = _IDENTITY | _STATE | {"generators"}


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must agree on with the run that resumes it."""

    plan: str
    examples: int
    model: dict[str, list[int]]
    seed: int | None

    @classmethod
    def of(
        cls, model: torch.nn.Module, plan_digest: str, examples: int, seed: int | None
    ) -> Identity:
        shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
        return cls(plan_digest, examples, shapes, seed)

    def check(self, other: Identity, path: Path) -> None:
        for name, mine, theirs in (
            ("plan", self.plan, other.plan),
            ("number of examples", self.examples, other.examples),
            ("model", self.model, other.model),
            ("seed", self.seed, other.seed),
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


class Journal(NamedTuple):
    """Steps before `upto` may have been released; `events` are those from step `since` on, where
    no plan says what they were."""

    upto: int
    since: int = 0
    events: tuple[GaussianStep, ...] = ()


class Checkpoint:
    """The files of a run in a folder: `checkpoint.pt` and `journal.json`.

    One run at a time may hold the folder; ranks other than the first read and do not hold.
    """

    def __init__(self, folder: str | Path, identity: Identity, *, hold: bool = True) -> None:
        self.folder, self.identity = _files.make_folder(folder), identity
        self.path, self.journal = self.folder / "checkpoint.pt", self.folder / "journal.json"
        self._lock = _lock(self.folder) if hold else None

    def close(self) -> None:
        """Let another run have the folder. The system does the same for a process that dies."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def reserve(self, upto: int, since: int = 0, events_: Sequence[GaussianStep] = ()) -> None:
        """Durably: steps before `upto` may be released from now on."""
        content = {
            "version": VERSION,
            "plan": self.identity.plan,
            "reserved": upto,
            "since": since,
            "events": [events.to_dict(event) for event in events_],
        }
        _files.write_text(self.journal, json.dumps(content))

    def reserved(self) -> Journal:
        if not self.journal.exists():
            return Journal(0)
        data = _files.parse_json(
            _files.read_text(self.journal, name="the journal"),
            name="the journal",
            source=str(self.journal),
        )
        try:
            if data["plan"] != self.identity.plan:
                raise InputError(
                    "of this plan",
                    name=f"the journal {self.journal}",
                    value=data["plan"],
                    remedy="Start in another folder.",
                )
            granted = tuple(events.from_dict(event) for event in data["events"])
            return Journal(int(data["reserved"]), int(data["since"]), granted)
        except (KeyError, TypeError, AttributeError):
            raise InputError("a journal", name="the journal", value=str(self.journal)) from None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Replace the checkpoint; a crash leaves the old one."""
        identity = self.identity
        content = {
            "version": VERSION,
            "plan": identity.plan,
            "examples": identity.examples,
            "model_shapes": identity.model,
            "seed": identity.seed,
            "step": step,
            **state,
        }
        write_tensors(self.path, content)

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
            content["plan"], content["examples"], content["model_shapes"], content["seed"]
        )
        self.identity.check(saved, self.path)
        if content["step"] > 0 and not self.journal.exists():
            raise InputError(
                "beside the checkpoint",
                name="the journal",
                value=str(self.journal),
                remedy="Without it nobody knows which steps were released since; start anew in "
                "another folder, with a budget of its own.",
            )
        return content


def write_tensors(path: Path, content: Any) -> None:
    """`torch.save`, whole or not at all, and on disk when it returns."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as handle:
            torch.save(content, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        _files.sync_folder(path.parent)
    except OSError as error:
        raise InputError(
            "a file that can be written",
            name="the output",
            value=str(path),
            remedy=f"({error.strerror})",
        ) from None


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

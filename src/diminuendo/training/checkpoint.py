"""Stopping and going on: a checkpoint written whole or not at all, and a journal of charges.

The journal says up to which step budget was reserved, and is on disk before those steps run. After
a crash, steps that were reserved and are not in the checkpoint may have been released; with fresh
noise they cannot be taken again for free, so they stay spent and the run goes on after them. With a
fixed seed (a run that is not private anyway) the same numbers are drawn again, and the resumed run
equals the uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diminuendo import _files
from diminuendo.errors import InputError, SchemaError

VERSION = 1


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


class Checkpoint:
    """The files of a run in a folder: `checkpoint.pt` and `journal.json`."""

    def __init__(self, folder: str | Path, identity: Identity) -> None:
        self.folder, self.identity = Path(folder), identity
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path, self.journal = self.folder / "checkpoint.pt", self.folder / "journal.json"

    def reserve(self, upto: int) -> None:
        """Durably: steps before `upto` may be released from now on."""
        text = json.dumps({"version": VERSION, "plan": self.identity.plan, "reserved": upto})
        _files.write_text(self.journal, text)

    def reserved(self) -> int:
        if not self.journal.exists():
            return 0
        data = _files.parse_json(
            _files.read_text(self.journal, name="the journal"),
            name="the journal",
            source=str(self.journal),
        )
        if data.get("plan") != self.identity.plan:
            raise InputError(
                "of this plan",
                name=f"the journal {self.journal}",
                value=data.get("plan"),
                remedy="Start in another folder.",
            )
        return int(data["reserved"])

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
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as handle:
            torch.save(content, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, self.path)
        _files.sync_folder(self.folder)

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
        saved = Identity(
            content["plan"], content["examples"], content["model_shapes"], content["seed"]
        )
        self.identity.check(saved, self.path)
        return content

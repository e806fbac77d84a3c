"""Saving and going on under Opacus' names, without forgetting a step.

A file that is loaded twice would take the same steps twice for the price of one. So the first save
begins a journal beside the file, which knows every step that may have been released since; with a
ledger, the ledger does.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diminuendo import _files
from diminuendo.adapters.opacus.metered import Accountant
from diminuendo.adapters.opacus.run import Run
from diminuendo.errors import InputError, UsageError
from diminuendo.training import Journal

_EXTRA = "diminuendo"
_STATES = {
    "optimizer": "optimizer_state_dict",
    "noise_scheduler": "noise_scheduler_state_dict",
    "grad_clip_scheduler": "grad_clip_scheduler_state_dict",
}


class Saving:
    """The part of `PrivacyEngine` that saves a run and goes on from it."""

    accountant: Accountant
    run: Run | None

    def _current(self) -> Run:
        if self.run is None:
            raise UsageError("make_private comes first.")
        return self.run

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write model, optimiser, schedulers and accountant to a file, between two steps.

        The keys are Opacus', and one of this library's beside them. A file appears whole or not at
        all.
        """
        accountant, run = self.accountant, self._current()
        private = run.private
        if private.waiting is not None:
            raise UsageError("A checkpoint is saved between steps: after loss.backward().")
        place = _place(path, needed=private.private and not private.spending.durable)
        given = {
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        private.begin()
        if place is not None and private.journal is None:
            _begin_journal(run, place)
        journal = private.journal
        content = {
            **(checkpoint_dict or {}),
            "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
            "privacy_accountant_state_dict": accountant.state_dict(),
            **{
                _STATES[name]: part.state_dict() for name, part in given.items() if part is not None
            },
            _EXTRA: {
                "run": private.state_dict(),
                "before": accountant.before(private),
                "journal": None if journal is None else str(journal.path.absolute()),
            },
        }
        if place is None:
            torch.save(content, path, **(torch_save_kwargs or {}))
        else:
            with _files.writing(place, name="path") as handle:
                torch.save(content, handle, **(torch_save_kwargs or {}))
        if journal is not None:
            journal.saved(private.charged)

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Go on from a saved file, after `make_private` and before the first step.

        Steps that were charged after it was saved stay spent and are not taken again. A file that
        Opacus wrote gives its model, its optimiser and its history; the run then starts anew. Runs
        no code from the file, unless torch_load_kwargs says weights_only=False. Returns the rest
        of it.
        """
        accountant, run = self.accountant, self._current()
        content: dict[str, Any] = torch.load(
            path, **{"weights_only": True, "map_location": "cpu", **(torch_load_kwargs or {})}
        )
        for key in ("module_state_dict", "privacy_accountant_state_dict"):
            if key not in content:
                raise InputError(f"a checkpoint, with {key}", name="path", value=str(path))
        extra = content.pop(_EXTRA, None)
        history = content["privacy_accountant_state_dict"] if extra is None else extra["before"]
        if run.sigma is None and history.get("history"):
            raise InputError(
                "without steps of another run, which would come on top of target_epsilon",
                name="the checkpoint",
                value=f"{len(history['history'])} entries",
                remedy="Go on with make_private, which states what all of them cost.",
            )
        module.load_state_dict(content["module_state_dict"], **(module_load_dict_kwargs or {}))
        for part, name in (
            (optimizer, "optimizer"),
            (noise_scheduler, "noise_scheduler"),
            (grad_clip_scheduler, "grad_clip_scheduler"),
        ):
            state = content.pop(_STATES[name], None)
            if part is not None and state:
                part.load_state_dict(state)
        if extra is None:
            accountant.load_state_dict(history)
            return content
        private = run.private
        if extra["journal"] is not None and private.journal is None:
            private.journal = Journal(_found(extra["journal"], path), run.plan)
        private.load_state_dict(extra["run"])
        accountant.load_state_dict(history)
        return content


def _place(path: Any, *, needed: bool) -> Path | None:
    if isinstance(path, (str, Path)) or hasattr(path, "__fspath__"):
        return Path(path)
    if needed:
        raise InputError(
            "a path",
            name="path",
            value=type(path).__name__,
            remedy="A journal of the steps taken since is kept beside the file. With a ledger any "
            "file will do.",
        )
    return None


def _begin_journal(run: Run, place: Path) -> None:
    private = run.private
    if private.spending.durable or not private.private:
        return
    place = place.with_name(f"{place.name}.{secrets.token_hex(4)}.journal")
    journal = Journal(place, run.plan)
    journal.read(planned=run.sigma is None, alone=True)
    private.journal = journal


def _found(journal: str, path: Any) -> Path:
    """The journal where it was, or beside the file."""
    there = Path(journal)
    beside = Path(path).with_name(there.name) if isinstance(path, (str, Path)) else there
    return beside if not there.exists() and beside.exists() else there

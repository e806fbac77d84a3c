"""A run's σ_t, ε so far and learning rate in TensorBoard: `TensorBoardLogger`.

    fit(model, data, plan, loss=…, lr=…, progress=Progress(logger=TensorBoardLogger("runs/first")))

What is written is fixed by the plan or was paid for. See `diminuendo.training.Logger`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diminuendo import _extras
from diminuendo.training import Fact

_NEEDED = {"extra": "tensorboard", "purpose": "TensorBoardLogger"}


class TensorBoardLogger:
    """Writes one run to a folder for TensorBoard; make another one for another run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        with _extras.needed("tensorboard", **_NEEDED):
            import tensorboard  # noqa: F401

    def begin(self, facts: Mapping[str, Fact]) -> None:
        """Open the folder and write the plan's facts as a table."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self.folder))
        self._writer.add_text("plan", _table(facts), 0)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, facts: Mapping[str, Fact]) -> None:
        """Write how the run ended, and close the folder."""
        self._writer.add_text("result", _table(facts), int(facts.get("steps", 0)))
        self._writer.close()


def _table(facts: Mapping[str, Fact]) -> str:
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    return "\n".join(lines)

"""Exceptions of the gradient engine."""

from __future__ import annotations

from diminuendo.errors import DiminuendoError


class EngineError(DiminuendoError, ValueError):
    """The engine was used in a way that cannot give per-example gradients."""


class UnsupportedModule(EngineError):
    """A module whose per-example gradients the engine cannot compute.

    ``path`` is the module's dotted path in the model and ``verdict`` is ``"never"`` (the layer
    mixes examples, so per-example gradients do not exist), ``"not yet"`` (possible in
    principle) or ``"replace"`` (an equivalent supported layer exists).
    """

    def __init__(self, path: str, kind: str, verdict: str, remedy: str) -> None:
        self.path = path or "(the model itself)"
        self.kind = kind
        self.verdict = verdict
        self.remedy = remedy
        super().__init__(f"module '{self.path}' ({kind}) is not supported ({verdict}): {remedy}")

"""Exceptions of the gradient engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diminuendo.errors import DiminuendoError


def place(path: str) -> str:
    """A module's dotted path in quotation marks; the model itself has none."""
    return f"'{path}'" if path else "the model itself"


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
        where = f"module '{path}'" if path else "the model itself"
        super().__init__(f"{where} ({kind}) is not supported ({verdict}): {remedy}")


class MixedExamples(EngineError):
    """Gradients of several examples come mixed, so that none of them can be clipped on its own.

    ``path`` names the module or the parameter where it was seen.
    """

    def __init__(self, path: str, why: str) -> None:
        self.path = path or "(the model itself)"
        super().__init__(
            f"examples are mixed at {place(path)}: {why}. Each loss must depend on its own example "
            "alone: no statistic, attention or loss across the batch, losses in the order of the "
            "examples, and the example as the first dimension of what the model works on"
        )


def refuse_nested(inputs: Sequence[Tensor]) -> None:
    """Raise where a tensor holds sequences of several lengths."""
    if any(part.is_nested for part in inputs):
        raise EngineError(
            "nested tensors cannot be followed: pad the sequences to one length "
            "(torch.nested.to_padded_tensor) and mask what is padded"
        )

"""Deprecated: `diminuendo.experiments` is now `replicas`, `tuning`, `measuring` and `paper`.

Names and modules of version 0.1 remain importable here for one version and warn about it.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

_PUBLIC = ("Outcome", "Replica", "initialise", "train")
_MOVED: dict[str, tuple[str, ...]] = {
    "auxiliary": ("tuning", "tuning.auxiliary"),
    "batched": ("replicas.batch", "replicas.general"),
    "charged": ("tuning", "tuning.private_tuning"),
    "curvature": ("measuring", "measuring.curvature"),
    "data": ("paper.data",),
    "digits": ("paper.digits",),
    "excess": ("paper.quadratics",),
    "identity": ("replicas.fingerprint",),
    "measuring": ("measuring", "measuring.result", "measuring.source"),
    "networks": ("tuning",),
    "repeats": ("replicas", "replicas.replica", "replicas.initial", "replicas.study"),
    "reproduction": ("paper.figure", "paper.tables", "paper.setting"),
    "selection": ("tuning", "tuning.private_selection"),
    "statistics": ("replicas.statistics",),
    "tuning": ("tuning", "tuning.space", "tuning.search"),
    "variants": ("paper.variants",),
}
"""Modules of version 0.1, and where what they held lives now."""
_RENAMED = {
    "Charged": "PrivateTuningResult",
    "Chosen": "FamilyResult",
    "Folder": "ResultsFolder",
    "Selected": "SelectionResult",
    "Tuned": "TuningResult",
    "identity": "fingerprint",
    "several": "synthetic_sets",
}


class _MovedModule(types.ModuleType):
    """Stands in for a module of version 0.1, so that imports from it go on working."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for home in _MOVED[self.__name__.rpartition(".")[2]]:
                module = importlib.import_module(f"diminuendo.{home}")
                new = _RENAMED.get(name, name)
                if hasattr(module, new):
                    _warn(f"{self.__name__}.{name}", f"{module.__name__}.{new}")
                    return getattr(module, new)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _warn(f"{__name__}.{name}", f"diminuendo.replicas.{name}")
    return getattr(importlib.import_module("diminuendo.replicas"), name)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}.", DeprecationWarning, stacklevel=3)


for _name in _MOVED:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _MovedModule(f"{__name__}.{_name}")

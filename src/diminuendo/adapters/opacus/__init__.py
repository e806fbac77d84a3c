"""Opacus' interface on this library's planned noise, exact noise and certified accounting.

    from diminuendo.adapters.opacus import PrivacyEngine     # in place of: from opacus import …

`PrivacyEngine` and `BatchMemoryManager` need PyTorch alone. `CertifiedAccountant` and
`PlannedNoise` go the other way: they bring this library's accountant and schedules to Opacus' own
training, and need Opacus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diminuendo import _extras

with _extras.needed("torch", extra="torch", purpose="The Opacus adapter"):
    from diminuendo.adapters.opacus.engine import PrivacyEngine
    from diminuendo.adapters.opacus.parts import BatchMemoryManager

if TYPE_CHECKING:
    from diminuendo.adapters.opacus.inside import CertifiedAccountant, PlannedNoise

__all__ = ["BatchMemoryManager", "CertifiedAccountant", "PlannedNoise", "PrivacyEngine"]


def __getattr__(name: str) -> Any:
    if name in ("CertifiedAccountant", "PlannedNoise"):
        from diminuendo.adapters.opacus import inside

        return getattr(inside, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

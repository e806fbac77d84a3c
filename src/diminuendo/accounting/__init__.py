"""Events to ε. Full batch: the closed form. Poisson subsampling: a certified bracket."""

from __future__ import annotations

from diminuendo.accounting.account import delta, epsilon

__all__ = ["delta", "epsilon"]

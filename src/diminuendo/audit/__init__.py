"""Canary audits: a lower bound on ε from what a trainer really releases, beside the claim."""

from diminuendo import _extras

with _extras.needed("torch", extra="torch", purpose="Auditing"):
    from diminuendo.audit.auditing import Audit, audit
    from diminuendo.audit.canaries import Canaries
    from diminuendo.audit.trainers import Train, by_fit, by_loop

__all__ = ["Audit", "Canaries", "Train", "audit", "by_fit", "by_loop"]

"""Evidence: many runs as one, influence by retraining, the spectrum of a Hessian."""

from diminuendo import _extras

with _extras.needed("torch", extra="all", purpose="Running experiments"):
    from diminuendo.experiments.repeats import Outcome, Replica, initialise, train

__all__ = ["Outcome", "Replica", "initialise", "train"]

"""Evidence: many runs as one, influence by retraining, the spectrum of a Hessian."""

from diminuendo.experiments.repeats import Outcome, Replica, initialise, train

__all__ = ["Outcome", "Replica", "initialise", "train"]

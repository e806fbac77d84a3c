"""Many runs as one."""

from diminuendo.replicas.engine import Outcome, Replica, initialise, train

__all__ = ["Outcome", "Replica", "initialise", "train"]

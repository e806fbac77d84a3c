"""Algorithm 1 on PyTorch (the `torch` extra): private gradients for your loop, or a whole run."""

from diminuendo import _extras

with _extras.needed("torch", extra="torch", purpose="Training"):
    from diminuendo.training.checkpoint import Checkpoints
    from diminuendo.training.clipping import Automatic, Flat, PerLayer, UnsupportedModule
    from diminuendo.training.compute import Compute
    from diminuendo.training.journal import Journal
    from diminuendo.training.learning_rates import follow_plan
    from diminuendo.training.loop import fit
    from diminuendo.training.optim import PrivateDescent
    from diminuendo.training.plateau import OnPlateau
    from diminuendo.training.progress import Progress
    from diminuendo.training.result import Result
    from diminuendo.training.step import PrivateGradients, Released
    from diminuendo.training.tracking import Fact, Logger

__all__ = [
    "Automatic",
    "Checkpoints",
    "Compute",
    "Fact",
    "Flat",
    "Journal",
    "Logger",
    "OnPlateau",
    "PerLayer",
    "PrivateDescent",
    "PrivateGradients",
    "Progress",
    "Released",
    "Result",
    "UnsupportedModule",
    "fit",
    "follow_plan",
]

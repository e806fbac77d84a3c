"""Algorithm 1 on PyTorch (the `torch` extra): private gradients for your loop, or a whole run."""

from diminuendo.training.clipping import Automatic, Flat, PerLayer, UnsupportedModule
from diminuendo.training.loop import Result, fit
from diminuendo.training.optim import PrivateDescent
from diminuendo.training.step import PrivateGradients, Released

__all__ = [
    "Automatic",
    "Flat",
    "PerLayer",
    "PrivateDescent",
    "PrivateGradients",
    "Released",
    "Result",
    "UnsupportedModule",
    "fit",
]

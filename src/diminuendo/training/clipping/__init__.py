"""Per-example clipped gradient sums for differential privacy."""

from diminuendo.training.clipping.clip import Automatic, Clip, Flat, PerLayer
from diminuendo.training.clipping.engine import ClippedSum, Engine
from diminuendo.training.clipping.errors import EngineError, MixedExamples, UnsupportedModule

__all__ = [
    "Automatic",
    "Clip",
    "ClippedSum",
    "Engine",
    "EngineError",
    "Flat",
    "MixedExamples",
    "PerLayer",
    "UnsupportedModule",
]

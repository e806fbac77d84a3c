"""Measure what a noise schedule depends on: a loss's influence curve, or its curvature.

    retraining   `measure`: influence by paired runs whose noise differs in one step
    result       `MeasuredInfluence`: the estimates, their intervals, and curves fitted to them
    curvature    `spectrum_of`: a Hessian's spectrum by Lanczos iterations
    source       whether the data were auxiliary or private, and what follows from that

`dim.influence.measure` and `dim.influence.spectrum_of` are the same functions.
"""

from diminuendo import _extras

with _extras.needed("torch", extra="all", purpose="Measuring an influence"):
    from diminuendo.measuring.curvature import HessianSpectrum, spectrum_of
    from diminuendo.measuring.result import ExponentialFit, MeasuredInfluence
    from diminuendo.measuring.retraining import measure

__all__ = ["ExponentialFit", "HessianSpectrum", "MeasuredInfluence", "measure", "spectrum_of"]

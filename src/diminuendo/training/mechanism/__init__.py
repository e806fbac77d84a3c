"""The mechanism of a step: Gaussian noise on the clipped sum, and a public divisor."""

from diminuendo.training.mechanism.noise import ExactNoise, NoiseName
from diminuendo.training.mechanism.release import FastNoise, Mechanism, NoiseSource, NoisySum

__all__ = ["ExactNoise", "FastNoise", "Mechanism", "NoiseName", "NoiseSource", "NoisySum"]

"""The mechanism of a step: Gaussian noise on the clipped sum, and a public divisor."""

from diminuendo.training.mechanism.release import FastNoise, Mechanism, NoiseSource, NoisySum

__all__ = ["FastNoise", "Mechanism", "NoiseSource", "NoisySum"]

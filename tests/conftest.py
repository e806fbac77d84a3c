"""Hypothesis without deadlines: timings are never asserted."""

from hypothesis import settings

settings.register_profile("diminuendo", deadline=None, derandomize=True)
settings.load_profile("diminuendo")

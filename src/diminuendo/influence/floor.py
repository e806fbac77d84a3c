"""The least influence ever returned."""

FLOOR = 1e-280
"""Relative to an influence's scale."""

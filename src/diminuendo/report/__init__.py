"""Data first, then text and figures."""

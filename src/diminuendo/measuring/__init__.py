"""Measuring influence and curvature."""

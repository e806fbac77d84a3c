"""Doors to other libraries. Nothing in diminuendo imports these."""

"""The paper's figure and tables."""

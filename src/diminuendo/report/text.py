"""How numbers and plans are written; the words themselves live with the plan."""

from diminuendo.planning.text import counted, drawing, number, rounded_down, rounded_up, whole
from diminuendo.planning.text import summary as plan_summary

__all__ = ["counted", "drawing", "number", "plan_summary", "rounded_down", "rounded_up", "whole"]

"""Methods of private training at equal budgets: one table, its pictures and a page."""

from diminuendo import _extras

with _extras.needed("torch", extra="torch", purpose="Comparing methods"):
    from diminuendo.compare.folder import TableFolder
    from diminuendo.compare.method import Method
    from diminuendo.compare.methods import METHODS
    from diminuendo.compare.private import Private
    from diminuendo.compare.table import Bench, Cell, Effort, Entry, cells

__all__ = [
    "METHODS",
    "Bench",
    "Cell",
    "Effort",
    "Entry",
    "Method",
    "Private",
    "TableFolder",
    "cells",
]

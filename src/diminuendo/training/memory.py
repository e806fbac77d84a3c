"""Freed memory stays with the process from one step to the next.

A step frees all of its activations and the next one asks for as much again. glibc hands such blocks
back to the kernel in between, and every page that it asks for anew is a fault: thousands in a step,
which can take as long as the step's arithmetic. Other C libraries are left alone, and so is glibc
where the environment has a say about it already.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt's names in malloc.h."""
KEPT = 1 << 30
"""Most bytes kept at the end of the heap."""
MAPPED = 1 << 25
"""Blocks from this size on come from the kernel all the same: glibc takes no more."""


@cache
def keep_freed() -> bool:
    """Once for the process; says whether it had an effect."""
    told = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if told or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    both = (_MMAP_THRESHOLD, MAPPED), (_TRIM_THRESHOLD, KEPT)
    return all(library.mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in both)

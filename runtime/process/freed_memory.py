"""Give freed memory back to the operating system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def give_back_freed() -> None:
    """Return memory that was freed, and that the C library keeps for itself, to the operating system.

    glibc keeps freed memory in its arenas: without this call, a process stays as large as it was although a
    model is gone. With other C libraries, it does nothing.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return glibc's ``malloc_trim``; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

"""The memory of a process: what it gives back to the system, and whether it is exhausted."""

from __future__ import annotations

import ctypes
import errno
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ...reports import human_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Reset the peak, where the system supports it (Linux; proc_pid_clear_refs(5))."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def peak_memory() -> int | None:
    """Return the peak resident memory in bytes; None where the system does not report it (Windows)."""
    if _STATUS.exists():
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
        return 1024 * int(found[1]) if found else None
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


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


def memory_exhausted(error: Exception) -> str:
    """What an error of too little memory means, and what to do; "" for any other error."""
    text = str(error)
    if isinstance(error, ImportError) and ("map segment" in text or "allocate memory" in text):
        reason = "a library cannot be loaded, since the memory of this process is exhausted"
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        reason = "the memory of this process is exhausted"
    else:
        return ""
    limit = _address_limit()
    advice = "end other programs, or take a smaller or quantized model"
    if limit is not None:
        advice = f"it may map {human_bytes(limit)}: raise that, such as with 'ulimit -v unlimited'"
    return f"{reason}{': ' if text else ''}{text}; {advice}"


def _address_limit() -> int | None:
    """The bytes of addresses that this process may map; None without a limit."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft

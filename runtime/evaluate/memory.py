"""Measure the peak memory of this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

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

"""Runs that a device captures, and sessions that other threads open or free meanwhile.

Nobody may wait for a CUDA device while one of its streams is captured: that call fails, and so does the
capture (CUDA programming guide, "Prohibited and Unhandled Operations" of CUDA graphs). ONNX Runtime waits for
the device when it opens a session, and cuBLAS when its handle is destroyed, with the session.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changed = threading.Condition()
_prohibited = 0  # how many ``no_capture`` are entered
_capturing: int | None = None  # the thread that captures


@contextmanager
def no_capture() -> Iterator[None]:
    """Let no run be captured meanwhile; waits for the end of another thread's capture."""
    global _prohibited
    with _changed:
        # A capturing thread comes here if its garbage collector closes a model.
        _changed.wait_for(lambda: _capturing in (None, threading.get_ident()))
        _prohibited += 1
    try:
        yield
    finally:
        with _changed:
            _prohibited -= 1


@contextmanager
def capture() -> Iterator[bool]:
    """Yield whether a run may be captured; if so, other threads wait in ``no_capture``. Never waits."""
    global _capturing
    with _changed:
        may = not _prohibited and _capturing is None
        if may:
            _capturing = threading.get_ident()
    try:
        yield may
    finally:
        if may:
            with _changed:
                _capturing = None
                _changed.notify_all()

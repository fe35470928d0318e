"""Native code and the end of the process.

A daemon thread that comes back from native code while the interpreter ends is unwound by force, which
aborts the process where C++ or Rust frames are in between. So such threads pass a gate: the end of the
interpreter waits for those inside, for a while, and lets nobody in any more.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading

_PATIENCE = 10.0  # seconds; a run of a device that hangs must not keep the process alive for ever


class Gate:
    """A context around native code, for daemon threads; the interpreter's end waits for all others anyway."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def __enter__(self) -> None:
        if threading.current_thread().daemon:
            with self._changed:
                self._changed.wait_for(lambda: not self._shut)  # for ever, once the process ends
                self._inside += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread().daemon:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Let no daemon thread in any more, and wait for those that are inside."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: not self._inside, _PATIENCE)


def leave_threads(code: int) -> None:
    """End the process now if a daemon thread still loads a model, which nothing can interrupt."""
    if any(thread.name == LOADING and thread.is_alive() for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


LOADING = "carryall-load"  # the name of such a thread
NATIVE = Gate()
atexit.register(NATIVE.shut)
if hasattr(os, "register_at_fork"):  # in the child, threads inside are not there
    os.register_at_fork(after_in_child=NATIVE.__init__)  # type: ignore[misc]

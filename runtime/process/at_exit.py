"""The end of the process, without an abort by daemon threads in native code, and at once.

The interpreter force-unwinds a daemon thread that returns from native code while it shuts down. With C++ or
Rust frames on the stack this aborts the process. So native calls of such threads run inside a gate: at exit
the gate lets no thread in, and waits up to 10 s for those inside.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

_MAX_WAIT = 10.0  # seconds; a device that hangs must not keep the process alive for ever


class _Own(threading.local):
    """Whether the calling thread is a daemon, asked once a thread: a decoded token passes the gate."""

    def __init__(self) -> None:
        self.daemon = threading.current_thread().daemon


class Gate:
    """A context manager around native calls. It affects daemon threads only; others are joined at exit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False
        self._thread = _Own()

    def __enter__(self) -> None:
        if self._thread.daemon:
            with self._changed:
                self._changed.wait_for(lambda: not self._shut)  # never returns once the process ends
                self._inside += 1

    def __exit__(self, *_: object) -> None:
        if self._thread.daemon:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Let no further daemon thread in, and wait for those inside, at most 10 s."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: not self._inside, _MAX_WAIT)


def leave_threads(code: int) -> None:
    """End the process at once if a daemon thread is loading a model, which cannot be interrupted."""
    if any(thread.name == LOADING and thread.is_alive() for thread in threading.enumerate()):
        _end(code)


def leave_objects(code: int) -> None:
    """Let the interpreter, when it ends, call all functions of ``atexit`` and free nothing.

    The system frees the memory of a process at once; a thousand modules and a model take the interpreter 20
    to 40 ms. Profilers and tracers see the ``SystemExit`` of the caller as ever, and threads are joined
    before. Call it last: functions that are registered behind it are called twice.

    Args:
        code: the exit code of the process.
    """

    def leave() -> None:
        atexit.unregister(leave)
        atexit._run_exitfuncs()  # noqa: SLF001 -- of the others; the interpreter itself ends with these
        _end(code)

    atexit.register(leave)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is None if the process started without it
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code)


LOADING = "carryall-load"  # the name of threads that load a model
NATIVE = Gate()
atexit.register(NATIVE.shut)
if hasattr(os, "register_at_fork"):  # the child has none of the parent's threads
    os.register_at_fork(after_in_child=NATIVE.__init__)  # type: ignore[misc]

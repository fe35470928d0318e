"""Locks of files, which the system frees when the process that holds them ends, also after SIGKILL."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems that have none
_HELD = (errno.EACCES, errno.EAGAIN)  # errors if somebody else holds the lock
_PAUSE = 0.05  # seconds between two tries


class FileLock:
    """A lock that this object holds until it is released, or the process ends. See ``lock_of``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        """Free the lock; the file stays."""
        if self._descriptor is not None and sys.platform != "win32":
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a forked process has it open
        self.leave()

    def leave(self) -> None:
        """Close the file: in a forked process, whose parent goes on holding the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


_held = set[FileLock]()


def lock_of(path: Path, seconds: float = 0.0) -> FileLock | None:
    """Return the lock of a file; None if another process or thread holds it.

    Args:
        path: the file, which is created for this user alone if it is missing. It must not be a link.
        seconds: how long to wait for another holder.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks (``WITHOUT_LOCKS``).
    """
    end = time.monotonic() + seconds
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o600)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        while not _try(descriptor, path):
            if time.monotonic() >= end:
                return None
            time.sleep(_PAUSE)
        stack.pop_all()
    return FileLock(descriptor)


def _try(descriptor: int, path: Path) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        error.filename = str(path)
        raise
    return True


def _leave_all() -> None:
    for lock in list(_held):
        lock.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)

"""Temporary folders; those of a killed process are deleted by the next process that makes one beside them.

Beside each folder lies a lock file, which its process holds. The system frees the lock when the process ends,
also after SIGKILL; after a power cut no lock is held. A folder whose lock is free belongs to no process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .writing import hide_scratch, hiding_scratch

if TYPE_CHECKING:
    import filelock

_NAME = "carryall"
_LOCK = ".lock"
_LOCK_NAME = re.compile(rf"\.?{_NAME}\.[0-9a-f]{{8}}\{_LOCK}")
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems that have none
_ABANDONED_SECONDS = 7 * 24 * 3600  # where no lock tells whether the process lives
_TRIES = 10
_ADVICE = "(TMPDIR chooses the folder of temporary files)"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make an empty folder for temporary files, readable by this user only; delete it at the end.

    Raises:
        OSError: it cannot be made, or the block cannot write a file in it; the error names the folder of
            temporary files and the variable that chooses it.
    """
    with ExitStack() as stack:
        parent = None
        try:
            parent = Path(tempfile.gettempdir())
            folder = stack.enter_context(_held(parent, _NAME, 0o700))
        except OSError as error:
            raise _advised(error, parent) from error
        try:
            yield folder
        except OSError as error:
            given = error.filename
            hide_scratch(error, folder, parent)
            if error.filename == given:  # another file
                raise
            raise _advised(error, parent) from error


def _advised(error: OSError, parent: Path | None) -> OSError:
    names = () if parent is None else (str(parent),)
    return OSError(error.errno, f"{error.strerror} {_ADVICE}", *names)


@contextmanager
def folder_beside(out: Path, final: Path) -> Iterator[Path]:
    """Make an empty temporary folder beside ``out``; delete it at the end if it still has its name.

    Args:
        out: the output.
        final: what errors name in place of the temporary folder.

    Raises:
        OSError: it cannot be made.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(_held(out.parent, f".{_NAME}", 0o777))
        except OSError as error:
            error.filename = str(final)
            raise
        with hiding_scratch(folder, final):
            yield folder


def sweep(parent: Path | None = None) -> int:
    """Delete this user's temporary folders whose process has ended, and return their size in bytes.

    Args:
        parent: the folder that holds them; None for the folder of temporary files.
    """
    try:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        locks = [parent / name for name in os.listdir(parent) if _LOCK_NAME.fullmatch(name)]
    except OSError:  # it does not exist, or may not be read
        return 0
    return sum(map(_sweep_one, locks))


@contextmanager
def _held(parent: Path, name: str, mode: int) -> Iterator[Path]:
    """Make a folder and hold its lock."""
    sweep(parent)
    folder, lock = _claim(parent, name)
    try:
        folder.mkdir(mode)
        yield folder
    finally:
        _delete(folder, lock)


def _claim(parent: Path, name: str) -> tuple[Path, filelock.BaseFileLock | None]:
    """Return a new name, and its lock; None on a file system without locks."""
    for _ in range(_TRIES):
        folder = parent / f"{name}.{uuid.uuid4().hex[:8]}"
        try:
            lock = lock_of(_lock_file(folder))
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                with contextlib.suppress(OSError):
                    _lock_file(folder).unlink(missing_ok=True)
                raise
            return folder, None
        if lock is not None and _lock_file(folder).exists():
            return folder, lock
        # Another process swept the lock file before it was locked.
    raise OSError(errno.EAGAIN, "no lock file can be locked", str(parent))


def _lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def lock_of(path: Path) -> filelock.BaseFileLock | None:
    """Return the lock of a file, which is created if missing; None if another process or thread holds it.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    import filelock  # 50 ms, which a command without temporary files does not wait for

    lock = filelock.FileLock(path, timeout=0, mode=0o600, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        return None
    except NotImplementedError as error:
        raise OSError(errno.ENOSYS, str(error), str(path)) from error
    return lock


def _delete(folder: Path, lock: filelock.BaseFileLock | None) -> None:
    """Delete a folder and its lock file. What is left, as on Windows files in use, the next sweep deletes."""
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        lock.release()  # before the file is deleted: Windows does not delete open files
    if not os.path.lexists(folder):
        with contextlib.suppress(OSError):
            _lock_file(folder).unlink(missing_ok=True)


def _sweep_one(path: Path) -> int:
    folder = path.with_name(path.name.removesuffix(_LOCK))
    try:
        if not _is_own(path, stat.S_IFREG) or (os.path.lexists(folder) and not _is_own(folder, stat.S_IFDIR)):
            return 0
        lock = _lock_of_ended(path)
    except (OSError, _InUseError):
        return 0
    try:
        return sum(file.lstat().st_size for file in folder.rglob("*"))
    except OSError:
        return 0
    finally:
        _delete(folder, lock)


class _InUseError(Exception):
    """A process holds the lock, or may do so."""


def _lock_of_ended(path: Path) -> filelock.BaseFileLock | None:
    """Return the lock of a folder without a process; None on a file system without locks.

    Raises:
        _InUseError: the process lives; without locks, that is assumed for a week.
    """
    try:
        lock = lock_of(path)
    except OSError as error:
        if time.time() - path.stat().st_mtime < _ABANDONED_SECONDS:
            raise _InUseError from error
        return None
    if lock is None:
        raise _InUseError
    return lock


def _is_own(path: Path, kind: int) -> bool:
    """Return whether a path is of this user and this kind: ``S_IFREG`` or ``S_IFDIR``, never a link."""
    status = path.lstat()
    return stat.S_IFMT(status.st_mode) == kind and (os.name == "nt" or status.st_uid == os.geteuid())

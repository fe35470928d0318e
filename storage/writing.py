"""Errors of failed writes that name the file and the reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .paths import check_target

_PROBE_BYTES = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError without a file name, and the errno to one without a number.

    ``ndarray.tofile`` raises "N requested and M written" on a full disk, without an error number; a test
    write beside ``path`` finds the number.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            number = _probe(path.parent)
            raise OSError(number, os.strerror(number), str(path)) from error
        if error.filename2 is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # A copy names source and target; only the target's disk can be full.
            raise OSError(error.errno, error.strerror, str(path)) from error
        if error.filename is None:
            error.filename = str(path)
        raise


def hide_scratch(error: OSError, scratch: Path, final: Path) -> None:
    """Replace paths below the temporary folder ``scratch`` in ``error`` by those below ``final``."""
    for field in ("filename", "filename2"):
        name = getattr(error, field)
        if name is not None and Path(os.fsdecode(name)).is_relative_to(scratch):
            setattr(error, field, str(final / Path(os.fsdecode(name)).relative_to(scratch)))


def _probe(folder: Path) -> int:
    """Return the errno of a test write of 1 MiB into ``folder``; EIO if the write succeeds."""
    path = folder / f".probe.{os.getpid()}"
    try:
        with path.open("wb", buffering=0) as file:
            written = 0
            while written < _PROBE_BYTES:
                written += file.write(bytes(_PROBE_BYTES - written))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        path.unlink(missing_ok=True)
    return errno.EIO


def write_whole(path: Path, text: str) -> None:
    """Write a text so that ``path`` is as before, or missing, if that fails; the error names ``path``.

    Raises:
        UsageError: it is a device or another thing that is no regular file.
        OSError: it cannot be written.
    """
    check_target(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            scratch.write_text(text, encoding="utf-8", errors="backslashreplace")
            scratch.replace(path)
    except OSError as error:
        hide_scratch(error, scratch, path)
        raise
    finally:
        scratch.unlink(missing_ok=True)

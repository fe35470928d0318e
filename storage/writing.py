"""Errors of failed writes that name the file and the reason."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .paths import check_target

# Of x86-64 and arm64. From pages of 4096 bytes a core of a virtual machine reads weights at half the rate.
HUGE_PAGE_BYTES = 2 << 20
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
        full_copy = error.filename2 is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full_copy or (
            error.filename is not None and _is_scratch_of(Path(os.fsdecode(error.filename)), path)
        ):
            # A copy names source and target; only the target's disk can be full.
            raise OSError(error.errno, error.strerror, str(path)) from error
        if error.filename is None:
            error.filename = str(path)
        raise


def _is_scratch_of(found: Path, path: Path) -> bool:
    """Return whether a name is that of a temporary file or folder that a library makes beside ``path``."""
    beside = found if found.parent == path.parent else found.parent
    return beside.parent == path.parent and beside.name.startswith(f".{path.name}.")


def hide_scratch(error: OSError, scratch: Path, final: Path) -> None:
    """Replace paths below the temporary folder ``scratch`` in ``error`` by those below ``final``."""
    for field in ("filename", "filename2"):
        name = getattr(error, field)
        if name is None:
            continue
        # A library may name the absolute path.
        found, place = (Path(os.path.realpath(os.fsdecode(path))) for path in (name, scratch))
        if found.is_relative_to(place):
            setattr(error, field, str(final / found.relative_to(place)))


@contextmanager
def hiding_scratch(scratch: Path, final: Path) -> Iterator[None]:
    """Apply ``hide_scratch`` to an OSError of the block."""
    try:
        yield
    except OSError as error:
        hide_scratch(error, scratch, final)
        raise


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


def publish(scratch: Path, final: Path) -> None:
    """Give a finished file or folder its name. Content and name survive a power cut after this returns.

    Raises:
        OSError: the disk does not take the content, or the name.
    """
    inner = [*scratch.rglob("*"), scratch] if scratch.is_dir() else [scratch]
    for path in inner:
        sync(path)
    scratch.replace(final)
    sync(final.absolute().parent)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: the disk does not take them.
    """
    folder = path.is_dir()
    if folder and os.name != "posix":  # other systems cannot sync folders
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(
    tensors: Mapping[str, npt.NDArray[Any]], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written; the error names ``path``.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with writing(path):
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)
        except SafetensorError as error:  # its file is deleted, so a test write finds no reason
            number = re.search(r"\(os error (\d+)\)", str(error)) if os.name == "posix" else None
            if number is None:
                raise OSError(str(error)) from error
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def write_whole(path: Path, content: str | bytes, *, lasting: bool = True) -> None:
    """Write text or bytes so that ``path`` is as before, or missing, if that fails; the error names ``path``.

    Args:
        path: the file.
        content: all of it.
        lasting: wait until it is on the disk, so that it survives a power cut.

    Raises:
        UsageError: it is a device or another thing that is no regular file.
        OSError: it cannot be written.
    """
    check_target(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with hiding_scratch(scratch, path), writing(path):
            if isinstance(content, str):
                content = content.encode(errors="backslashreplace")
            scratch.write_bytes(content)
            if lasting:
                publish(scratch, path)
            else:
                scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)

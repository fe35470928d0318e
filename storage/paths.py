"""Checks that file names of an untrusted model stay inside the model's folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path, PureWindowsPath

from ..errors import UsageError


def stays_inside(name: object) -> bool:
    """Return whether a relative file name stays in its folder on POSIX and Windows; ignores links."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    place = PureWindowsPath(name)  # understands both slashes, and drives
    return not (place.drive or place.root or ".." in place.parts) and bool(place.parts)


def link_stays_inside(path: Path, folder: Path) -> bool:
    """Return whether a file, with links resolved, is in ``folder`` or in the hub cache's blob folder.

    The hub's cache links ``snapshots/REVISION/FILE`` to ``blobs/HASH`` (huggingface_hub, "Understand
    caching").
    """
    own = folder.resolve()
    homes = [own, own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [own]
    target = path.resolve()
    return any(target.is_relative_to(home) for home in homes)


def check_name(path: Path) -> None:
    """Refuse what no file can be called, before any work.

    Raises:
        UsageError: the name holds a null byte, or is longer than the system allows.
    """
    try:
        os.stat(path)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is no file name: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{path} is no file name: {error.strerror}") from error


def check_utf8(path: str | Path) -> None:
    """Refuse a path that is no UTF-8 text, which libraries in C++ cannot open.

    Raises:
        UsageError: it is none.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"onnxruntime opens only paths in UTF-8, and {str(path)!r} is none") from error


def check_target(path: Path) -> None:
    """Refuse a file to be written that a rename would destroy: a device, a pipe, a socket or a folder.

    Raises:
        UsageError: it is one of these, or no file can be called so.
    """
    check_name(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file; name a file to write, which is made or replaced")

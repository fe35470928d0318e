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
    place = PureWindowsPath(name)  # parses both slashes, and drives
    return not (place.drive or place.root or ".." in place.parts) and bool(place.parts)


def link_stays_inside(path: Path, folder: Path) -> bool:
    """Return whether a file, with links resolved, is in ``folder`` or in the hub cache's blob folder.

    The hub's cache links ``snapshots/REVISION/FILE`` to ``blobs/HASH`` (huggingface_hub, "Understand
    caching").
    """
    if path.parent == folder and not path.is_symlink():
        return True  # the usual case, asked for every weight
    own = folder.resolve()
    blobs = [place.parent / "blobs" for place in own.parents if place.name == "snapshots"]
    target = path.resolve()
    return any(target.is_relative_to(home) for home in [own, *blobs])


def check_name(path: Path) -> None:
    """Check that a path is a valid file name on this system.

    Raises:
        UsageError: the name has a null byte, or is too long.
    """
    try:
        os.stat(path)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not a valid file name: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{path} is not a valid file name: {error.strerror}") from error


def check_place(out: Path) -> None:
    """Check, before any work, that an output can be created: its name, and the folder above it.

    Raises:
        UsageError: the name is invalid, or the nearest place above that exists is no folder.
        OSError: this user may not write to the nearest folder above that exists.
    """
    check_name(out)
    place = out.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"{out} cannot be created: {place} is not a folder; name a place inside of one")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


def check_utf8(path: str | Path) -> None:
    """Check that a path can be encoded in UTF-8; C++ libraries cannot open other paths.

    Raises:
        UsageError: the path cannot be encoded in UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{str(path)!r} is not UTF-8 text; onnxruntime opens only UTF-8 paths") from error


def check_target(path: Path) -> None:
    """Check that an output path is a regular file or does not exist; a rename would destroy a device or pipe.

    Raises:
        UsageError: it is a device, a pipe, a socket or a folder, or its name is invalid.
    """
    check_name(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; give a file, which is created or replaced")

"""Checks that file names of an untrusted model stay inside the model's folder."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath


def stays_inside(name: object) -> bool:
    """Return whether a relative file name stays in its folder on POSIX and Windows; ignores links."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    place = PureWindowsPath(name)  # understands both slashes, and drives
    return not (place.drive or place.root or ".." in place.parts) and bool(place.parts)


def link_stays_inside(path: Path, folder: Path) -> bool:
    """Return whether a file, with links resolved, lies in ``folder`` or in the hub cache's blob folder.

    The hub's cache links ``snapshots/REVISION/FILE`` to ``blobs/HASH`` (huggingface_hub, "Understand
    caching").
    """
    own = folder.resolve()
    homes = [own, own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [own]
    target = path.resolve()
    return any(target.is_relative_to(home) for home in homes)

"""File names that came with somebody's model, which must not lead out of its folder."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath


def stays_inside(name: object) -> bool:
    """Whether a file name leads to a place in its own folder, on every system, links aside."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    place = PureWindowsPath(name)  # knows both kinds of slashes, and drives
    return not (place.drive or place.root or ".." in place.parts) and bool(place.parts)


def link_stays_inside(path: Path, folder: Path) -> bool:
    """Whether a file, all links followed, lies in ``folder``, or where the hub's cache keeps its content.

    That cache links ``snapshots/REVISION/FILE`` to ``blobs/HASH`` (huggingface_hub, "Understand caching").
    """
    own = folder.resolve()
    homes = [own, own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [own]
    target = path.resolve()
    return any(target.is_relative_to(home) for home in homes)

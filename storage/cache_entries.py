"""List and delete entries of the cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..records import dataclass
from .cache import IN_USE_SECONDS, RECORD, discard, limit_bytes, read_entry, share_of, sweep_deleted
from .hashes import forget_missing_folders
from .remembered import FACTS
from .root import cache_root, unusable
from .scratch import sweep

# Folders of the cache that hold entries; other files in the cache folder are left alone.
KINDS = (
    "packages",
    "gguf",
    "lowered",
    FACTS,
    "fastest",
    "calibration",
    "layers",
    "ctranslate2",
    "openvino",
    "tensorrt",
    "shipped",
    "vision",
)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One entry of the cache.

    Args:
        kind: one of ``KINDS``.
        path: its folder or file.
        size: bytes on the disk; a file that entries have in common is divided among them.
        used: when it was last made or used, in seconds since 1970.
        about: its description, such as ``model`` and ``provider``; empty if there is none.
    """

    kind: str
    path: Path
    size: int
    used: float
    about: Mapping[str, Any]


def cache_entries() -> list[CacheEntry]:
    """Return all entries, the most recently used first.

    Raises:
        UsageError: the cache is not a folder, or cannot be read.
    """
    root = cache_root()
    try:
        if root.exists() and not root.is_dir():
            raise NotADirectoryError
        found = [entry for kind in KINDS for entry in _entries(kind, root / kind)]
    except OSError as error:
        raise unusable(error) from error
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def remove_entries(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Delete entries, and the stored hashes of folders that no longer exist.

    On POSIX systems, processes that have an entry's files open can go on; on Windows such an entry stays.

    Returns:
        The entries that were deleted.
    """
    for entry in entries:
        discard(entry.path)
    forget_missing_folders()
    return [entry for entry in entries if not entry.path.exists()]


def sweep_temporary() -> int:
    """Delete what killed processes left in the cache and in the folder of temporary files.

    Returns:
        The size of the temporary folders in bytes.
    """
    folders = [cache_root() / kind for kind in KINDS]
    for folder in folders:
        sweep_deleted(folder)
    return sum(map(sweep, [None, *folders]))


def prune(max_bytes: float | None = None, max_age: float | None = None) -> list[CacheEntry]:
    """Delete old entries, and the least recently used ones above a size; those used in the last hour stay.

    Args:
        max_bytes: maximum size of all entries; if ``max_age`` is None too, ``CARRYALL_CACHE_GB`` (32 GB).
        max_age: maximum seconds since an entry was last used.

    Returns:
        The deleted entries.
    """
    if max_bytes is None and max_age is None:
        max_bytes = limit_bytes()
    entries, now = cache_entries(), time.time()
    excess = sum(entry.size for entry in entries) - (float("inf") if max_bytes is None else max_bytes)
    doomed = []
    for entry in reversed(entries):
        age = now - entry.used
        if age >= IN_USE_SECONDS and (excess > 0 or (max_age is not None and age > max_age)):
            doomed.append(entry)
            excess -= entry.size
    return remove_entries(doomed)


def _entries(kind: str, folder: Path) -> Iterator[CacheEntry]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        # A folder of folders without a record holds entries itself, such as tensorrt/engines/KEY.
        if path.is_dir() and not (path / RECORD).exists() and any(child.is_dir() for child in path.iterdir()):
            yield from _entries(kind, path)
        elif not path.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                yield _entry(kind, path)


def _entry(kind: str, path: Path) -> CacheEntry:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    stats = [file.stat() for file in files]
    record = path / RECORD
    used = record.stat().st_mtime if record.is_file() else max([0.0, *(stat.st_mtime for stat in stats)])
    about: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        about = read_entry(path)["about"]
    return CacheEntry(kind, path, sum(map(share_of, files)), used, about)

"""Copies of files, and files with another time, are known by the content that was read before.

Files whose samples are as those of others are summed up whole, at 8 GB/s from memory, and compared by these
sums. Files that are like no others are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from .cache import cache_key
from .file_identity import Identity
from .hashes import FolderHashes
from .remembered import recalled, remembered


def known_key(identity: Identity, paths: Sequence[Path]) -> str:
    """Return the key of files: that of files of the same content if there were any, else their own identity.

    Args:
        identity: of the files.
        paths: the files, which are read whole only if others are like them.

    Raises:
        OSError: a file cannot be read.
    """
    same = recalled(cache_key(same_as=identity.own))
    if same is not None:
        return str(same["key"])
    like = recalled(cache_key(like=identity.likeness))
    if like is None or like["key"] == identity.own:
        return identity.own
    if like["content"] != joint_content([_sums(path) for path in paths]):
        return identity.own
    return str(remembered(cache_key(same_as=identity.own), lambda: {"key": like["key"]})["key"])


def learn_content(identity: Identity, content: str) -> None:
    """Keep the content of files under their own identity, for others that will be like them.

    Args:
        identity: of the files.
        content: see ``joint_content``.
    """
    remembered(cache_key(like=identity.likeness), lambda: {"content": content, "key": identity.own})


def joint_content(sums: Sequence[str]) -> str:
    """Return a hash of the digests of the sums of pages of several files."""
    return hashlib.sha256(repr(list(sums)).encode()).hexdigest()


def _sums(path: Path) -> str:
    with FolderHashes(path.parent) as hashes:
        return hashes.sums(path.name)

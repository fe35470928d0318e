"""The cache folder. Everything in it can be deleted and is made again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import platformdirs

from ..errors import UsageError

CACHE_VARIABLE = "CARRYALL_CACHE"


def cache_root() -> Path:
    """Return the folder of ``CARRYALL_CACHE``, or the user's cache folder.

    On Linux that is ``$XDG_CACHE_HOME/carryall``, by default ``~/.cache/carryall``.
    """
    stated = os.environ.get(CACHE_VARIABLE)
    return Path(stated) if stated else Path(platformdirs.user_cache_dir("carryall", appauthor=False))


def unusable(error: OSError) -> UsageError:
    """Return the error for a cache folder that cannot be used; it names the environment variable to set."""
    root = cache_root()
    stated = f"{CACHE_VARIABLE}={root}" if os.environ.get(CACHE_VARIABLE) else f"the cache folder {root}"
    no_folder = os.path.exists(root) and not os.path.isdir(root)  # pathlib's raise for too long names
    reason = os.strerror(errno.ENOTDIR) if no_folder else error.strerror or str(error)
    if isinstance(error.filename, str) and error.filename in {str(root), *map(str, root.parents)}:
        reason = reason if os.path.exists(error.filename) else f"{error.filename} cannot be made: {reason}"
    return UsageError(f"{stated} cannot be used: {reason}; set {CACHE_VARIABLE} to a folder you can write to")

"""Installed distributions, by the folders that installers write beside packages.

``importlib.metadata`` finds more forms of them, but importing it takes 13 ms of processor time, which every
command would spend before it answers.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

_SUFFIX = ".dist-info"
_SEPARATORS = re.compile(r"[-_.]+")  # which names may differ in (PEP 503)


def distribution_folder(name: str) -> Path | None:
    """Return the ``.dist-info`` folder of a distribution (PEP 376), the first on ``sys.path``, or None."""
    wanted = _normalized(name)
    for folder in sys.path:
        try:
            names = _names(folder or ".", os.stat(folder or ".").st_mtime_ns)
        except OSError:  # missing, or an archive
            continue
        if wanted in names:
            return Path(folder, names[wanted])
    return None


@functools.lru_cache(maxsize=64)
def _names(folder: str, _changed: int) -> dict[str, str]:
    """Return the entries of distributions by their normalized names; a folder is read again if it changed."""
    entries = [entry for entry in os.listdir(folder) if entry.endswith(_SUFFIX)]
    return {_normalized(entry.partition("-")[0]): entry for entry in reversed(entries)}


def distribution_version(folder: Path) -> str:
    """Return the version that the name of a ``.dist-info`` folder states."""
    return folder.name.removesuffix(_SUFFIX).partition("-")[2]


def _normalized(name: str) -> str:
    return _SEPARATORS.sub("-", name).lower()

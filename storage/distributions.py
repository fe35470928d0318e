"""Installed distributions, by the folders that installers write beside packages.

``importlib.metadata`` finds more forms of them, but importing it takes 13 ms of processor time, which every
command would spend before it answers.
"""

from __future__ import annotations

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
            entries = os.listdir(folder or ".")
        except OSError:  # missing, or an archive
            continue
        for entry in entries:
            if entry.endswith(_SUFFIX) and _normalized(entry.partition("-")[0]) == wanted:
                return Path(folder, entry)
    return None


def distribution_version(folder: Path) -> str:
    """Return the version that the name of a ``.dist-info`` folder states."""
    return folder.name.removesuffix(_SUFFIX).partition("-")[2]


def _normalized(name: str) -> str:
    return _SEPARATORS.sub("-", name).lower()

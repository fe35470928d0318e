"""Small JSON objects that are computed once and kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .cache import cache_key, cached_folder
from .root import cache_root
from .writing import write_whole

Arrays = Mapping[str, npt.NDArray[Any]]
_FILE = "measured.npz"


def cached_arrays(facts: Mapping[str, Any], measure: Callable[[], Arrays]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays measured for ``facts``, from the cache if possible.

    Args:
        facts: everything except the code that the result depends on: model, text, settings.
        measure: called if there is no cached result.
    """

    def build(folder: Path) -> None:
        arrays: dict[str, Any] = dict(measure())
        np.savez_compressed(folder / _FILE, **arrays)

    with np.load(cached_folder("calibration", cache_key(**facts), build) / _FILE) as stored:
        return {name: stored[name] for name in stored.files}


FACTS = "facts"  # the folder in the cache


def remembered(key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object that ``compute`` returned for this key before; compute it if it is not known.

    A file holds the object with its key and its sha256, so what is damaged or misplaced is computed again. If
    the cache cannot be written, every process computes for itself.

    Args:
        key: see ``cache_key``; it must contain everything that the result depends on.
        compute: returns the object.
    """
    known = recalled(key)
    if known is None:
        known, path = compute(), _path(key)
        content = json.dumps({"facts": known, "sha256": _digest(key, known)}, indent=1)
        with contextlib.suppress(OSError, UsageError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content, lasting=False)  # what a power cut damages is computed again
    return known


def recalled(key: str) -> dict[str, Any] | None:
    """Return the JSON object that ``remembered`` keeps for this key, None if there is none."""
    return _read(_path(key), key)


def _path(key: str) -> Path:
    return cache_root() / FACTS / f"{key}.json"


def _read(path: Path, key: str) -> dict[str, Any] | None:
    """Return the object of a file, None if it is missing or damaged."""
    if not path.is_file():  # reading a pipe would block
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known, digest = content["facts"], content["sha256"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if digest != _digest(key, known) or not isinstance(known, dict):
        return None
    with contextlib.suppress(OSError):  # a cache that cannot be written
        os.utime(path)  # ``carryall cache prune`` deletes what was not used
    return known


def _digest(key: str, known: object) -> str:
    return hashlib.sha256(json.dumps([key, known], sort_keys=True).encode()).hexdigest()

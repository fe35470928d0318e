"""Cache arrays that were measured on a model and a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .cache import cache_key, cached_folder

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

"""What was measured on a model and a text, kept in the cache for the next time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..models.cache import cache_key, cached_folder

Arrays = Mapping[str, npt.NDArray[Any]]
_FILE = "measured.npz"


def cached_arrays(facts: Mapping[str, Any], measure: Callable[[], Arrays]) -> dict[str, npt.NDArray[Any]]:
    """The arrays measured for ``facts``, now or earlier.

    Args:
        facts: all that the result depends on but the code: model, text, settings.
        measure: called if there is no result yet.
    """

    def build(folder: Path) -> None:
        arrays: dict[str, Any] = dict(measure())
        np.savez_compressed(folder / _FILE, **arrays)

    with np.load(cached_folder("calibration", cache_key(**facts), build) / _FILE) as stored:
        return {name: stored[name] for name in stored.files}

"""Store values between two stages of a calibration, in memory up to a limit, else in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ....storage.writing import writing
from ...graph.lazy import Array

Values = dict[str, Array]


class Waiting:
    """Stores the values of every window, for one or two versions of the model.

    Args:
        folder: an empty folder for values that exceed ``max_bytes``.
        max_bytes: limit of the values in memory.
        every: of so many windows, one has both versions, the others the second.

    Attributes:
        versions: number of versions of the model; a missing second one is a copy of the first.
    """

    def __init__(self, folder: Path, max_bytes: int, every: int = 1) -> None:
        self.versions = 1
        self._every = every
        self._folder = folder
        self._left = max_bytes
        self._held: dict[int, list[Values]] = {}
        self._names: dict[int, list[list[str]]] = {}

    def put(self, index: int, results: Sequence[Values]) -> None:
        """Store the values of window ``index``, whose earlier values were taken."""
        size = sum(array.nbytes for values in results for array in values.values())
        if size <= self._left:
            self._left -= size
            self._held[index] = list(results)
            return
        self._names[index] = [list(values) for values in results]
        # NumPy fills a file that was opened for reading too by ``write``, which reports a full disk, other
        # files by ``tofile``, which may lose the last bytes without an error.
        path = self._path(index)
        with writing(path), path.open("w+b") as file:
            for values in results:
                for array in values.values():
                    np.save(file, array)

    def take(self, index: int) -> list[Values]:
        """Return and remove the values of window ``index``, of its last versions; {} for a new window."""
        arrays = self._held.pop(index, None)
        if arrays is not None:
            self._left += sum(array.nbytes for values in arrays for array in values.values())
        elif index in self._names:
            with self._path(index).open("rb") as file:
                arrays = [{name: np.load(file) for name in names} for names in self._names.pop(index)]
        else:
            arrays = [{}]
        versions = self.versions if index % self._every == 0 else 1
        return arrays if len(arrays) == versions else arrays * versions

    def _path(self, index: int) -> Path:
        return self._folder / str(index)

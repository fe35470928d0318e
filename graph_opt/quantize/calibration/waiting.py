"""Store values between two stages of a calibration, in memory up to a limit, else in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ....storage.writing import writing
from ...graph.lazy import Array

Values = dict[str, Array]


class Waiting:
    """Stores the values of every window.

    Args:
        folder: an empty folder for values that exceed ``max_bytes``.
        max_bytes: limit of the values in memory.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._left = max_bytes
        self._held: dict[int, Values] = {}
        self._names: dict[int, list[str]] = {}

    def put(self, index: int, values: Values) -> None:
        """Store the values of window ``index``, whose earlier values were taken."""
        size = sum(array.nbytes for array in values.values())
        if size <= self._left:
            self._left -= size
            self._held[index] = values
            return
        self._names[index] = list(values)
        # NumPy fills a file that was opened for reading too by ``write``, which reports a full disk, other
        # files by ``tofile``, which may lose the last bytes without an error.
        path = self._path(index)
        with writing(path), path.open("w+b") as file:
            for array in values.values():
                np.save(file, array)

    def take(self, index: int) -> Values:
        """Return and remove the values of window ``index``; {} for a new window."""
        values = self._held.pop(index, None)
        if values is not None:
            self._left += sum(array.nbytes for array in values.values())
            return values
        if index not in self._names:
            return {}
        with self._path(index).open("rb") as file:
            return {name: np.load(file) for name in self._names.pop(index)}

    def _path(self, index: int) -> Path:
        return self._folder / str(index)

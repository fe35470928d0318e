"""Files that are read in parts, as long as they stay the same: by size, time and inode, not by their hash.

A file that is mapped into memory and then cut ends the process that reads it (SIGBUS). So its parts are read
by calls, each of which first checks that the name still means the same file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError

_SAMPLES = 64  # of a file, evenly spaced
_SAMPLE_BYTES = 4096
_HEAD_BYTES = 1 << 20  # hashed whole: the header of a model's file, or its first part

Stamp = tuple[int, int, int]


class OpenFile:
    """A file of one size, time and inode.

    Args:
        path: the file. It is opened anew for each call, so that no descriptor stays behind.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.stamp = _stamp(path.stat())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self.stamp[0]

    def read(self, begin: int, count: int) -> npt.NDArray[np.uint8]:
        """Return ``count`` bytes from ``begin`` on, uint8 [count].

        Raises:
            CheckpointError: the file cannot be read, or is not the one that was opened first.
        """
        return next(self.read_parts([(begin, count)]))

    def read_parts(self, parts: Iterable[tuple[int, int]]) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield several parts, as ``read``: of each its first byte and its number of bytes.

        Raises:
            CheckpointError: as for ``read``.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                for begin, count in parts:
                    content = np.empty(count, np.uint8)  # a bytearray would be filled with zeros first
                    view, done = content.data, 0
                    self._check(os.fstat(file.fileno()))
                    file.seek(begin)
                    while done < count and (got := file.readinto(view[done:])):
                        done += got
                    self._check(os.fstat(file.fileno()))
                    if done < count:
                        raise CheckpointError(f"{self.path} ends at byte {begin + done}; download it again")
                    yield content
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def _check(self, stat: os.stat_result) -> None:
        if _stamp(stat) != self.stamp:
            raise CheckpointError(f"{self.path} was replaced or changed while it was read; try again")


def identity_of(paths: Sequence[Path]) -> str:
    """Return a hash that tells files apart without reading them whole.

    It is made of their sizes, modification times and inodes, of their first megabyte, and of samples of 4 KB.
    So a file that is renamed, or has several names by links, stays the same.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        file = OpenFile(path)
        digest.update(repr(file.stamp).encode())
        parts = [(0, min(file.size, _HEAD_BYTES))]
        if file.size > _HEAD_BYTES:
            rest = file.size - _SAMPLE_BYTES
            parts += [(rest * number // (_SAMPLES - 1), _SAMPLE_BYTES) for number in range(_SAMPLES)]
        for part in file.read_parts(parts):
            digest.update(part.data)
    return digest.hexdigest()


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino

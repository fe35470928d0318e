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
from ..records import dataclass
from .page_sums import ReadSums

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
        self._sums: ReadSums | None = None

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
                    if self._sums is not None:
                        self._sums.add(begin, content)
                    yield content
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def watch(self) -> None:
        """Sum up what is read from now on, for ``content``: 0.1 s a GB."""
        self._sums = ReadSums(self.size)

    def content(self) -> str | None:
        """Return the digest of the sums of all pages; None unless half of the file was watched.

        Raises:
            CheckpointError: as for ``read``.
        """
        if self._sums is None:
            return None
        missing = self._sums.missing
        if sum(count for _, count in missing) > self.size // 2:
            return None
        return self._sums.digest(self.read_parts(missing))

    def _check(self, stat: os.stat_result) -> None:
        if _stamp(stat) != self.stamp:
            raise CheckpointError(f"{self.path} was replaced or changed while it was read; try again")


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells files apart without reading them whole.

    Args:
        likeness: a hash of their sizes, first megabytes and samples of 4 KB. A copy has the same; so may a
            file of which a part was changed.
        own: a hash of that, and of their modification times and inodes. It stays the same for a file that is
            renamed, or has several names by links.
    """

    likeness: str
    own: str


def identity_of(paths: Sequence[Path]) -> Identity:
    """Return the identity of files.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest, stamps = hashlib.sha256(), []
    for path in paths:
        file = OpenFile(path)
        stamps.append(file.stamp)
        digest.update(repr(file.size).encode())
        parts = [(0, min(file.size, _HEAD_BYTES))]
        if file.size > _HEAD_BYTES:
            rest = file.size - _SAMPLE_BYTES
            parts += [(rest * number // (_SAMPLES - 1), _SAMPLE_BYTES) for number in range(_SAMPLES)]
        for part in file.read_parts(parts):
            digest.update(part.data)
    likeness = digest.hexdigest()
    return Identity(likeness, hashlib.sha256(repr((likeness, stamps)).encode()).hexdigest())


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino

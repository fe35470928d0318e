"""Tensors in POSIX shared memory that a client on the same machine has created."""

from __future__ import annotations

import mmap
import os
import re
import sys
from pathlib import Path

from ....errors import RequestError, UnsupportedTaskError
from ....records import dataclass

_FOLDER = Path("/dev/shm")  # noqa: S108 -- Linux keeps POSIX shared memory objects here
_KEY = re.compile(r"/?(?!\.)[A-Za-z0-9_.-]{1,255}")
_MOST_REGIONS = 1024


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A registered part of a shared memory object; ``offset`` and ``byte_size`` are in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int
    memory: mmap.mmap

    def part(self, offset: int, size: int) -> memoryview:
        """Return ``size`` bytes of the region, starting at ``offset``.

        Raises:
            RequestError: the range exceeds the region.
        """
        if offset < 0 or size < 0 or offset + size > self.byte_size:
            raise RequestError(
                f"bytes {offset} to {offset + size} exceed shared memory region '{self.name}', "
                f"which has {self.byte_size} bytes"
            )
        start = self.offset + offset
        return memoryview(self.memory)[start : start + size]


class SharedMemory:
    """The registered regions by name.

    Args:
        allowed: whether clients may register regions. If so, every client can read and write all shared
            memory objects of the server's user.
    """

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._regions: dict[str, SharedRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a part of a shared memory object.

        Raises:
            UnsupportedTaskError: shared memory is not allowed, or the system is not Linux.
            RequestError: the object does not exist or is too small, the name is empty or in use, or the
                maximum number of regions is reached.
        """
        if not self._allowed:
            raise UnsupportedTaskError("shared memory is off; start the server with --shared-memory")
        if not sys.platform.startswith("linux"):
            raise UnsupportedTaskError("shared memory works on Linux only")
        if not name or name in self._regions:
            raise RequestError(f"the region name '{name}' is empty or already registered")
        if len(self._regions) >= _MOST_REGIONS:
            raise RequestError(
                f"the maximum of {_MOST_REGIONS} shared memory regions is reached; unregister some"
            )
        if not _KEY.fullmatch(key):
            raise RequestError(f"'{key[:80]}' is not a valid name of a shared memory object")
        self._regions[name] = SharedRegion(name, key, offset, byte_size, _mapped(key, offset + byte_size))

    def unregister(self, name: str) -> None:
        """Unregister a region; an empty name unregisters all. An unknown name is ignored."""
        for known in [name] if name else list(self._regions):
            self._regions.pop(known, None)

    def regions(self, name: str = "") -> list[SharedRegion]:
        """Return the region with this name as a list; an empty name returns all regions.

        Raises:
            RequestError: no region has this name.
        """
        return [self.region(name)] if name else list(self._regions.values())

    def region(self, name: str) -> SharedRegion:
        """Return the region with this name.

        Raises:
            RequestError: no region has this name.
        """
        if name not in self._regions:
            raise RequestError(f"no shared memory region '{name}' is registered; register it first")
        return self._regions[name]


def _mapped(key: str, size: int) -> mmap.mmap:
    try:
        file = os.open(_FOLDER / key.removeprefix("/"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RequestError(f"cannot open the shared memory object '{key}': {error.strerror}") from error
    try:
        there = os.fstat(file).st_size
        if not 0 < size <= there:
            raise RequestError(f"the shared memory object '{key}' has {there} bytes, not {size}")
        return mmap.mmap(file, 0)
    finally:
        os.close(file)

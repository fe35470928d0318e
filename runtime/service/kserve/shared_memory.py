"""Tensors in POSIX shared memory that a client of the same machine has made."""

from __future__ import annotations

import mmap
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ....errors import RequestError, UnsupportedTaskError

_FOLDER = Path("/dev/shm")  # noqa: S108 -- where Linux shows shared memory objects
_KEY = re.compile(r"/?(?!\.)[A-Za-z0-9_.-]{1,255}")
_MOST_REGIONS = 1024


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a shared memory object."""

    name: str
    key: str
    offset: int
    byte_size: int
    memory: mmap.mmap

    def part(self, offset: int, size: int) -> memoryview:
        """Some of its bytes.

        Raises:
            RequestError: they reach beyond its end.
        """
        if offset < 0 or size < 0 or offset + size > self.byte_size:
            raise RequestError(
                f"bytes {offset} to {offset + size} reach beyond shared memory region '{self.name}', "
                f"which has {self.byte_size}"
            )
        start = self.offset + offset
        return memoryview(self.memory)[start : start + size]


class SharedMemory:
    """Registered regions by name.

    Args:
        allowed: whether regions may be registered. Any client can then read and write the shared memory
            objects that the server's user can.
    """

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a part of a shared memory object.

        Raises:
            UnsupportedTaskError: this is not allowed, or this system has none.
            RequestError: there is no such object, it is smaller, or the name is taken.
        """
        if not self._allowed:
            raise UnsupportedTaskError("shared memory is turned off; start the server with --shared-memory")
        if not sys.platform.startswith("linux"):
            raise UnsupportedTaskError("shared memory is offered on Linux only")
        if not name or name in self._regions:
            raise RequestError(f"shared memory region '{name}' is registered already, or has no name")
        if len(self._regions) >= _MOST_REGIONS:
            raise RequestError(f"there are {_MOST_REGIONS} shared memory regions already; unregister some")
        if not _KEY.fullmatch(key):
            raise RequestError(f"'{key[:80]}' is no name of a shared memory object")
        self._regions[name] = Region(name, key, offset, byte_size, _mapped(key, offset + byte_size))

    def unregister(self, name: str) -> None:
        """Forget a region; an empty name forgets all. Nothing happens if it is not registered."""
        for known in [name] if name else list(self._regions):
            self._regions.pop(known, None)

    def regions(self, name: str = "") -> list[Region]:
        """The region of a name, or all.

        Raises:
            RequestError: there is none of that name.
        """
        return [self.region(name)] if name else list(self._regions.values())

    def region(self, name: str) -> Region:
        """The region of a name.

        Raises:
            RequestError: there is none.
        """
        if name not in self._regions:
            raise RequestError(f"there is no shared memory region '{name}'; register it first")
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

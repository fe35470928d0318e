"""Sums of the pages of a file, which tell damage at the speed of memory.

The sum of a page is that of ``word[i] * FACTOR ** i`` modulo 2 ** 64, over its words of 8 bytes: a hash by a
polynomial. So the sum of a page is also the sum of those of its parts, with zeros in place of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that each change of one word changes the sum of its page
Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]


def sums_of(pages: Bytes) -> Sums:
    """Return the sums of whole pages, uint64 [pages], of their bytes."""
    words = pages.view("<u8").reshape(-1, PAGE_BYTES // 8)
    sums: Sums = words @ _factors()
    return sums


@cache
def _factors() -> Sums:
    return np.cumprod(np.full(PAGE_BYTES // 8, _FACTOR, np.uint64), dtype=np.uint64)


def digest_of(sums: Sums) -> str:
    """Return the sha256 of the sums of all pages, in hexadecimal."""
    return hashlib.sha256(sums.astype("<u8", copy=False).tobytes()).hexdigest()


class PageSums:
    """The sums of a file from what is written to it, in any order and by any threads; gaps are zeros."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Sums]] = []
        self._whole = True

    def add(self, begin: int, content: memoryview) -> None:
        """Take part of the content, from byte ``begin`` of the file on; no other part may overlap it."""
        data = np.frombuffer(content, np.uint8)
        head = min(-begin % PAGE_BYTES, len(data))
        middle = (len(data) - head) // PAGE_BYTES * PAGE_BYTES
        for first, end in ((0, head), (head, head + middle), (head + middle, len(data))):
            if first < end:
                page, before = divmod(begin + first, PAGE_BYTES)
                self._parts.append((page, sums_of(_padded(data[first:end], before))))

    def give_up(self) -> None:
        """Tell that something else writes to the file too."""
        self._whole = False

    def digest(self, size: int) -> str | None:
        """Return the ``digest_of`` a file of ``size`` bytes; None if not all of it was added."""
        if not self._whole:
            return None
        sums = np.zeros(-(-size // PAGE_BYTES), np.uint64)
        for page, part in self._parts:
            sums[page : page + len(part)] += part
        return digest_of(sums)


class ReadSums:
    """The sums of a file from the parts of it that are read, in any order, by any threads, also repeatedly.

    Args:
        size: the bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums = np.zeros(-(-size // PAGE_BYTES), np.uint64)
        self._known = np.zeros(len(self._sums), np.bool_)

    def add(self, begin: int, content: Bytes) -> None:
        """Take what was read from byte ``begin`` on; only its whole pages count."""
        first, end = -(-begin // PAGE_BYTES), (begin + len(content)) // PAGE_BYTES
        if first < end and not self._known[first:end].all():
            start = first * PAGE_BYTES - begin
            self._sums[first:end] = sums_of(content[start : start + (end - first) * PAGE_BYTES])
            self._known[first:end] = True

    @property
    def missing(self) -> list[tuple[int, int]]:
        """The parts that were not read: of each its first byte and its number of bytes."""
        edges = np.flatnonzero(np.diff(self._known, prepend=True, append=True)) * PAGE_BYTES
        starts, ends = edges[::2].tolist(), np.minimum(edges[1::2], self._size).tolist()
        return [(start, end - start) for start, end in zip(starts, ends, strict=True)]

    def digest(self, rest: Iterable[Bytes]) -> str:
        """Return the ``digest_of`` the file.

        Args:
            rest: the content of the parts that are ``missing``.
        """
        for (begin, _), content in zip(self.missing, rest, strict=True):
            pages = _padded(content, 0)
            first = begin // PAGE_BYTES
            self._sums[first : first + len(pages) // PAGE_BYTES] = sums_of(pages)
        self._known[:] = True
        return digest_of(self._sums)


def _padded(data: Bytes, before: int) -> Bytes:
    """Return whole pages: ``data`` behind ``before`` zeros, and zeros behind it."""
    if not before and len(data) % PAGE_BYTES == 0:
        return data
    pages = np.zeros(-(-(before + len(data)) // PAGE_BYTES) * PAGE_BYTES, np.uint8)
    pages[before : before + len(data)] = data
    return pages

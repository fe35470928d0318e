"""Sums of the pages of a file, which tell damage at the speed of memory.

The sum of a page is that of ``word[i] * FACTOR ** i`` modulo 2 ** 64, over its words of 8 bytes: a hash by a
polynomial. So the sum of a page is also the sum of those of its parts, with zeros in place of the others.
"""

from __future__ import annotations

import hashlib
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


def _padded(data: Bytes, before: int) -> Bytes:
    """Return whole pages: ``data`` behind ``before`` zeros, and zeros behind it."""
    if not before and len(data) % PAGE_BYTES == 0:
        return data
    pages = np.zeros(-(-(before + len(data)) // PAGE_BYTES) * PAGE_BYTES, np.uint8)
    pages[before : before + len(data)] = data
    return pages

"""The shape of a cache, and address space that is reserved for one and takes memory page by page."""

from __future__ import annotations

import mmap
import sys

import numpy as np

from ...errors import ProviderRuntimeError
from ...records import dataclass
from ...storage.writing import HUGE_PAGE_BYTES

# The Linux value, for Python builds that do not export it; other systems commit lazily without the flag.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of one layer's keys or values, without the slot axis and the length axis.

    Args:
        heads: number of KV heads.
        width: elements per head and token: the head size, or less if an element packs several values.
        dtype: NumPy dtype of an element.
        window: the sliding window in tokens, including the token itself; None is no window.
    """

    heads: int
    width: int
    dtype: np.dtype[np.generic]
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this buffer."""
        return self.heads * self.width * self.dtype.itemsize


def reserve(name: str, size: int, piece: int = 1) -> mmap.mmap:
    """Map memory that is committed page by page, by the first write, so that unused context costs nothing.

    Windows counts the whole mapping against its commit limit.

    Args:
        name: of what is kept in it.
        size: bytes.
        piece: bytes that are written together. From a quarter of a huge page on, Linux gives huge pages, from
            which a core reads faster; for less, those of the first tokens would take gigabytes.

    Raises:
        ProviderRuntimeError: the address space cannot be reserved.
    """
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows: backed by the page file, allocated on first write
            return mmap.mmap(-1, size)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise ProviderRuntimeError(
            f"cannot reserve {size / 2**30:.1f} GiB of address space for KV buffer '{name}': {error}. "
            "Lower max_slots or context_length."
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE if 4 * piece >= HUGE_PAGE_BYTES else mmap.MADV_NOHUGEPAGE)
    return memory

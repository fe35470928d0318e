"""KV buffers for slots in reserved address space, paged by the operating system.

A buffer [slots, kv_heads, length, head_dim] is mapped without committing memory. A page takes memory from its
first write until ``release`` frees it, so unused context costs nothing, and kernels see one contiguous
tensor. Windows counts the whole mapping against its commit limit: there ``max_slots`` times
``context_length`` must fit.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ..base import KVEviction
from .kv_selection import chosen_rows

# Bytes of each slot that ``release`` keeps: for short texts, freeing pages and faulting them in again takes
# longer than the model's own work.
KEPT_BYTES = 2**20
# The Linux value, for Python builds that do not export it; other systems commit lazily without the flag.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# On macOS MADV_DONTNEED does not free anonymous pages; Windows has neither.
_GIVE_BACK: int | None = getattr(mmap, "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE", None)


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


def padded_length(length: int, specs: Mapping[str, KVSpec]) -> int:
    """Return the smallest length >= ``length`` at which all slots start on page boundaries."""
    step = 1
    for spec in specs.values():
        step = math.lcm(step, mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, spec.bytes_per_token))
    return -(-length // step) * step


class KVMemory:
    """The KV buffers of one model, [slots, heads, length, width] each, addressed by slot.

    Args:
        specs: the shape of each buffer, by name.
        slots: number of slots.
        length: positions per slot; rounded up so that slots start on page boundaries.

    Raises:
        ProviderRuntimeError: the address space cannot be reserved.
    """

    def __init__(self, specs: Mapping[str, KVSpec], slots: int, length: int) -> None:
        self.length = padded_length(length, specs)
        self._stride = {name: self.length * spec.bytes_per_token for name, spec in specs.items()}
        self._windows = {name: spec.window for name, spec in specs.items() if spec.window}
        self._kept = _kept_positions(specs)
        self._gone: dict[tuple[str, int], int] = {}  # buffer and slot -> positions before this are freed
        self._maps: dict[str, mmap.mmap] = {}
        self.buffers: dict[str, npt.NDArray[np.generic]] = {}
        for name, spec in specs.items():
            self._maps[name] = reserve(name, slots * self._stride[name])
            flat = np.frombuffer(self._maps[name], spec.dtype)
            self.buffers[name] = flat.reshape(slots, spec.heads, self.length, spec.width)

    @property
    def gives_back(self) -> bool:
        """Whether ``release`` frees memory; without madvise (Windows) the memory is kept for reuse."""
        return _GIVE_BACK is not None

    def held_bytes(self, lengths: npt.NDArray[np.int32]) -> int:
        """Return the bytes of the first ``lengths[slot]`` positions of every slot, without trimmed ones."""
        per_token = {name: stride // self.length for name, stride in self._stride.items()}
        gone = sum(
            per_token[name] * min(count, int(lengths[slot]))
            for (name, slot), count in list(self._gone.items())
        )
        return sum(per_token.values()) * int(lengths.sum()) - gone

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy positions [0, length) of every buffer from slot ``source`` to slot ``target``."""
        for name, buffer in self.buffers.items():
            gone = self._gone.get((name, source), 0)
            buffer[target, :, gone:length] = buffer[source, :, gone:length]
            self._gone.pop((name, target), None)
            if gone:
                self._gone[name, target] = gone

    def read(self, slot: int, start: int, length: int) -> list[npt.NDArray[np.generic]]:
        """Return views [heads, length, width] of positions [start, start + length), one per buffer."""
        return [buffer[slot, :, start : start + length] for buffer in self.buffers.values()]

    def write(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[np.generic]]) -> None:
        """Write the result of ``read`` to positions [start, start + length)."""
        for buffer, part in zip(self.buffers.values(), parts, strict=True):
            buffer[slot, :, start : start + length] = part

    def evict_kv(self, slot: int, held: int, eviction: KVEviction) -> None:
        """Move the ``eviction.kept`` most important of the slot's ``held`` rows to its start.

        Layers with a sliding window keep the last rows, since they attend to no others.
        """
        best_end, recent = eviction.kept - eviction.recent, slice(held - eviction.recent, held)
        for keys, values in _pairs(self.buffers):
            own = self.buffers[keys][slot, :, :held]
            chosen = chosen_rows(own, eviction, windowed=keys in self._windows)
            for name in (keys, values):
                rows = self.buffers[name][slot]
                rows[:, eviction.sinks : best_end] = np.take_along_axis(rows, chosen[..., None], axis=1)
                rows[:, best_end : eviction.kept] = rows[:, recent]
                self._gone.pop((name, slot), None)
                # Keep twice the rows that stay: pages freed nearer would be written again soon.
                self._give_back(name, slot, 2 * eviction.kept, held)

    def release(self, slot: int) -> None:
        """Free the slot's pages except ``KEPT_BYTES``, if ``gives_back``; its content is lost."""
        self._gone = {key: gone for key, gone in self._gone.items() if key[1] != slot}
        if _GIVE_BACK is None:
            return
        for name, memory in self._maps.items():
            if self._kept:
                self._give_back(name, slot, self._kept, self.length)
            else:  # one call instead of one for each head
                memory.madvise(_GIVE_BACK, slot * self._stride[name], self._stride[name])

    def trim(self, slot: int, length: int) -> None:
        """Free whole pages of positions that no token from ``length`` on attends to."""
        for name, window in self._windows.items():
            gone = length + 1 - window
            if gone > self._gone.get((name, slot), 0):
                self._give_back(name, slot, 0, gone)
                self._gone[name, slot] = gone

    def close(self) -> None:
        """Drop the buffers; their address space is unmapped with the last view."""
        self.buffers.clear()
        self._maps.clear()

    def _give_back(self, name: str, slot: int, start: int, stop: int) -> None:
        """Free the whole pages of rows [start, stop) of all heads, if madvise is available."""
        if _GIVE_BACK is None:
            return
        buffer = self.buffers[name]
        head, token = buffer.strides[1], buffer.strides[2]
        for begin in range(slot * buffer.strides[0], (slot + 1) * buffer.strides[0], head):
            first = -(-(begin + start * token) // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (begin + stop * token - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                self._maps[name].madvise(_GIVE_BACK, first, size)


def _kept_positions(specs: Mapping[str, KVSpec]) -> int:
    """Return how many positions of a slot ``release`` keeps: whole pages of every head."""
    count = KEPT_BYTES // max(1, sum(spec.bytes_per_token for spec in specs.values()))
    step = max((mmap.PAGESIZE * spec.heads // spec.bytes_per_token for spec in specs.values()), default=1)
    return count - count % max(1, step)


def _pairs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of each layer's key and value buffers."""
    for name in names:
        stem, _, kind = name.rpartition("key")
        if stem and not kind:
            yield name, f"{stem}value"


def reserve(name: str, size: int) -> mmap.mmap:
    """Map memory that is committed page by page, by the first write.

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
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # 2 MiB pages for the first token of each head would take gigabytes
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory

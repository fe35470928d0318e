"""The host memory tier: KV chunks of preempted requests and recently evicted prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from ...requests.chunk import Parts, Tier, size_of


class HostTier:
    """Chunks in host memory; the least recently used move to the tier below.

    Args:
        max_bytes: maximum size of all chunks.
        below: the next tier; None drops chunks that do not fit.

    Attributes:
        below: as given.
    """

    def __init__(self, max_bytes: int, below: Tier | None = None) -> None:
        self._max_bytes = max_bytes
        self.below = below
        self.shared = below is not None and below.shared
        self._chunks: dict[bytes, Parts] = {}  # least recently used first
        self.held_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks or (self.below is not None and key in self.below)

    def held(self, keys: Sequence[bytes]) -> int:
        """Return how many first chunks are in this tier or the one below."""
        count = next((i for i, key in enumerate(keys) if key not in self._chunks), len(keys))
        below = self.below
        while count < len(keys) and below is not None and (more := below.held(keys[count:])):
            count += more
            count += next(
                (i for i, key in enumerate(keys[count:]) if key not in self._chunks), len(keys) - count
            )
        return count

    def last_held(self, keys: Sequence[bytes]) -> int:
        """See ``Tier``."""
        count = next((i for i in range(len(keys), 0, -1) if keys[i - 1] in self._chunks), 0)
        return count + (0 if self.below is None else self.below.last_held(keys[count:]))

    def near(self, key: bytes) -> bool:
        """See ``Tier``."""
        return key in self._chunks

    def get(self, key: bytes, ahead: Sequence[bytes] = ()) -> Parts | None:
        """Return a chunk from this tier or the one below, None if neither has it."""
        if key not in self._chunks:
            if self.below is None:
                return None
            return self.below.get(key, [each for each in ahead if each not in self._chunks])
        self._chunks[key] = self._chunks.pop(key)
        return self._chunks[key]

    def put(self, key: bytes, parts: Parts, *, wait: bool = False) -> None:
        """Store a chunk; older ones move to the tier below."""
        if key in self._chunks:
            return
        if self.shared and self.below is not None and key not in self.below:
            self.below.put(key, parts)
        self._chunks[key] = parts
        self.held_bytes += size_of(parts)
        while self.held_bytes > self._max_bytes:
            self._drop(next(iter(self._chunks)), wait=wait)

    def flush(self, seconds: float) -> bool:
        """See ``Tier``."""
        return self.below is None or self.below.flush(seconds)

    def close(self) -> None:
        """Move all chunks to the tier below, and close it."""
        while self._chunks:
            self._drop(next(iter(self._chunks)), wait=True)
        if self.below is not None:
            self.below.close()

    def _drop(self, key: bytes, *, wait: bool) -> None:
        parts = self._chunks.pop(key)
        self.held_bytes -= size_of(parts)
        if self.below is not None and key not in self.below:
            self.below.put(key, parts, wait=wait)

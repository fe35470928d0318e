"""Results that are kept by a key, up to a number of bytes; the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Results by key. Not thread-safe.

    The newest result stays, however large it is.

    Args:
        size: returns the bytes of a result.
        most_bytes: of all results.
    """

    def __init__(self, size: Callable[[Value], int], most_bytes: int) -> None:
        self._size, self.most_bytes = size, most_bytes
        self._values: OrderedDict[bytes, Value] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> Value | None:
        """Return the result of a key, which is the last to go now; None if it is not kept."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: bytes, value: Value) -> None:
        """Keep a result, in place of one of the same key."""
        self._remove(key)
        self._values[key] = value
        self._bytes += self._size(value)
        while self._bytes > self.most_bytes and len(self._values) > 1:
            self._remove(next(iter(self._values)))

    def clear(self) -> None:
        """Forget all results."""
        self._values.clear()
        self._bytes = 0

    def _remove(self, key: bytes) -> None:
        value = self._values.pop(key, None)
        self._bytes -= 0 if value is None else self._size(value)

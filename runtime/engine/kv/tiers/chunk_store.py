"""What the shared tier asks of a store."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from .....errors import UsageError

Content: TypeAlias = bytes | memoryview


class ChunkStore(Protocol):
    """Contents by name. Any method may raise any exception of its client.

    The first four are called by the engine's thread. They raise TimeoutError if they would take longer than
    ``seconds``. The others may take longer, and are called by a thread that writes.

    Attributes:
        read_only: whether ``put`` does nothing.
    """

    read_only: bool

    def held(self, names: Sequence[str], seconds: float) -> int:
        """Return how many first names have a content."""

    def last_held(self, names: Sequence[str], seconds: float) -> int:
        """Return how many names there are up to the last one that has a content; 0 if none has."""

    def read(self, name: str, ahead: Sequence[str], seconds: float) -> Content | None:
        """Return a content, which the next call may overwrite; None if there is none.

        Args:
            name: its name.
            ahead: names that will be read next, in this order; they may be read meanwhile.
            seconds: limit of this call.
        """

    def forget(self) -> None:
        """Drop what was read ahead."""

    def has(self, name: str) -> bool:
        """Whether a name has a content."""

    def put(self, name: str, content: bytes) -> None:
        """Store a content; readers see all of it or nothing."""

    def close(self) -> None:
        """Close connections."""


def names_held(exist: Iterable[bool]) -> int:
    """Return how many first names exist."""
    count = 0
    for each in exist:
        if not each:
            break
        count += 1
    return count


def last_name(exist: Iterable[bool], count: int) -> int:
    """Return the number of the last of ``count`` names that exists, of those told from the last one on."""
    return next((count - i for i, each in enumerate(exist) if each), 0)


def imported(module: str) -> Any:
    """Import a client.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"prefix_cache_url needs {module}; install it: pip install 'carryall[shared-cache]'"
        ) from error

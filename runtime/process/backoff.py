"""Leave a service alone for a while after it has failed."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST, _LONGEST = 1.0, 60.0  # seconds


class Backoff:
    """A pause after each failure: 1 s, then twice as long after each further one, up to 60 s.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause, self._until = 0.0, 0.0

    @property
    def paused(self) -> bool:
        """Whether the service is not to be asked now."""
        return self._clock() < self._until

    def failed(self) -> float:
        """Begin a pause; return its seconds."""
        self._pause = min(_LONGEST, 2 * self._pause or _FIRST)
        self._until = self._clock() + self._pause
        return self._pause

    def succeeded(self) -> None:
        """Let the next pause be the shortest again."""
        self._pause = 0.0

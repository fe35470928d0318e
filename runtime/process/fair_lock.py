"""A lock that threads get in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """First come, first served; ``threading.Lock`` lets a thread that loops over it keep all others out."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._turns: deque[threading.Lock] = deque()
        self._held = False
        self._owner: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self._acquire()
        self._owner = threading.get_ident()

    def _acquire(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._turns.append(turn)
        try:
            turn.acquire()  # released by the holder before us, who leaves the lock held for us
        except BaseException:  # such as KeyboardInterrupt
            self._give_up(turn)
            raise

    def __exit__(self, *_: object) -> None:
        self._owner = None
        with self._mutex:
            self._pass_on()

    def _give_up(self, turn: threading.Lock) -> None:
        with self._mutex:
            if turn in self._turns:
                self._turns.remove(turn)
            else:
                self._pass_on()

    def _pass_on(self) -> None:
        if self._turns:
            self._turns.popleft().release()
        else:
            self._held = False

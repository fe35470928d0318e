"""A lock that is acquired in the order of the requests."""

from __future__ import annotations

import threading
from collections import deque

from ...errors import UsageError


class FairLock:
    """A first-come, first-served lock. With ``threading.Lock``, a thread in a loop can starve the others.

    Raises:
        UsageError: on entry, if the thread holds the lock.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._turns: deque[threading.Lock] = deque()
        self._held = False
        self._owner: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if self.is_ours:
            raise UsageError(
                "a call to a model from within its own step, as by a logits processor, would wait for "
                "itself; call it after the step, or use another model"
            )
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
            turn.acquire()  # the previous holder releases it, and ``_held`` stays True for this thread
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

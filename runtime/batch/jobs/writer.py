"""Commit answers to the journal in groups, in a separate thread."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ...process.faults import raised_in_thread
from .journal import Journal, LineResult, Totals

COMMIT_SECONDS = 1.0
COMMIT_LINES = 1000
_MAX_QUEUED = 2 * COMMIT_LINES
_FULL_QUEUE_SECONDS = 0.1
_RETRY_SECONDS = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")
Tell = Callable[[str, dict[str, object]], None]


def is_full(error: OSError) -> bool:
    """Return whether an error says that the disk or its quota is full."""
    return error.errno in _FULL


class GroupWriter:
    """Commits answers in groups: every ``COMMIT_SECONDS``, and at most ``COMMIT_LINES`` at once.

    After a crash about one second of work is repeated; no committed answer is lost or duplicated.

    Args:
        journal: stores the answers.
        tell: called after every commit, and when the disk is full.
        stop: once set, the writer no longer waits for space on a full disk.
        check: called before each commit; an error that it raises ends the job without that commit.
    """

    def __init__(
        self,
        journal: Journal,
        tell: Tell,
        stop: threading.Event,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.error: BaseException | None = None
        self._journal = journal
        self._tell = tell
        self._stop = stop
        self._check = check
        self._answers: deque[LineResult] = deque()
        self._closing = False
        self._wake = threading.Event()  # not set for each answer: a thread switch costs more than an answer
        self._thread = threading.Thread(target=self._work, name="carryall-batch-writer", daemon=True)
        self._thread.start()

    def put(self, answer: LineResult) -> None:
        """Queue an answer; block while ``_MAX_QUEUED`` are queued.

        Raises:
            OSError: the journal cannot be written.
        """
        while len(self._answers) >= _MAX_QUEUED and self._thread.is_alive():
            self._wake.set()
            self._thread.join(_FULL_QUEUE_SECONDS)
        if self.error is not None:
            raise self.error
        self._answers.append(answer)
        if len(self._answers) >= COMMIT_LINES:
            self._wake.set()

    def close(self) -> None:
        """Commit all queued answers and end the thread.

        Raises:
            OSError: the journal could not be written.
        """
        self._closing = True
        self._wake.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            closing = False
            while not closing:
                enough = self._wake.wait(COMMIT_SECONDS)
                self._wake.clear()
                closing = self._closing  # read first: no answer follows once it is set
                least = 1 if closing or not enough else COMMIT_LINES
                while len(self._answers) >= least:
                    count = min(len(self._answers), COMMIT_LINES)
                    batch = [self._answers.popleft() for _ in range(count)]
                    self._check()
                    self._commit(batch)
        except BaseException as error:  # noqa: BLE001 -- raised again in the thread that waits for it
            self.error = raised_in_thread("writes the journal", error)

    def _commit(self, batch: list[LineResult]) -> None:
        def write() -> Totals:
            self._journal.commit(batch)
            return self._journal.totals()

        totals = while_full(write, self._tell, self._stop)
        self._tell("progress", {"totals": totals, "answers": batch})


def while_full(write: Callable[[], T], tell: Tell, stop: threading.Event) -> T:
    """Call ``write`` again until the disk has space for it. A failed call must leave nothing behind.

    Raises:
        OSError: ``write`` failed for another reason, or ``stop`` was set while the disk was full.
    """
    paused = False
    while True:
        try:
            result = write()
        except OSError as error:
            if not is_full(error) or stop.is_set():
                raise
            if not paused:
                tell("paused", {"reason": f"the disk is full ({error.filename}); free space to continue"})
            paused = True
            stop.wait(_RETRY_SECONDS)
        else:
            if paused:
                tell("resumed", {})
            return result

"""Answers to the journal, several a commit, in a thread of their own."""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .journal import Answer, Journal, Totals

COMMIT_SECONDS = 1.0
COMMIT_LINES = 1000
_RETRY_SECONDS = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")
Tell = Callable[[str, dict[str, object]], None]


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room on the disk."""
    return error.errno in _FULL


class GroupWriter:
    """Commits answers at most ``COMMIT_SECONDS`` after they came, or ``COMMIT_LINES`` at once.

    A crash therefore repeats the work of about a second, and never loses or doubles an answer.

    Args:
        journal: takes them.
        tell: told of every commit, and when the disk is full.
        stop: set to give up waiting for room on a full disk.
        check: called before each commit; what it raises ends the job, with what was answered before.
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
        self._answers: queue.Queue[Answer | None] = queue.Queue(2 * COMMIT_LINES)
        self._thread = threading.Thread(target=self._work, name="carryall-batch-writer", daemon=True)
        self._thread.start()

    def put(self, answer: Answer) -> None:
        """Take an answer; waits while too many are not written yet.

        Raises:
            OSError: the journal cannot be written.
        """
        self._hand_over(answer)

    def close(self) -> None:
        """Write everything.

        Raises:
            OSError: the journal could not be written.
        """
        with contextlib.suppress(OSError) if self.error is not None else contextlib.nullcontext():
            self._hand_over(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _hand_over(self, answer: Answer | None) -> None:
        while True:
            if self.error is not None:
                raise self.error
            if not self._thread.is_alive():
                return
            with contextlib.suppress(queue.Full):
                self._answers.put(answer, timeout=0.1)
                return

    def _work(self) -> None:
        try:
            more = True
            while more:
                batch, more = self._next_batch()
                if batch:
                    self._check()
                    self._commit(batch)
        except BaseException as error:  # noqa: BLE001 -- raised again in the thread that waits for it
            self.error = error

    def _next_batch(self) -> tuple[list[Answer], bool]:
        """Wait for an answer and for those of the next second; False with the last."""
        first = self._answers.get()
        if first is None:
            return [], False
        batch, due = [first], time.monotonic() + COMMIT_SECONDS
        while len(batch) < COMMIT_LINES and (left := due - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                break
            if answer is None:
                return batch, False
            batch.append(answer)
        return batch, True

    def _commit(self, batch: list[Answer]) -> None:
        def write() -> Totals:
            self._journal.commit(batch)
            return self._journal.totals()

        totals = while_full(write, self._tell, self._stop)
        self._tell("progress", {"totals": totals, "answers": batch})


def while_full(write: Callable[[], T], tell: Tell, stop: threading.Event) -> T:
    """Call ``write`` until it finds room on the disk; what a failed call wrote must not count.

    Raises:
        OSError: it fails for another reason, or ``stop`` was set while the disk was full.
    """
    paused = False
    while True:
        try:
            result = write()
        except OSError as error:
            if not is_full(error) or stop.is_set():
                raise
            if not paused:
                tell("paused", {"reason": f"the disk is full ({error.filename}); free some room to go on"})
            paused = True
            stop.wait(_RETRY_SECONDS)
        else:
            if paused:
                tell("resumed", {})
            return result

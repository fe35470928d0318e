"""Distribute lines among workers, which pull lines when they are free and are replaced when they die."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ....errors import ProviderRuntimeError
from ..inputs.lines import BatchLine
from ..jobs.journal import LineResult
from .offline import failed

PIECE_LINES = 32
POLL_SECONDS = 0.1
# Number of lines that the workers of all providers answer, so that the report can compare their answers.
_PROBES = 8
_MAX_ATTEMPTS = 3  # of one line
# Deaths in a row of one worker and its replacements. More than _MAX_ATTEMPTS, so one line cannot reach it.
_MAX_DEATHS = 5

Give = Callable[[int], list[BatchLine] | None]
Take = Callable[[Sequence[LineResult]], None]


class WorkerLost(Exception):  # noqa: N818 -- an event that the pool handles, not an error
    """A worker died; its lines have no answers yet."""


class Worker(Protocol):
    """The local side of a worker in another process or on another machine."""

    name: str

    def exchange(self, give: Give, take: Take, over: threading.Event) -> None:
        """Get lines with ``give(count)`` and return answers with ``take``, until ``over`` is set.

        ``give`` returns an empty list at the end. It returns None while there are no lines but another worker
        may still die and leave some; then call it again later.

        Raises:
            WorkerLost: the worker died.
            CarryallError: the worker failed with an error that would occur again.
        """

    def close(self) -> None:
        """End the worker."""


class WorkerPool:
    """Answers lines with several workers. A worker that dies is replaced, and its lines run again.

    Args:
        openers: one function for each worker that opens it, called in the worker's thread.
        probes: send the first lines to all workers, to compare their answers.
    """

    def __init__(self, openers: Sequence[Callable[[], Worker]], *, probes: bool = False) -> None:
        self._openers = openers
        self._num_probes = _PROBES if probes else 0
        self._answers: queue.Queue[LineResult | BaseException | None] = queue.Queue()
        self._probed: dict[int, dict[str, bytes]] = {}

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[LineResult]:
        """Yield one answer for each line, as they finish; end early once ``stop`` is set.

        Raises:
            CarryallError, OSError: reading failed, or a worker died too often in a row.
        """
        over = threading.Event()
        share = _Share(lines, self._num_probes, over)
        threads = [
            threading.Thread(target=self._serve, args=(opener, share, over), name="carryall-batch-worker")
            for opener in self._openers
        ]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left and not stop.is_set():
                try:
                    answers = self._answers.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(answers, BaseException):
                    raise answers
                if answers is None:
                    left -= 1
                else:
                    yield answers
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Do nothing: the workers end with the run."""

    def facts(self) -> dict[str, Any]:
        """Return for each worker how many probe lines it answered, and how many equal the first worker's."""
        agreement: dict[str, dict[str, int]] = {}
        for records in self._probed.values():
            reference = next(iter(records.values()))
            for name, record in records.items():
                counts = agreement.setdefault(name, {"lines": 0, "equal": 0})
                counts["lines"] += 1
                counts["equal"] += record == reference
        return {"agreement": agreement} if agreement else {}

    def _serve(self, opener: Callable[[], Worker], share: _Share, over: threading.Event) -> None:
        """Run one worker to the end of the lines; replace it if it dies."""
        deaths, probes = 0, share.probes
        try:
            while not over.is_set():
                assignment = _Assignment(share, probes, self._note)
                try:
                    self._run_worker(opener, assignment, over)
                    break
                except WorkerLost as error:
                    # Only deaths without any answer in between mean that no worker can start.
                    deaths = 1 if assignment.answered else deaths + 1
                    if deaths >= _MAX_DEATHS:
                        raise ProviderRuntimeError(f"{deaths} workers died in a row: {error}") from error
                probes = []
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that yields the answers
            self._answers.put(error)
        else:
            self._answers.put(None)

    def _run_worker(
        self, opener: Callable[[], Worker], assignment: _Assignment, over: threading.Event
    ) -> None:
        """Open a worker and run it until there are no more lines.

        Raises:
            WorkerLost: the worker died; its lines were returned for other workers.
        """
        worker = opener()
        assignment.worker = worker.name
        try:
            worker.exchange(assignment.give, assignment.take, over)
        except WorkerLost:
            assignment.return_lines()
            raise
        finally:
            worker.close()

    def _note(self, answer: LineResult, worker: str, probe: bool, first: bool) -> None:
        if probe:
            self._probed.setdefault(answer.number, {})[worker] = answer.record
        if first:
            self._answers.put(answer)


class _Share:
    """The lines of one run: unread lines, lines that workers have, and lines that dead workers left."""

    def __init__(self, lines: Iterator[BatchLine], probes: int, over: threading.Event) -> None:
        self._lines = lines
        self._over = over
        self._reading = threading.Lock()
        self._turn = threading.Lock()
        self._returned: deque[BatchLine] = deque()
        self._attempts: dict[int, int] = {}
        self._ended = False
        self.probes = list(itertools.islice(lines, probes))
        self._out = {line.number: line for line in self.probes}  # lines that a worker has, without an answer

    def give(self, count: int) -> list[BatchLine] | None:
        """Return up to ``count`` lines; an empty list if all are answered; None if there are none for now.

        A ``count`` of 0 only tells whether all lines are answered.
        """
        if self._over.is_set():
            return []
        if not count:
            with self._turn:
                return [] if self._ended and not self._out else None
        with self._turn:
            if lines := [self._returned.popleft() for _ in range(min(count, len(self._returned)))]:
                return lines
        with self._reading:  # a separate lock: reading may wait for a pipe while answers arrive
            lines = [] if self._ended else list(itertools.islice(self._lines, count))
            self._ended = len(lines) < count
            with self._turn:
                self._out |= {line.number: line for line in lines}
                return lines or ([] if not self._out else None)

    def answered(self, number: int) -> bool:
        """Mark a line as answered; return False if it was answered before."""
        with self._turn:
            return self._out.pop(number, None) is not None

    def return_lines(self, lines: Sequence[BatchLine]) -> list[BatchLine]:
        """Queue the lines of a dead worker again; return those that reached the limit of attempts."""
        given_up: list[BatchLine] = []
        with self._turn:
            for line in lines:
                if line.number not in self._out:
                    continue
                self._attempts[line.number] = self._attempts.get(line.number, 0) + 1
                last_attempt = self._attempts[line.number] >= _MAX_ATTEMPTS
                (given_up if last_attempt else self._returned).append(line)
        return given_up


class _Assignment:
    """The lines that one worker has."""

    def __init__(
        self, share: _Share, probes: Sequence[BatchLine], note: Callable[[LineResult, str, bool, bool], None]
    ) -> None:
        self.worker = ""
        self.answered = 0
        self._share = share
        self._probes = {line.number for line in share.probes}
        self._first_lines = list(probes)
        self._note = note
        self._lines: dict[int, BatchLine] = {}

    def give(self, count: int) -> list[BatchLine] | None:
        found, self._first_lines = self._first_lines or self._share.give(count), []
        self._lines |= {line.number: line for line in found or ()}
        return found

    def take(self, answers: Sequence[LineResult]) -> None:
        for answer in answers:
            self._lines.pop(answer.number, None)
            self.answered += 1
            first = self._share.answered(answer.number)
            self._note(answer, self.worker, answer.number in self._probes, first)

    def return_lines(self) -> None:
        """Return the lines of the dead worker; fail lines that reached the limit of attempts."""
        for line in self._share.return_lines(list(self._lines.values())):
            message = f"{_MAX_ATTEMPTS} workers died while they had this line"
            answer = failed(line, "server_error", message, worker=self.worker)
            self._note(answer, self.worker, False, self._share.answered(line.number))

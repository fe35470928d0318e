"""Lines shared out among workers that pull at their own speed, whatever becomes of the workers."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ....errors import ProviderRuntimeError
from ..inputs.lines import BatchLine
from ..jobs.journal import Answer
from .offline import failed

PIECE_LINES = 32
POLL_SECONDS = 0.1
# Lines that workers on different providers all answer, so that the report can say how far they differ.
_PROBES = 8
_MOST_ATTEMPTS = 3  # of one line
_MOST_DEATHS = 5  # in a row, in one place; more than a deadly line causes before it is given up

Give = Callable[[int], list[BatchLine] | None]
Take = Callable[[Sequence[Answer]], None]


class WorkerLost(Exception):  # noqa: N818 -- what happens to workers is no fault of the program
    """A worker is gone, with the lines that it had."""


class Worker(Protocol):
    """A worker somewhere else, as the thread that serves it sees it."""

    name: str

    def exchange(self, give: Give, take: Take, over: threading.Event) -> None:
        """Work until ``give``, asked for so many lines, returns an empty list, or ``over`` is set.

        It returns None while there are no lines, but others may yet lose some: ask again a little later.

        Raises:
            WorkerLost: the worker ended.
            CarryallError: it failed in a way that no other attempt would change.
        """

    def close(self) -> None:
        """End the worker."""


class WorkerPool:
    """Answers lines with several workers; one that dies is replaced, and its lines are done again.

    Args:
        openers: each opens a worker, in the thread that will serve it.
        probes: whether the first lines go to all workers, to be compared.
    """

    def __init__(self, openers: Sequence[Callable[[], Worker]], *, probes: bool = False) -> None:
        self._openers = openers
        self._num_probes = _PROBES if probes else 0
        self._answers: queue.Queue[Answer | BaseException | None] = queue.Queue()
        self._probed: dict[int, dict[str, bytes]] = {}

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[Answer]:
        """Yield one answer a line, in the order of finishing; end early once ``stop`` is set.

        Raises:
            CarryallError, OSError: reading failed, or no worker can be kept alive.
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
                    found = self._answers.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Nothing is left: workers end with the run."""

    def facts(self) -> dict[str, Any]:
        """Of the lines that all workers answered, how many each answered as the first one did."""
        agreement: dict[str, dict[str, int]] = {}
        for records in self._probed.values():
            reference = next(iter(records.values()))
            for name, record in records.items():
                counts = agreement.setdefault(name, {"lines": 0, "equal": 0})
                counts["lines"] += 1
                counts["equal"] += record == reference
        return {"agreement": agreement} if agreement else {}

    def _serve(self, opener: Callable[[], Worker], share: _Share, over: threading.Event) -> None:
        """Keep one worker busy, and replace it where it dies."""
        deaths, greeting = 0, share.probes
        try:
            while not over.is_set():
                errand = _Errand(share, greeting, self._note)
                try:
                    self._send(opener, errand, over)
                    break
                except WorkerLost as error:
                    # A worker that answered was alive: only deaths in a row mean that none can live.
                    deaths = 1 if errand.answered else deaths + 1
                    if deaths >= _MOST_DEATHS:
                        raise ProviderRuntimeError(f"{deaths} workers died in a row: {error}") from error
                greeting = []
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that yields the answers
            self._answers.put(error)
        else:
            self._answers.put(None)

    def _send(self, opener: Callable[[], Worker], errand: _Errand, over: threading.Event) -> None:
        """Let a new worker work until there is nothing left to do.

        Raises:
            WorkerLost: it died; its lines wait for others.
        """
        worker = opener()
        errand.worker = worker.name
        try:
            worker.exchange(errand.give, errand.take, over)
        except WorkerLost:
            errand.lose()
            raise
        finally:
            worker.close()

    def _note(self, answer: Answer, worker: str, probe: bool, first: bool) -> None:
        if probe:
            self._probed.setdefault(answer.number, {})[worker] = answer.record
        if first:
            self._answers.put(answer)


class _Share:
    """The lines of one run: those to be read, those at workers, those that came back."""

    def __init__(self, lines: Iterator[BatchLine], probes: int, over: threading.Event) -> None:
        self._lines = lines
        self._over = over
        self._reading = threading.Lock()
        self._turn = threading.Lock()
        self._returned: deque[BatchLine] = deque()
        self._attempts: dict[int, int] = {}
        self._ended = False
        self.probes = list(itertools.islice(lines, probes))
        self._out = {line.number: line for line in self.probes}  # at some worker, without an answer

    def give(self, count: int) -> list[BatchLine] | None:
        """Lines for a worker; none once all are answered; None while others may yet lose some.

        Asked for no lines, it only says whether all are answered.
        """
        if self._over.is_set():
            return []
        if not count:
            with self._turn:
                return [] if self._ended and not self._out else None
        with self._turn:
            if found := [self._returned.popleft() for _ in range(min(count, len(self._returned)))]:
                return found
        with self._reading:  # answers are taken meanwhile: reading may have to wait for a pipe
            found = [] if self._ended else list(itertools.islice(self._lines, count))
            self._ended = len(found) < count
            with self._turn:
                self._out |= {line.number: line for line in found}
                return found or ([] if not self._out else None)

    def answered(self, number: int) -> bool:
        """Note an answer; False if the line had one."""
        with self._turn:
            return self._out.pop(number, None) is not None

    def lose(self, lines: Sequence[BatchLine]) -> list[BatchLine]:
        """Take back the lines of a worker that is gone; return those that were lost too often."""
        hopeless: list[BatchLine] = []
        with self._turn:
            for line in lines:
                if line.number not in self._out:
                    continue
                self._attempts[line.number] = self._attempts.get(line.number, 0) + 1
                lost_too_often = self._attempts[line.number] >= _MOST_ATTEMPTS
                (hopeless if lost_too_often else self._returned).append(line)
        return hopeless


class _Errand:
    """The lines that one worker has."""

    def __init__(
        self, share: _Share, greeting: Sequence[BatchLine], note: Callable[[Answer, str, bool, bool], None]
    ) -> None:
        self.worker = ""
        self.answered = 0
        self._share = share
        self._probes = {line.number for line in share.probes}
        self._greeting = list(greeting)
        self._note = note
        self._lines: dict[int, BatchLine] = {}

    def give(self, count: int) -> list[BatchLine] | None:
        found, self._greeting = self._greeting or self._share.give(count), []
        self._lines |= {line.number: line for line in found or ()}
        return found

    def take(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._lines.pop(answer.number, None)
            self.answered += 1
            first = self._share.answered(answer.number)
            self._note(answer, self.worker, answer.number in self._probes, first)

    def lose(self) -> None:
        """The worker died: others do what it had, except for lines that killed several."""
        for line in self._share.lose(list(self._lines.values())):
            message = f"{_MOST_ATTEMPTS} workers died while they had this line"
            answer = failed(line, "server_error", message, worker=self.worker)
            self._note(answer, self.worker, False, self._share.answered(line.number))

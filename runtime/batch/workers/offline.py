"""Answer lines with one engine, for throughput rather than latency.

A thread reads a window of lines ahead of the engine. The window is sorted by tokens, so that prompts with a
common prefix follow each other and share its KV blocks. The calling thread runs the steps.

If the model runs on a device, the reading thread also tokenizes. On the host's cores, it would slow the
products of a step by more than its own time, so the calling thread tokenizes between two steps. Pictures take
longer than steps: the reading thread computes them while others are answered, in short windows.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from ....errors import CarryallError, ProviderRuntimeError, RequestCancelled, RequestError, UsageError
from ....plain_json import plain_json
from ....records import dataclass
from ...engine.engine import Engine
from ...engine.requests.request import Request
from ...engine.requests.request_group import RequestGroup
from ...process.faults import raised_in_thread
from ...process.stop_signals import uninterrupted
from ..inputs.lines import BadLine, BatchLine
from ..jobs.journal import LineResult
from .endpoints import Preparer, Work

# The engine has this many requests per slot, so that a free slot is filled in the next step.
REQUESTS_PER_SLOT = 2
WINDOW_LINES = 512
_FIRST_WINDOW = 32
_WINDOWS_AHEAD = 1
_WINDOW_BYTES = 2**24
_POLL_SECONDS = 0.1
# Ended lines are answered together: right after a step the code of an answer is not in the caches,
# and one answer takes 145 us instead of 60 us.
_ANSWERS = 32
_ANSWER_SECONDS = 0.25
# After this many failed lines in a row, the device has failed and not the lines.
_MAX_FAILURES_IN_ROW = 100


@dataclass(slots=True)
class _Item:
    """A line with its requests and their state."""

    line: BatchLine
    work: Work | None
    fault: UsageError | None = None
    running: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, Sequence[int]]:
        """The sort key in a window: the tokens, so that lines with a common prefix are neighbours."""
        groups = self.work.groups if self.work is not None else ()
        return (1, groups[0].requests[0].prompt_token_ids) if groups else (0, ())


_Window = list[BatchLine] | deque[_Item]
_Windows = queue.Queue[_Window | BaseException | None]


class OfflineEngine:
    """Answers lines with an engine, which it owns and closes.

    Args:
        engine: runs the requests.
        preparer: makes requests from lines.
        worker: the worker name in the answers.
        window: number of lines that are read ahead and sorted.
        sees: whether lines may have pictures: then a window has at most a line for each slot, the first ones
            fewer, so that answers begin early and the states of few pictures are in memory.
    """

    def __init__(
        self,
        engine: Engine,
        preparer: Preparer,
        *,
        worker: str = "",
        window: int = WINDOW_LINES,
        sees: bool = False,
    ) -> None:
        self.engine = engine
        self._preparer = preparer
        self._worker = worker
        self._window = min(window, engine.info.max_slots) if sees else window
        self._first = 1 if sees else _FIRST_WINDOW
        self._prepares_ahead = sees or engine.info.on_device
        self._max_running = engine.info.max_slots * REQUESTS_PER_SLOT
        self._failures = 0

    def facts(self) -> dict[str, Any]:
        """Return no facts."""
        return {}

    def close(self) -> None:
        """Free the model."""
        self.engine.close()
        self._preparer.requests.encoder.close()

    def run(self, lines: Iterator[BatchLine | None], stop: threading.Event) -> Iterator[LineResult]:
        """Yield one answer for each line, as they finish; end early once ``stop`` is set.

        ``lines`` is read in another thread; a None among them ends a window, see ``windows``.

        Raises:
            CarryallError, OSError: reading failed, or the device failed.
        """
        ready: _Windows = queue.Queue(_WINDOWS_AHEAD)
        over = threading.Event()
        thread = threading.Thread(
            target=self._read_ahead,
            args=(lines, ready, stop, over),
            name="carryall-batch-reader",
            daemon=True,
        )
        thread.start()
        try:
            yield from self._work(ready, stop)
        finally:
            over.set()
            thread.join()

    def _read_ahead(
        self,
        lines: Iterator[BatchLine | None],
        ready: _Windows,
        stop: threading.Event,
        over: threading.Event,
    ) -> None:
        def put(item: _Window | BaseException | None) -> bool:
            while not (stop.is_set() or over.is_set()):
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=_POLL_SECONDS)
                    return True
            return False

        try:
            for window in windows(lines, self._window, self._first):
                if not put(self._items(window, stop) if self._prepares_ahead else window):
                    return
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that runs the engine
            put(raised_in_thread("reads the lines", error))
        else:
            put(None)

    def _items(self, window: Sequence[BatchLine], stop: threading.Event) -> deque[_Item]:
        """Prepare and sort a window; end early once ``stop`` is set."""
        items = [self._prepared(line) for line in itertools.takewhile(lambda _: not stop.is_set(), window)]
        return deque(sorted(items, key=lambda item: item.order))

    def _prepared(self, line: BatchLine) -> _Item:
        try:
            return _Item(line, self._preparer.prepare(line))
        except UsageError as error:
            return _Item(line, None, error)

    def _work(self, ready: _Windows, stop: threading.Event) -> Iterator[LineResult]:
        running: dict[str, _Item] = {}
        waiting: deque[_Item] | None = deque()
        ended: list[_Item] = []
        answered = time.monotonic()
        while (waiting is not None or running) and not stop.is_set():
            if waiting is not None and not waiting and len(running) < self._max_running:
                waiting = self._next_window(ready, stop, wait=not running)
            while waiting and len(running) < self._max_running:
                item = waiting.popleft()
                if not self._start(item, running):
                    ended.append(item)
            if running:
                with uninterrupted():
                    moved = self.engine.step()
                ended += self._ended(moved, running)
            if not running or self._are_enough(ended, answered):
                yield from map(self._answer, ended)
                ended, answered = [], time.monotonic()
        yield from map(self._answer, ended)

    def _are_enough(self, ended: Sequence[_Item], since: float) -> bool:
        enough = min(_ANSWERS, self._window)
        return len(ended) >= enough or time.monotonic() >= since + _ANSWER_SECONDS

    def _next_window(self, ready: _Windows, stop: threading.Event, *, wait: bool) -> deque[_Item] | None:
        """Return the items of the next window, empty if it is not read yet; None at the end of the lines."""
        try:
            window = ready.get(block=wait, timeout=_POLL_SECONDS)
        except queue.Empty:
            return deque()
        if isinstance(window, BaseException):
            raise window
        return window if window is None or isinstance(window, deque) else self._items(window, stop)

    def _start(self, item: _Item, running: dict[str, _Item]) -> bool:
        """Add a line's requests to the engine; return False if none runs."""
        if item.work is None:
            return False
        now = time.monotonic()
        requests = [request for group in item.work.groups for request in group.requests]
        try:
            for request in requests:
                request.metrics.arrival = now
                if item.work.timeout is not None:
                    request.deadline = now + item.work.timeout
                self.engine.add(request)
                item.requests.append(request)
        except UsageError as error:
            item.fault = error
            for request in item.requests:
                self.engine.cancel(request.request_id)
            return False
        item.running = len(requests)
        running.update({request.request_id: item for request in requests})
        return bool(requests)

    def _ended(self, moved: Sequence[Request], running: dict[str, _Item]) -> Iterator[_Item]:
        for request in moved:
            if request.finished and (item := running.pop(request.request_id, None)) is not None:
                item.running -= 1
                if not item.running:
                    yield item

    def _answer(self, item: _Item) -> LineResult:
        """Return the answer of a line that ended.

        Raises:
            ProviderRuntimeError: too many lines in a row failed on the device.
        """
        try:
            if item.fault is not None or item.work is None:
                raise item.fault or RequestError("the line could not be prepared")
            for group in item.work.groups:
                if group.fault is not None:
                    raise group.fault
            body, reason = item.work.read()
        except CarryallError as error:
            code = error_code(error)
            self._failures = self._failures + 1 if code == "server_error" else 0
            if self._failures >= _MAX_FAILURES_IN_ROW:
                raise ProviderRuntimeError(
                    f"the last {self._failures} lines failed on the device, so the job stops: {error}"
                ) from error
            return failed(item.line, code, str(error), worker=self._worker)
        self._failures = 0
        return _completed(item.line, body, reason, item.work.groups, self._worker)


def windows(
    lines: Iterator[BatchLine | None], max_lines: int, first: int = _FIRST_WINDOW
) -> Iterator[list[BatchLine]]:
    """Split lines into windows of at most ``max_lines``.

    The first windows are shorter, from ``first`` lines on, so that the engine has work early. Windows of
    long lines are shorter too, to bound memory. A None ends a window: the next line comes only after an
    answer.
    """
    count = min(first, max_lines)
    window: list[BatchLine] = []
    size = 0
    for line in lines:
        if line is not None:
            window.append(line)
            size += _size(line)
        if window and (line is None or len(window) >= count or size > _WINDOW_BYTES):
            yield window
            window, size, count = [], 0, min(2 * count, max_lines)
    if window:
        yield window


def _size(line: BatchLine) -> int:
    prompt = line.body.get("prompt", "")
    return len(prompt) if isinstance(prompt, str) else len(str(line.body))


def error_code(error: CarryallError) -> str:
    """Return the error code of a failed line."""
    if isinstance(error, RequestCancelled):
        return "timeout"
    return "invalid_request" if isinstance(error, UsageError) else "server_error"


def _completed(
    line: BatchLine, body: Mapping[str, object], reason: str, groups: Sequence[RequestGroup], worker: str
) -> LineResult:
    times = [group.requests[0].metrics for group in groups]
    ends = [each.finished for each in times if each.finished is not None]
    starts = [each.first_scheduled or each.arrival for each in times]
    usages = [group.usage for group in groups]
    tokens = (
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
    seconds = max(ends) - min(starts) if ends and starts else 0.0
    return completed(line, body, reason, tokens, seconds=seconds, worker=worker)


def completed(
    line: BatchLine,
    body: Mapping[str, object],
    reason: str,
    tokens: tuple[int, int, int],
    *,
    seconds: float,
    worker: str,
) -> LineResult:
    """The answer of a line that succeeded.

    Args:
        line: that is answered.
        body: of the response.
        reason: why its text ended.
        tokens: of prompts, generated, and cached among the former.
        seconds: see ``LineResult``.
        worker: see there.
    """
    name = f"batch_req_{line.number}"
    response = {"status_code": 200, "request_id": name, "body": body}
    return LineResult(
        number=line.number,
        digest=line.digest,
        id_key=line.id_key,
        record=_line({"id": name, "custom_id": line.custom_id, "response": response, "error": None}),
        extra=line.extra,
        prompt_tokens=tokens[0],
        completion_tokens=tokens[1],
        cached_tokens=tokens[2],
        seconds=seconds,
        finish_reason=reason,
        worker=worker,
    )


def failed(line: BatchLine | BadLine, code: str, message: str, *, worker: str = "") -> LineResult:
    """Return the answer of a failed line; its record has the format of OpenAI's error files."""
    error: dict[str, object] = {"code": code, "message": message, "line": line.number}
    if isinstance(line, BadLine) and line.file is not None:
        error |= {"file": line.file, "file_line": line.line}
    name = f"batch_req_{line.number}"
    record: dict[str, object] = {
        "id": name,
        "custom_id": line.custom_id,
        "response": None,
        "error": error,
    }
    return LineResult(
        number=line.number,
        digest=line.digest,
        id_key=line.id_key,
        record=_line(record),
        extra=line.extra,
        code=code,
        worker=worker,
    )


def _line(record: dict[str, object]) -> bytes:
    return plain_json(record).encode()

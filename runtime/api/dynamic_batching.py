"""Dynamic batching for models without a KV cache: single requests run together in batches."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import EngineClosedError, ProviderRuntimeError, QueueFullError, RequestError, UsageError
from ...options import shown
from ...records import dataclass
from ..types.arguments import checked_arguments

Feeds = Mapping[str, npt.NDArray[Any]]
Results = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RunTime:
    """The times of one request.

    Args:
        queued: nanoseconds until its batch ran.
        computed: nanoseconds of the run of its batch.
        runs: the runs that began with this request: 1 for the first request of a batch, else 0.
        rows: the rows of its batch.
    """

    queued: int
    computed: int
    runs: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    feeds: Feeds
    rows: int
    future: Future[Results]
    on_run: Callable[[RunTime], None] | None
    arrival: int

    @property
    def shape_key(self) -> tuple[object, ...]:
        """A key that is equal if requests can share a batch: names, dtypes and sizes after axis 0."""
        return tuple((name, a.dtype.str, a.shape[1:]) for name, a in sorted(self.feeds.items()))


class DynamicBatcher:
    """Run requests of many threads or tasks in shared batches along axis 0 of all inputs and outputs.

    A batch starts when it is full, or ``max_delay`` after its first request. Requests with different shapes
    run in different batches. If a batch fails, its requests run one by one, so that only the one at fault
    fails.

    Args:
        session: an ``InferenceSession`` whose inputs and outputs all have a free batch axis 0.
        max_batch_size: maximum rows of a batch.
        max_delay: seconds that the first request of a batch waits for others.
        max_queue: maximum number of waiting requests.

    Raises:
        UsageError: an input or output has no free first axis, or an option is out of range.
    """

    @checked_arguments
    def __init__(
        self, session: Any, *, max_batch_size: int = 32, max_delay: float = 0.002, max_queue: int = 1024
    ) -> None:
        if max_batch_size < 1 or max_queue < 1 or not 0 <= max_delay <= threading.TIMEOUT_MAX:
            raise UsageError("max_batch_size and max_queue must be at least 1, max_delay at least 0")
        if not hasattr(session, "get_inputs"):
            raise UsageError(f"session of DynamicBatcher must be an InferenceSession, not {shown(session)}")
        self._inputs = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]
        _check_batch_axis([*session.get_inputs(), *session.get_outputs()])
        self._session = session
        self._max_rows, self._max_delay = max_batch_size, max_delay
        self._queue: queue.Queue[_Request | None] = queue.Queue(max_queue)
        self._closing = threading.Lock()
        self._closed = False
        self.runs = 0  # batches that ran
        self._thread = threading.Thread(target=self._serve, name="carryall-batcher", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return self._queue.qsize()

    def submit(self, feeds: Feeds, *, on_run: Callable[[RunTime], None] | None = None) -> Future[Results]:
        """Queue a request of one or more rows; its arrays must not change until it is done.

        Args:
            feeds: the inputs by name.
            on_run: receives the times of a successful run in the batcher's thread, before the future is done.

        Returns:
            A future of all outputs by name, with the rows of this request.

        Raises:
            RequestError: inputs are missing, unknown, differ in their rows, or exceed ``max_batch_size``.
            QueueFullError: ``max_queue`` requests are waiting.
            EngineClosedError: the batcher is closed.
        """
        request = _Request(feeds, self._rows(feeds), Future(), on_run, time.perf_counter_ns())
        with self._closing:
            if self._closed:
                raise EngineClosedError("the batcher is closed")
            try:
                self._queue.put_nowait(request)
            except queue.Full:
                raise QueueFullError(f"{self._queue.maxsize} requests are waiting; retry later") from None
        return request.future

    def run(self, feeds: Feeds) -> Results:
        """Queue a request and wait for its result."""
        return self.submit(feeds).result()

    async def run_awaited(self, feeds: Feeds, *, on_run: Callable[[RunTime], None] | None = None) -> Results:
        """Run a request from asyncio; cancelling the task removes the request from the queue.

        See ``submit`` for the arguments.
        """
        return await asyncio.wrap_future(self.submit(feeds, on_run=on_run))

    def close(self) -> None:
        """Finish all queued requests, then stop."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> DynamicBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, feeds: Feeds) -> int:
        if set(feeds) != set(self._inputs):
            raise RequestError(f"the inputs are {', '.join(self._inputs)}, not {', '.join(feeds) or 'none'}")
        rows = {array.shape[0] if np.ndim(array) else 0 for array in feeds.values()}
        if len(rows) != 1 or 0 in rows:
            raise RequestError("every input needs the same number of rows, at least one, on axis 0")
        count = rows.pop()
        if count > self._max_rows:
            raise RequestError(f"the request has {count} rows, the maximum of a batch is {self._max_rows}")
        return count

    def _serve(self) -> None:
        held: list[_Request] = []  # taken from the queue, but did not fit the last batch
        stopping = False
        while held or not stopping:
            if not held:
                first = self._queue.get()
                if first is None:
                    return
                held.append(first)
            stopping = self._gather(held) or stopping
            batch = _take_batch(held, self._max_rows)
            self._run([request for request in batch if request.future.set_running_or_notify_cancel()])

    def _gather(self, held: list[_Request]) -> bool:
        """Collect requests for the batch of ``held[0]``; return whether the batcher is closing."""
        key, deadline = held[0].shape_key, time.monotonic() + self._max_delay
        while sum(request.rows for request in held if request.shape_key == key) < self._max_rows:
            try:
                request = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if request is None:
                return True
            held.append(request)
        return False

    def _run(self, batch: list[_Request]) -> None:
        if not batch:
            return
        begun = time.perf_counter_ns()
        try:
            results = self._forward(batch)
        except BaseException as error:  # noqa: BLE001 -- errors belong to the requests; the thread goes on
            if len(batch) > 1:
                for request in batch:
                    self._run([request])
            else:
                _fail(batch[0], error)
            return
        computed = time.perf_counter_ns() - begun
        start, rows = 0, sum(request.rows for request in batch)
        for request in batch:
            end = start + request.rows
            if request.on_run is not None:
                request.on_run(RunTime(begun - request.arrival, computed, int(request is batch[0]), rows))
            _resolve(request, {name: array[start:end] for name, array in results.items()})
            start = end

    def _forward(self, batch: list[_Request]) -> Results:
        feeds = {
            name: np.concatenate([request.feeds[name] for request in batch])
            if len(batch) > 1
            else batch[0].feeds[name]
            for name in self._inputs
        }
        outputs = self._session.run(self._outputs, feeds)
        self.runs += 1
        rows = sum(request.rows for request in batch)
        for name, array in zip(self._outputs, outputs, strict=True):
            if array.shape[:1] != (rows,):
                raise ProviderRuntimeError(f"output '{name}' has shape {array.shape} for {rows} rows")
        return dict(zip(self._outputs, outputs, strict=True))


def _check_batch_axis(values: list[Any]) -> None:
    for value in values:
        if not value.shape or isinstance(value.shape[0], int):
            raise UsageError(f"'{value.name}' has shape {value.shape}; batching needs a free first axis")


def _take_batch(held: list[_Request], max_rows: int) -> list[_Request]:
    """Remove and return the oldest request of ``held`` and those that fit its batch, oldest first."""
    key, rows, batch = held[0].shape_key, 0, []
    for request in list(held):
        if request.shape_key != key:
            continue
        if rows + request.rows > max_rows:
            break
        rows += request.rows
        batch.append(request)
        held.remove(request)
    return batch


def _resolve(request: _Request, results: Results) -> None:
    try:
        request.future.set_result(results)
    except InvalidStateError:  # cancelled while it ran
        return


def _fail(request: _Request, error: BaseException) -> None:
    if not isinstance(error, ProviderRuntimeError):
        text = " ".join((str(error) or repr(error)).split())
        wrapped = ProviderRuntimeError(f"the run failed: {text}")
        wrapped.__cause__ = error
        error = wrapped
    request.future.set_exception(error)

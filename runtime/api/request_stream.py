"""The states of requests, handed from the engine's thread to the event loops of their readers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping

from ...errors import CarryallError
from ..engine.requests.request_group import RequestGroup
from ..types.outputs import RequestOutput

# Reading states takes at most this share of the time of an event loop, unless states would become older than
# ``_LONGEST_REST`` seconds. Rests below ``_SHORTEST_REST`` seconds would cost more than they save.
_SHARE = 0.05
_LONGEST_REST = 0.025
_SHORTEST_REST = 0.001


class Delivery:
    """Carries the states of all requests that one event loop reads, and wakes it once for all of them.

    After the readers ran, the loop rests: states that arrive meanwhile wait, and newer ones replace them. The
    rest is in proportion to the time that the readers took, so that they take at most ``_SHARE`` of the time:
    few readers of a slow model get each state at once, many readers of a fast model get several tokens in
    one. Urgent states, such as the first and the last one of a request, end the rest.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._states: dict[RequestStream, RequestOutput] = {}  # guarded by _lock, as are the next two
        self._called = False  # whether the loop will run ``_flush``
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None  # ends the rest; belongs to the loop

    def post(self, states: Mapping[RequestStream, RequestOutput], *, urgent: bool) -> None:
        """Hand over states; called in the engine's thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._lock:
            self._states.update(states)
            wake = not self._called and (urgent or not self._resting)
            self._called = self._called or wake
        if wake or self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            states, self._states = self._states, {}
            self._called, self._resting = False, True
        if self._timer is not None:
            self._timer.cancel()
        start = self._loop.time()
        for stream, output in states.items():
            stream.deliver(output)
        self._loop.call_soon(self._rest, start)  # runs after the readers, which were called before

    def _rest(self, start: float) -> None:
        now = self._loop.time()
        seconds = min(_LONGEST_REST, (now - start) * (1 / _SHARE - 1))
        if self._timer is not None:
            self._timer.cancel()
        if seconds < _SHORTEST_REST:
            self._rested()
        else:
            self._timer = self._loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._timer = None
        with self._lock:
            self._resting = False
            if not self._states or self._called:
                return
            self._called = True
        self._flush()


class RequestStream(AsyncIterator[RequestOutput]):
    """The states of one request, as an async iterator. A slow reader skips states and gets the latest.

    It belongs to the event loop that created it.
    """

    def __init__(self, group: RequestGroup, cancel: Callable[[RequestStream], None]) -> None:
        self.group = group
        self.loop = asyncio.get_running_loop()
        self.begun = False  # whether a state was published; belongs to the engine's thread
        self._cancel = cancel
        self._waiting: asyncio.Future[None] | None = None  # of the reader; cheaper than an asyncio.Event
        self._news = False
        self._latest: RequestOutput | None = None
        self._error: CarryallError | None = None
        self._ended = False

    def deliver(self, output: RequestOutput) -> None:
        """Store a newer state. Called in the event loop."""
        self._latest = output
        self._wake()

    def fail(self, error: CarryallError) -> None:
        """End the stream with an error. Called in the event loop."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._news = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        if not self._ended:
            self._ended = True
            self._cancel(self)

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        while not self._news:
            self._waiting = self.loop.create_future()
            await self._waiting
        self._news = False
        if self._error is not None:
            self._ended = True
            raise self._error
        assert self._latest is not None  # noqa: S101 -- ``deliver`` or ``fail`` was called
        state = self.group.settled(self._latest)
        if state.finished and not self._latest.finished:
            self.cancel()  # making the text failed, so generation can stop
        self._ended = state.finished
        return state

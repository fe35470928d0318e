"""The states of a request, for a reader in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress

from ...errors import CarryallError
from ..engine.requests.request import Grammar
from ..engine.requests.request_group import RequestGroup
from ..types.outputs import RequestOutput


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
        self._accepted = False

    def accept(self) -> None:
        """Note that the engine queued the request. Called in the event loop."""
        grammar = self.group.requests[0].awaited_grammar
        if grammar is None or grammar.done():
            self._accept_grammar(grammar)
        else:
            grammar.add_done_callback(self._grammar_done)

    def _grammar_done(self, grammar: Future[Grammar]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._accept_grammar, grammar)

    def _accept_grammar(self, grammar: Future[Grammar] | None) -> None:
        if grammar is None or (not grammar.cancelled() and grammar.exception() is None):
            self._accepted = True
            self._wake_reader()

    async def accepted(self) -> bool:
        """Wait until the request is queued and its grammar is compiled; False if it ended before."""
        while not (self._accepted or self._news):
            self._waiting = self.loop.create_future()
            await self._waiting
        return self._accepted and self._error is None

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
        self._wake_reader()

    def _wake_reader(self) -> None:
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

"""The outputs of a request, for a reader in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress

from ...errors import CarryallError
from ..engine.requests.request import Grammar
from ..engine.requests.request_group import GrowingOutput, RequestGroup
from ..types.outputs import Delta, RequestOutput


class RequestStream(AsyncIterator[RequestOutput]):
    """The growing output of one request: as deltas, or, as an async iterator, each time everything so far.

    A slow reader gets the news of several steps at once. The stream belongs to the event loop that created
    it, and has one reader.
    """

    def __init__(self, group: RequestGroup, cancel: Callable[[RequestStream], None]) -> None:
        self.group = group
        self.loop = asyncio.get_running_loop()
        self.begun = False  # whether there was any news; belongs to the engine's thread
        self._cancel = cancel
        self._waiting: asyncio.Future[None] | None = None  # of the reader; cheaper than an asyncio.Event
        self._news = False
        self._output = GrowingOutput(group)
        self._error: CarryallError | None = None
        self._ended = False
        self._accepted = False

    def accept(self) -> None:
        """Note that the engine queued the request. Called in the engine's thread."""
        self._in_loop(self._await_grammar)

    def _await_grammar(self) -> None:
        grammar = self.group.requests[0].awaited_grammar
        if grammar is None or grammar.done():
            self._accept_grammar(grammar)
        else:
            grammar.add_done_callback(self._grammar_done)

    def _grammar_done(self, grammar: Future[Grammar]) -> None:
        self._in_loop(self._accept_grammar, grammar)

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

    async def prefilling(self, seconds: float) -> AsyncIterator[int]:
        """Yield the number of computed prompt tokens every ``seconds``, until there is news."""
        request = self.group.requests[0]
        while not self._news:
            self._waiting = self.loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._waiting
            if not self._news and request.slot is not None:
                yield min(request.num_computed, len(request.prompt_token_ids))

    def tell(self) -> None:
        """Wake the reader: there is news. Called in the event loop."""
        self._news = True
        self._wake_reader()

    def fail(self, error: CarryallError) -> None:
        """End the stream with an error; called in any thread.

        An engine that closes cancels its requests next. A reader that sees them cancelled sees the error too.
        """
        self._error = error
        self._in_loop(self.tell)

    def _in_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(callback, *arguments)

    def _wake_reader(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        if not self._ended:
            self._ended = True
            self._cancel(self)

    async def deltas(self, interval: int = 1) -> AsyncIterator[list[Delta]]:
        """Yield what the outputs gained since the previous item; the list may be empty.

        Args:
            interval: engine steps per item, except for the first and the last one.
        """
        skipped = interval
        while not self._ended:
            await self._wait()
            skipped += 1
            if skipped >= interval or self.group.finished:
                skipped = 0
                yield self._read()

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self._wait()
        return self._output.add(self._read())

    async def _wait(self) -> None:
        """Wait for news.

        Raises:
            CarryallError: the request was refused, or the engine was closed.
        """
        while not self._news:
            self._waiting = self.loop.create_future()
            await self._waiting
        self._news = False
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            self._ended = True
            raise self._error

    def _read(self) -> list[Delta]:
        deltas = self.group.read()
        self._check()  # the engine may have closed since the news
        if self.group.read_whole:
            if not self.group.finished:
                self.cancel()  # making the text failed, so generation can stop
            self._ended = True
        return deltas

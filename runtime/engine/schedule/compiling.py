"""Requests that wait until their grammar is compiled, which other threads do."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, wait

from ....errors import RequestError
from ..requests.request import Request

_PAUSE_SECONDS = 0.01


class CompilingRequests:
    """Hold requests until their grammar is ready, refused, or late.

    Args:
        seconds: how long a request waits for its grammar before it is refused.

    Attributes:
        deadlines: the waiting requests, with the time at which each is refused.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.deadlines: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self.deadlines)

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens that are still to be computed."""
        return sum(request.queued_tokens for request in self.deadlines)

    def add(self, request: Request) -> None:
        """Add a request, which waits from now on."""
        self.deadlines[request] = time.monotonic() + self._seconds

    def discard(self, request: Request) -> bool:
        """Remove a request; return False if it was not waiting here."""
        return self.deadlines.pop(request, None) is not None

    def pause(self) -> None:
        """Block until a grammar is ready, at most 10 ms."""
        futures = [request.awaited_grammar for request in self.deadlines if request.awaited_grammar]
        wait(futures, _PAUSE_SECONDS, FIRST_COMPLETED)

    def take(self) -> tuple[list[Request], list[Request]]:
        """Remove and return requests whose grammar is ready, and refused ones, which stay until ``discard``.

        ``fault`` of a refused request holds the reason.
        """
        ready: list[Request] = []
        refused: list[Request] = []
        for request, deadline in list(self.deadlines.items()):
            if not request.waits_for_grammar:
                self._finish(request, ready, refused)
            elif time.monotonic() > deadline:
                request.fault = RequestError(f"the grammar took more than {self._seconds} s to compile")
                refused.append(request)
        return ready, refused

    def _finish(self, request: Request, ready: list[Request], refused: list[Request]) -> None:
        assert request.awaited_grammar is not None  # noqa: S101 -- only requests with a grammar are added
        error = request.awaited_grammar.exception()
        if error is None:
            try:
                request.take_grammar()
            except Exception as fault:  # noqa: BLE001 -- fails this request only
                error = fault
        if error is None:
            ready.append(request)
            del self.deadlines[request]
            return
        if not isinstance(error, RequestError):  # a fault of the library fails this request only
            error = RequestError(f"the grammar could not be compiled: {error!r}")
        request.fault = error
        refused.append(request)

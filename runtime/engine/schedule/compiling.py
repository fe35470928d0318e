"""Requests that wait for their grammar, which is compiled elsewhere."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, wait

from ....errors import RequestError
from ..requests.request import Request

_PATIENCE = 0.01


class CompilingRequests:
    """Requests by the moment until which they wait.

    Args:
        seconds: how long a request waits for its grammar before it is refused.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadlines: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self._deadlines[request] = time.monotonic() + self._seconds

    def discard(self, request: Request) -> bool:
        """Take a request out; False if it does not wait here."""
        return self._deadlines.pop(request, None) is not None

    def pause(self) -> None:
        """Wait a moment for the next grammar."""
        futures = [request.awaited_grammar for request in self._deadlines if request.awaited_grammar]
        wait(futures, _PATIENCE, FIRST_COMPLETED)

    def take(self) -> tuple[list[Request], list[Request]]:
        """Requests that are ready to run, and those that are refused, with ``fault`` set."""
        ready: list[Request] = []
        refused: list[Request] = []
        for request, deadline in list(self._deadlines.items()):
            if not request.waits_for_grammar:
                self._finish(request, ready, refused)
            elif time.monotonic() > deadline:
                request.fault = RequestError(f"the grammar took more than {self._seconds} s to compile")
                refused.append(request)
        return ready, refused

    def _finish(self, request: Request, ready: list[Request], refused: list[Request]) -> None:
        assert request.awaited_grammar is not None  # noqa: S101 -- or it would not wait here
        error = request.awaited_grammar.exception()
        if error is None:
            try:
                request.take_grammar()
            except Exception as fault:  # noqa: BLE001 -- no reason for others to end
                error = fault
        if error is None:
            ready.append(request)
            del self._deadlines[request]
            return
        if not isinstance(error, RequestError):  # the library failed, which is no reason for others to end
            error = RequestError(f"the grammar could not be compiled: {error!r}")
        request.fault = error
        refused.append(request)

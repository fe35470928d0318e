"""Streamed responses (server-sent events), and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....errors import CarryallError
from ....plain_json import utf8
from ...process.faults import log_fault
from .errors import described, error_json

T = TypeVar("T")
Json = dict[str, Any]

_log = logging.getLogger(__name__)

# One encoder for all events: ``json.dumps`` with options makes one for each call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class ClientGone(Exception):  # noqa: N818 -- a disconnect is not an error of the service
    """The client closed its connection before the response was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it if the client disconnects.

    Raises:
        ClientGone: the client disconnected.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Json | str, name: str | None = None) -> bytes:
    """Return one server-sent event, encoded as UTF-8."""
    text = data if isinstance(data, str) else _ENCODER.encode(data)
    head = f"event: {name}\n" if name else ""
    return utf8(f"{head}data: {text}\n\n")


class LastPiece(bytes):
    """A piece after which a stream has no further one, so that the end of the response is sent with it."""


# Clients and proxies give up on a silent connection, and a long prompt takes minutes on a CPU.
PING_SECONDS = 10.0


class StreamedAnswer(Response):
    """A response that is sent piece by piece. An error before the first piece has its own status code.

    While no piece comes, a ping is sent every ``PING_SECONDS``.

    Args:
        pieces: generates the pieces of the body, the first one (perhaps empty) once the request is accepted,
            the last one perhaps as ``LastPiece``; closed when the client disconnects.
        late_error: returns the bytes that report an error after the first piece.
        ping: returns the bytes of a ping.
        media_type: the media type of the response.
        headers: additional headers.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        late_error: Callable[[Exception], bytes],
        ping: Callable[[], bytes] = lambda: b": ping\n\n",
        *,
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", **(headers or {})}, media_type)
        del self.headers["content-length"]
        self._pieces, self._late_error, self._ping = pieces, late_error, ping
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response to an ASGI connection.

        Raises:
            Exception: the first piece cannot be computed; no byte of the response was sent.
            ClientGone: the client disconnected before the first piece.
        """
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientGone, OSError):
            if not self._begun:
                raise

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            piece: bytes | None = await anext(pieces, b"")
            self._begun = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            pings = _Pings(send, self._ping)
            try:
                while piece is not None:
                    more = not isinstance(piece, LastPiece)
                    if not more:
                        pings.stop()
                    if piece or not more:
                        await send({"type": "http.response.body", "body": piece, "more_body": more})
                        pings.note()
                    if not more:
                        return
                    piece = await anext(pieces, None)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 -- every error must be reported to the client
                pings.stop()
                if not isinstance(error, CarryallError):
                    log_fault(_log, "-", "a streamed response", error)
                await send({"type": "http.response.body", "body": self._late_error(error), "more_body": True})
            finally:
                pings.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Pings:
    """Sends a ping when nothing was sent for ``PING_SECONDS``. A timer costs less than a task for each piece.

    Args:
        send: of the ASGI connection. Pieces are whole events, so that a ping between two is never within one.
        ping: returns the bytes of a ping.
    """

    def __init__(self, send: Send, ping: Callable[[], bytes]) -> None:
        self._send, self._ping = send, ping
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.note()
        self._timer = self._loop.call_later(PING_SECONDS, self._beat)

    def note(self) -> None:
        """Note that a piece was sent."""
        self._last = self._loop.time()

    def stop(self) -> None:
        """Send no further ping."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _beat(self) -> None:
        left = self._last + PING_SECONDS - self._loop.time()
        if left <= 0:
            left = PING_SECONDS
            if self._task is None or self._task.done():  # else the client does not read
                self._task = self._loop.create_task(self._send_ping())
        self._timer = self._loop.call_later(left, self._beat)

    async def _send_ping(self) -> None:
        with suppress(OSError):  # the client is gone, which the stream itself sees
            await self._send({"type": "http.response.body", "body": self._ping(), "more_body": True})


def streamed(
    request: Request, pieces: AsyncGenerator[bytes, None], *, headers: Mapping[str, str] | None = None,
    media_type: str = "text/event-stream", late_error: Callable[[Exception], bytes] | None = None,
    ping: Callable[[], bytes] = lambda: b": ping\n\n",
) -> Response:  # fmt: skip
    """Return a streamed response, which begins with the first piece.

    Args:
        request: the request to answer.
        pieces: the pieces of the body.
        headers: additional headers.
        media_type: the media type of the body.
        late_error: formats an error after the first piece; None formats an event in the API's error format.
        ping: returns what is sent while no piece comes: a comment, unless the API has an event for it.
    """
    path = request.scope["path"]  # ``request.url`` parses the whole address

    def as_event(error: Exception) -> bytes:
        return event(error_json(path, *described(error)))

    return StreamedAnswer(pieces, late_error or as_event, ping, media_type=media_type, headers=headers)

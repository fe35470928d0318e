"""``/v1/responses`` over WebSocket: turns one after the other, with the events of HTTP streams.

See https://www.openresponses.org/specification, "WebSocket Transport".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket, WebSocketDisconnect

from ....errors import RequestError
from ....plain_json import json_bytes
from ....records import dataclass
from ...process.faults import log_fault
from .bodies import json_object
from .errors import described, openai_error
from .openai.response_store import UnknownResponseError

Json = dict[str, Any]

_log = logging.getLogger(__name__)

_LONGEST_SECONDS = 3600.0  # of a connection, as the specification says
_HTTP_ONLY = ("stream", "stream_options", "background")


@dataclass(frozen=True, slots=True)
class RunningResponse:
    """A response that is being generated.

    Args:
        events: its events, in groups.
        failed: returns the last event of a response that failed after its first event.
    """

    events: AsyncGenerator[list[Json], None]
    failed: Callable[[Exception], Json]


class Turns(Protocol):
    """What answers the messages of one connection."""

    async def start(self, body: Json) -> RunningResponse:
        """Check the caller, its budget and a body, and start a turn.

        Raises:
            CarryallError, HTTPException: the turn is refused.
        """

    def forget(self, previous: Any) -> None:
        """Drop the connection's own state of a response that could not be continued."""


class ResponsesSocket:
    """One accepted connection.

    Args:
        socket: the connection.
        turns: answers its messages.
    """

    def __init__(self, socket: WebSocket, turns: Turns) -> None:
        self._socket, self._turns = socket, turns
        # One message may wait during a turn. After a second one, nothing is read until the turn ends.
        self._messages: asyncio.Queue[str] = asyncio.Queue(1)

    async def run(self) -> None:
        """Answer messages until the client leaves, or the connection is too old."""
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._answer_all())]
        try:
            done, _ = await asyncio.wait(tasks, timeout=_LONGEST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        if not done:
            told = "the connection is 60 minutes old; open a new one"
            await self._send(_error(HTTPException(400, told), "websocket_connection_limit_reached"))
            await self._socket.close()
        for fault in ended:
            if isinstance(fault, Exception) and not isinstance(fault, WebSocketDisconnect):
                raise fault

    async def _read(self) -> None:
        """Queue messages until the client leaves."""
        while (got := await self._socket.receive())["type"] == "websocket.receive":
            await self._messages.put(got.get("text") or "")  # a binary message is no JSON text

    async def _answer_all(self) -> None:
        while True:
            await self._answer(await self._messages.get())

    async def _answer(self, message: str) -> None:
        """Run one turn, and report its error."""
        body, begun = Json(), None
        try:
            body = await self._checked(message)
            turn = await self._turns.start(body)
            async with aclosing(turn.events) as groups:
                async for events in groups:
                    begun = turn
                    for one in events:
                        await self._send(one)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 -- every error must be reported to the client
            if described(error)[0] == 500:
                log_fault(_log, "-", "a turn on a WebSocket", error)
            self._turns.forget(body.get("previous_response_id"))
            await self._send(begun.failed(error) if begun else _error(error))

    async def _checked(self, message: str) -> Json:
        """Return the body of a ``response.create`` message."""
        body = await json_object(message.encode())
        if body.pop("type", None) != "response.create":
            raise RequestError("a message must have the type 'response.create'")
        if given := [name for name in _HTTP_ONLY if name in body]:
            raise RequestError(f"'{given[0]}' is a field of HTTP requests; omit it on a WebSocket")
        return body

    async def _send(self, event: Json) -> None:
        await self._socket.send_text(json_bytes(event).decode())


def _error(error: Exception, code: str | None = None) -> Json:
    status, message, known = described(error)
    if isinstance(error, UnknownResponseError):
        status, code = 400, "previous_response_not_found"
    inner = openai_error(status, message)["error"]
    inner["code"] = code or known or ("server_error" if status >= 500 else "invalid_request")
    return {"type": "error", "status": status, "error": inner}

"""Read request bodies with limits on size and time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from ....errors import RequestError
from ...process.large_json import SMALL, parse

Json = dict[str, Any]
_DISCARD_SECONDS = 2.0
# Of answers to bodies of which a part is unread: the connection cannot be reused.
_LAST = {"Connection": "close"}


async def read_object(request: Request, most_bytes: int, most_seconds: float) -> Json:
    """Return the JSON object in the body of a request.

    Raises:
        RequestError: the body is not a JSON object.
        HTTPException: the body exceeds ``most_bytes`` (413) or is incomplete after ``most_seconds`` (408),
            or the client disconnected (400).
    """
    return await json_object(await read_bytes(request, most_bytes, most_seconds))


async def json_object(raw: bytes) -> Json:
    """Return the JSON object in a body or a message.

    Raises:
        RequestError: it is not a JSON object.
    """
    try:
        if len(raw) <= SMALL:
            body = json.loads(raw, parse_constant=_reject_constant)
        else:
            body = await asyncio.to_thread(parse, raw, _reject_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not a {type(body).__name__}")
    return body


async def read_bytes(request: Request, most_bytes: int, most_seconds: float) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: the body exceeds ``most_bytes`` (413) or is incomplete after ``most_seconds`` (408),
            or the client disconnected (400).
    """
    try:
        async with asyncio.timeout(most_seconds):
            return await _read(request, most_bytes)
    except TimeoutError as error:
        late = f"the body was not complete after {most_seconds:g} seconds"
        raise HTTPException(408, late, _LAST) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client disconnected before the body was complete") from error


async def _read(request: Request, most: int) -> bytes:
    pieces, stream = bytearray(), request.stream()
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        if "expect" not in request.headers:  # a client that asks first has sent nothing
            await _discard(stream)
        raise _too_large(most)
    async for piece in stream:
        pieces += piece
        if len(pieces) > most:
            await _discard(stream)
            raise _too_large(most)
    return bytes(pieces)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read what is left of a body that is refused, for a short time.

    Many clients read no answer before they have sent the whole body; if the connection ends while they send,
    they report a broken connection in place of the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for _ in stream:
                pass


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body has more than {most} bytes", _LAST)


def _reject_constant(name: str) -> NoReturn:
    raise RequestError(f"the body is not JSON: {name} is not a JSON number")

"""What every gRPC call gets: a request id, a log record, and a status of its own for malformed messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ....errors import RequestError
from ....records import dataclass
from ..core.request_context import HEADER, enter
from .statuses import Context, errors_as_status

_log = logging.getLogger(__name__)

Behavior = Callable[[Any, Context], Awaitable[Any]]

# The function that makes a handler, and the handler's attribute, by streaming of requests and of responses.
MAKERS: dict[tuple[bool, bool], tuple[Any, str]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Replaces a message that cannot be parsed."""

    reason: str


class Calls(grpc.aio.ServerInterceptor):
    """Wraps each call of some services.

    - ``x-request-id`` in the trailing metadata is the client's, or a random one; see ``request_context``.
    - The log gets method, status and seconds.
    - A message that cannot be parsed is INVALID_ARGUMENT; gRPC itself returns UNKNOWN and logs a traceback.

    Args:
        services: full service names. Their methods must be coroutines that write to their context.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        self._paths = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the wrapped handler of a call; see ``grpc.aio.ServerInterceptor``."""
        path = handler_call_details.method
        if not path.startswith(self._paths):
            return await continuation(handler_call_details)
        metadata = {name: str(value) for name, value in handler_call_details.invocation_metadata or ()}
        request_id = enter(metadata)  # the handler runs in the same task
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        make, field = MAKERS[handler.request_streaming, handler.response_streaming]
        checked = _checked_stream if handler.request_streaming else _checked
        behavior = _recorded(checked(getattr(handler, field)), request_id, path)
        read = handler.request_deserializer and _reading(handler.request_deserializer)
        return make(behavior, read, handler.response_serializer)


def _recorded(behavior: Behavior, request_id: str, path: str) -> Behavior:
    async def record(request: Any, context: Context) -> Any:
        start = time.monotonic()
        # Metadata must be ASCII; other ids come back as far as they are.
        context.set_trailing_metadata(((HEADER, request_id.encode("ascii", "replace").decode()),))
        cancelled = False
        try:
            return await behavior(request, context)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            if _log.isEnabledFor(logging.INFO):
                status = "CANCELLED" if cancelled else _status(context)
                seconds = time.monotonic() - start
                fields = {"method": "gRPC", "path": path, "status": status, "seconds": round(seconds, 4)}
                _log.info("%s gRPC %s %s %.3f s", request_id, path, status, seconds, extra={"fields": fields})

    return record


def _status(context: Context) -> str:
    """Return the name of a call's status; gRPC has None or a number until ``abort`` sets the status."""
    code: Any = context.code()
    if code is None:
        return grpc.StatusCode.OK.name
    return next(one.name for one in grpc.StatusCode if code in (one, one.value[0]))


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return read


def _checked(behavior: Behavior) -> Behavior:
    async def check(request: Any, context: Context) -> Any:
        async with errors_as_status(context):
            _refuse(request)
        return await behavior(request, context)

    return check


def _checked_stream(behavior: Behavior) -> Behavior:
    async def requests(given: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in given:
            _refuse(request)
            yield request

    async def check(given: AsyncIterator[Any], context: Context) -> Any:
        return await behavior(requests(given), context)

    return check


def _refuse(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise RequestError(f"the request is malformed: {request.reason}")

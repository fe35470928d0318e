"""Refuse malformed messages with INVALID_ARGUMENT; gRPC itself returns UNKNOWN and logs a traceback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ....errors import RequestError
from .statuses import Context, errors_as_status


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Replaces a message that cannot be parsed."""

    reason: str


class Decoding(grpc.aio.ServerInterceptor):
    """Parses the requests of some services, and refuses malformed ones.

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
        """Return the handler of a call, with a parser that refuses malformed messages."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._paths):
            return handler
        make, field = MAKERS[handler.request_streaming, handler.response_streaming]
        behavior = _checked_stream if handler.request_streaming else _checked
        return make(
            behavior(getattr(handler, field)),
            _reading(handler.request_deserializer),
            handler.response_serializer,
        )


# The function that makes a handler, and the handler's attribute, by streaming of requests and of responses.
MAKERS: dict[tuple[bool, bool], tuple[Any, str]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return read


def _checked(behavior: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def check(request: Any, context: Context) -> Any:
        async with errors_as_status(context):
            _refuse(request)
        return await behavior(request, context)

    return check


def _checked_stream(
    behavior: Callable[[AsyncIterator[Any], Context], Awaitable[Any]],
) -> Callable[[AsyncIterator[Any], Context], Awaitable[Any]]:
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

"""Request ids of gRPC calls, and one log record for each call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ..core.request_context import HEADER, enter
from .decoding import MAKERS
from .statuses import Context

_log = logging.getLogger(__name__)


class Records(grpc.aio.ServerInterceptor):
    """Sets ``x-request-id`` in the trailing metadata, and logs method, status and seconds of each call.

    The id is the client's ``x-request-id``, or a random one; see ``request_context``.

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
        """Return the handler of a call, with its record; see ``grpc.aio.ServerInterceptor``."""
        path = handler_call_details.method
        if not path.startswith(self._paths):
            return await continuation(handler_call_details)
        metadata = {name: str(value) for name, value in handler_call_details.invocation_metadata or ()}
        own = enter(metadata)  # the handler runs in the same task
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        make, field = MAKERS[handler.request_streaming, handler.response_streaming]
        behavior = _recorded(getattr(handler, field), own, path)
        return make(behavior, handler.request_deserializer, handler.response_serializer)


def _recorded(
    behavior: Callable[[Any, Context], Awaitable[Any]], own: str, path: str
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def record(request: Any, context: Context) -> Any:
        start = time.monotonic()
        # Metadata must be ASCII; other ids come back as far as they are.
        context.set_trailing_metadata(((HEADER, own.encode("ascii", "replace").decode()),))
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
                _log.info("%s gRPC %s %s %.3f s", own, path, status, seconds, extra={"fields": fields})

    return record


def _status(context: Context) -> str:
    """Return the name of a call's status; gRPC has None or a number until ``abort`` sets the status."""
    code: Any = context.code()
    if code is None:
        return grpc.StatusCode.OK.name
    return next(one.name for one in grpc.StatusCode if code in (one, one.value[0]))

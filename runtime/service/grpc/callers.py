"""Check the API key of every gRPC call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ....errors import RateLimitError
from ..access.api_keys import ApiKeys
from ..core.caller import CALLER
from .calls import MAKERS
from .statuses import Context, errors_as_status

Refusal = Callable[[object, Context], Awaitable[None]]

# Health checks need no API key.
_OPEN = (
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/vllm.grpc.engine.VllmEngine/HealthCheck",
)


class CallerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known API key, and sets ``CALLER`` for the others.

    Args:
        keys: the known keys. A call has one as metadata `authorization: Bearer KEY` or `x-api-key: KEY`.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call, or one that refuses it; see ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN):
            return handler
        caller = self._keys.find(_key(dict(handler_call_details.invocation_metadata or ())))
        if caller is None:
            return _of_same_kind(handler, _refuse)
        if not handler.request_streaming:  # each request of a stream counts; see ``kserve``
            try:
                caller.budgets.count_request()
            except RateLimitError as error:
                return _of_same_kind(handler, _limited(error))
        CALLER.set(caller)  # the handler runs in the same task
        return handler


def _key(metadata: dict[str, Any]) -> str | None:
    kind, _, key = str(metadata.get("authorization", "")).partition(" ")
    return key.strip() if kind.lower() == "bearer" else metadata.get("x-api-key")


async def _refuse(request: object, context: Context) -> None:
    message = "a valid API key is needed, as metadata 'authorization: Bearer KEY' or 'x-api-key: KEY'"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


def _limited(error: RateLimitError) -> Refusal:
    async def refuse(request: object, context: Context) -> None:
        async with errors_as_status(context):
            raise error

    return refuse


def _of_same_kind(handler: Any, refuse: Refusal) -> Any:
    """Return a handler of the same kind that refuses every call."""
    make, _ = MAKERS[handler.request_streaming, handler.response_streaming]
    return make(refuse)

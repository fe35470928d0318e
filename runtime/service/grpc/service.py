"""`carryall.v1.LLM` over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from ....errors import (
    CarryallError,
    EngineClosedError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    ServiceUnavailableError,
)
from ....proto import carryall_pb2 as pb
from ....proto import carryall_pb2_grpc
from ..core.handler import LLMHandler
from .messages import from_request, to_model_info, to_response

# The first class that an error belongs to decides.
STATUS: dict[type[CarryallError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ServiceUnavailableError: grpc.StatusCode.UNAVAILABLE,
    EngineClosedError: grpc.StatusCode.UNAVAILABLE,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    CarryallError: grpc.StatusCode.INTERNAL,
}


class LLMServicer(carryall_pb2_grpc.LLMServicer):
    """Translates between the wire and the handler."""

    def __init__(self, handler: LLMHandler) -> None:
        self._handler = handler

    # Writing to the context instead of yielding: a cancelled call then raises here, and the request is
    # cancelled at once instead of when the generator is collected.
    async def Generate(  # noqa: N802 -- the name of the method on the wire
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream one request's continuation."""
        async with _errors_as_status(context):
            wanted = from_request(request, self._handler.model.defaults)
            async with aclosing(self._handler.generate(wanted)) as deltas:
                async for delta in deltas:
                    await context.write(to_response(delta, wanted.params.logprobs or 0))

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        """Describe the loaded model."""
        async with _errors_as_status(context):
            return to_model_info(self._handler.model.info)


@asynccontextmanager
async def _errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    try:
        yield
    except CarryallError as error:
        code = next(code for kind, code in STATUS.items() if isinstance(error, kind))
        await context.abort(code, str(error))

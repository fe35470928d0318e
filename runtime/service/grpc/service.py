"""`carryall.v1.LLM` over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from ....errors import CarryallError
from ....proto import carryall_pb2 as pb
from ....proto import carryall_pb2_grpc
from ..core.repository import ModelRepository
from ..core.status import status_of
from .messages import from_request, to_model_info, to_response


class LLMServicer(carryall_pb2_grpc.LLMServicer):
    """Translates between the wire and the handler of the model."""

    def __init__(self, models: ModelRepository) -> None:
        self._models = models

    # Writing to the context instead of yielding: a cancelled call then raises here, and the request is
    # cancelled at once instead of when the generator is collected.
    async def Generate(  # noqa: N802 -- the name of the method on the wire
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream one request's continuation."""
        async with _errors_as_status(context):
            handler = self._models.llm()
            wanted = from_request(request, handler.model.defaults)
            async with aclosing(handler.generate(wanted)) as deltas:
                async for delta in deltas:
                    await context.write(to_response(delta, wanted.params.logprobs or 0))

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        """Describe the loaded model."""
        async with _errors_as_status(context):
            return to_model_info(self._models.llm().model.info)


@asynccontextmanager
async def _errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    try:
        yield
    except CarryallError as error:
        await context.abort(grpc.StatusCode[status_of(error).grpc], str(error))

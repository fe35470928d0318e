"""A served engine and a client of it, in one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from carryall.proto import generation_pb2 as pb
from carryall.proto import service_pb2_grpc
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.messages import ModelInfo
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.grpc.server import GrpcServer

INFO = ModelInfo(
    model="toy", provider="null", vocab_size=256, context_length=4096, max_slots=4, server_version="1.2"
)


@dataclass(frozen=True)
class Served:
    """A running server, what is behind it, and a client."""

    stop: Callable[[], Coroutine[Any, Any, bool]]
    models: ModelRepository
    address: str
    stub: Any
    health: Any

    async def health_status(self, service: str = "") -> str:
        """The name of what Health.Check says."""
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def repository(llm: AsyncLLM | None) -> ModelRepository:
    """A repository whose one model is ``llm``; None never gets loaded."""

    def load() -> ServedModel:
        if llm is None:
            threading.Event().wait()
        assert llm is not None
        return ServedModel(llm, INFO)

    return ModelRepository.of_one("toy", load)


@asynccontextmanager
async def serving(
    llm: AsyncLLM | None, models: ModelRepository | None = None, **config: Any
) -> AsyncIterator[Served]:
    """Serve ``llm``, or a repository of it, on a free port; None leaves it loading."""
    settings = ServerConfig(**{"grpc_port": 0, "grace_seconds": 0.0, **config})
    models = models or repository(llm)
    server = GrpcServer(models, settings)
    address = await server.start()
    loading = asyncio.create_task(models.load_all())
    if llm is not None:
        await loading
        await server.set_serving()

    async def stop() -> bool:
        await server.set_stopping()
        drained = await models.drain(settings.grace_seconds)
        await server.stop()
        return drained

    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        health = health_pb2_grpc.HealthStub(channel)
        try:
            yield Served(stop, models, address, stub, health)
        finally:
            await stop()
            loading.cancel()


async def code_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with, and its text."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def read(call: Any) -> list[Any]:
    """The messages of a stream that were not read yet."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def joined(messages: list[Any]) -> tuple[str, list[int]]:
    """Text and tokens of a whole stream."""
    return "".join(_text(m) for m in messages), [token for m in messages for token in m.token_ids]


def _text(message: Any) -> str:
    return str(message.text_delta if isinstance(message, pb.GenerateResponse) else message.content_delta)

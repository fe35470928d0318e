"""A served engine behind a real HTTP socket, and clients of it, in one event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from grpc_serving import repository

from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.http.app import make_app
from carryall.runtime.service.http.server import HttpServer
from carryall.runtime.service.kserve.inference import Inference
from carryall.runtime.service.serve import ServicePart


@dataclass(frozen=True)
class HttpServed:
    """A running server, what is behind it, and a client."""

    models: ModelRepository
    url: str
    client: httpx2.AsyncClient
    closing: AsyncExitStack
    server: HttpServer

    def openai(self, **options: Any) -> Any:
        """OpenAI's own client."""
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)
        self.closing.push_async_callback(client.close)
        return client

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        """What a POST of a JSON object gives."""
        return await self.client.post(path, json=body)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The data of a stream's events."""
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")
        ]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def _client(url: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, timeout=30, verify=False)  # reading certificates takes 30 ms


@asynccontextmanager
async def http_serving(
    llm: AsyncLLM | None,
    models: ModelRepository | None = None,
    parts: Sequence[Callable[[ModelRepository, ServerConfig], ServicePart]] = (),
    *,
    load: bool = True,
    **config: Any,
) -> AsyncIterator[HttpServed]:
    """Serve ``llm`` as ``toy``, or a repository, on a free port; ``load`` loads the models before."""
    settings = ServerConfig(**{"http_port": 0, "grace_seconds": 0.0, **config})
    served = models or repository(llm)
    further = [make(served, settings) for make in parts]
    routes = [route for part in further for route in part.routes()]
    inference = Inference.of(served, settings)
    server = HttpServer(make_app(served, inference, routes), settings)
    url = f"http://{await server.start()}"
    if load and (llm is not None or models is not None):
        await served.load_all()
    for part in further:
        await part.start(inference.models)
    async with AsyncExitStack() as closing, _client(url) as client:
        try:
            yield HttpServed(served, url, client, closing, server)
        finally:
            for part in further:
                await part.stop()
            await served.drain(0)
            await server.stop()

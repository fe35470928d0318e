"""A replica and the front, without a cluster: a fake handle calls the replica directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from carryall.runtime.cluster.replica import Front, Replica, ReplicaSpec
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.models.config import ModelConfig
from carryall.runtime.service.core.config import ServerConfig


class Handle:
    """A handle of one replica that notes the options of each call."""

    def __init__(self, replica: Replica) -> None:
        self.calls: list[dict[str, Any]] = []
        self._replica = replica
        self.answer = self

    def options(self, **options: Any) -> Handle:
        self.calls.append(options)
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> Any:
        return self._replica.answer(scope, body)


@asynccontextmanager
async def front() -> AsyncIterator[tuple[httpx2.AsyncClient, Handle, Replica]]:
    """A client of a front, the handle that the front calls, and the replica behind it."""
    model = ModelConfig(model="demo", provider="null")
    server = ServerConfig(ray="local", http_port=0, max_body_bytes=10_000)
    replica = Replica(ReplicaSpec("toy", model, EngineConfig(), server), None)
    await replica.check_health()
    handle = Handle(replica)
    called = Front(handle, server)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await called(Request(scope, receive)))(scope, receive, send)

    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        try:
            yield client, handle, replica
        finally:
            replica.close()


def test_answers_streams_and_errors_pass_through() -> None:
    async def scenario() -> None:
        async with front() as (client, handle, _):
            ask = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}
            whole = await client.post("/v1/completions", json=ask)
            stream = await client.post("/v1/completions", json={**ask, "stream": True})
            assert (whole.status_code, stream.status_code) == (200, 200)
            assert whole.json()["model"] == "toy"
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.text.endswith("data: [DONE]\n\n")
            wrong = await client.post("/v1/completions", json={"prompt": 1}, headers={"x-session-id": "s"})
            assert (wrong.status_code, "'prompt'" in wrong.text) == (400, True)
            huge = await client.post("/v1/completions", content=b"x" * 10_001)
            assert (huge.status_code, "10000 bytes" in huge.text) == (413, True)
            models = await client.get("/v1/models")
            assert models.json()["data"][0]["id"] == "toy"
            keys = [call.get("session_id") for call in handle.calls]
            assert keys[0] == keys[1] != ""
            assert keys[2:] == ["s", None]

    asyncio.run(scenario())


def test_a_closed_answer_ends_its_request() -> None:
    async def scenario() -> None:
        async with front() as (_, _, replica):
            body = b'{"prompt": "x", "max_tokens": 100000, "ignore_eos": true, "stream": true}'
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
                     "headers": [(b"host", b"127.0.0.1")]}  # fmt: skip
            answer = replica.answer(scope, body)
            assert (await anext(answer))["status"] == 200
            assert replica.active == 1
            await answer.aclose()
            async with asyncio.timeout(10):
                while replica.active:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())

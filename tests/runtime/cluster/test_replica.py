"""A replica and the front, without a cluster: a fake handle calls the replica directly."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from carryall.runtime.cluster import prefix_index
from carryall.runtime.cluster.affinity import affinity_of
from carryall.runtime.cluster.prefix_index import PrefixIndex
from carryall.runtime.cluster.replica import Front, Replica, ReplicaSpec
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.models.config import ModelConfig
from carryall.runtime.service.core.config import ServerConfig


class RayActorError(Exception):
    """What Ray raises for a lost replica."""


class Handle:
    """A handle of one replica that notes the options of each call, and loses the replica if it is told to."""

    def __init__(self, replica: Replica) -> None:
        self.calls: list[dict[str, Any]] = []
        self.lose_after: list[int] = []  # for each coming call, how many messages are sent before the loss
        self._replica = replica
        self.answer = self

    def options(self, **options: Any) -> Handle:
        self.calls.append(options)
        return self

    async def remote(
        self, scope: dict[str, Any], body: bytes, chunks: tuple[bytes, ...]
    ) -> AsyncIterator[Message]:
        count = self.lose_after.pop(0) if self.lose_after else None
        async with aclosing(self._replica.answer(scope, body, chunks)) as messages:
            async for message in messages:
                if count == 0:
                    raise RayActorError
                count = count and count - 1
                yield message


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = types.SimpleNamespace(RayActorError=RayActorError)
    context = types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id="only"))
    serve = types.SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(exceptions=errors, serve=serve))
    monkeypatch.setattr("carryall.runtime.cluster.prefix_index.INDEX", PrefixIndex())


@asynccontextmanager
async def front(**engine: Any) -> AsyncIterator[tuple[httpx2.AsyncClient, Handle, Replica]]:
    """A client of a front, the handle that the front calls, and the replica behind it."""
    model = ModelConfig(model="demo", provider="null")
    server = ServerConfig(ray="local", http_port=0, max_body_bytes=10_000)
    replica = Replica(ReplicaSpec("toy", model, EngineConfig(**engine), server), None)
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


@pytest.mark.parametrize("stream", [False, True])
def test_another_replica_answers_when_one_is_lost_before_its_first_byte(stream: bool) -> None:
    async def scenario() -> None:
        async with front() as (client, handle, _):
            ask = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0, "stream": stream}
            handle.lose_after = [0, 0]
            answer = await client.post("/v1/completions", json=ask)
            assert (answer.status_code, len(handle.calls)) == (200, 3)
            handle.lose_after = [0, 0, 0]
            refused = await client.post("/v1/completions", json=ask)
            assert (refused.status_code, "lost" in refused.json()["error"]["message"]) == (503, True)
            assert int(refused.headers["retry-after"]) >= 1

    asyncio.run(scenario())


def test_a_stream_whose_replica_is_lost_ends_with_an_error_and_a_whole_answer_is_cut_off() -> None:
    async def scenario() -> None:
        async with front() as (client, handle, _):
            ask = {"prompt": "def f(x):", "max_tokens": 20, "ignore_eos": True}
            handle.lose_after = [2]
            endless = {**ask, "max_tokens": 100000, "stream": True}  # it must not end within its first piece
            stream = await client.post("/v1/completions", json=endless)
            events = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
            assert (len(events), len(handle.calls)) == (2, 1)
            assert "lost" in json.loads(events[-1])["error"]["message"]
            handle.lose_after = [1]
            with pytest.raises(RayActorError):
                await client.post("/v1/completions", json=ask)

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
            async with asyncio.timeout(30):
                while replica.active:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


@pytest.mark.long
def test_the_front_knows_what_a_replica_holds_until_it_is_evicted() -> None:
    """A budget of 400 tokens holds one of these prompts, so the second takes the place of the first."""

    async def scenario() -> None:
        async with front(kv_bytes=400 * 1024) as (client, _, _):
            bodies = [{"prompt": f"{letter} long text " * 100, "max_tokens": 2} for letter in "ab"]
            chunks = [affinity_of({}, json.dumps(body).encode()).chunks for body in bodies]
            assert min(map(len, chunks)) >= 1
            held = []
            for body in bodies:
                await asyncio.sleep(0.5)
                answer = await client.post("/v1/completions", json=body)
                assert 200 < answer.json()["usage"]["prompt_tokens"] < 400
                held.append([bool(prefix_index.INDEX.held(each)) for each in chunks])
            assert held == [[True, False], [False, True]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("carryall.runtime.cluster.prefix_index._MARGIN", 0.3)
        asyncio.run(scenario())

"""What holds for every endpoint: errors, limits, keys, origins, clients that vanish."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from api_keys import key_file
from http_serving import HttpServed, http_serving
from null_llm import null_llm

from carryall.errors import ProviderRuntimeError
from carryall.runtime.api.async_llm import AsyncLLM

OPEN = ("/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/v2/health/live",
        "/v2/health/ready")  # fmt: skip
ENDLESS: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


async def until(condition: Any) -> None:
    """Wait until something holds, some seconds at most."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b'{"prompt": NaN}', 400, "NaN is not a JSON number"),
        (b"[1]", 400, "must be a JSON object, not a list"),
        (b"[" * 5000, 400, "the body is not JSON"),
        (b'{"prompt": "\xff"}', 400, "the body is not JSON"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", 400, "the body is not JSON"),
        (b"{" + b" " * 9000 + b"}", 413, "more than 8192 bytes"),
        (b'{"model": 3, "prompt": "x"}', 400, "'model' must be a string"),
        (b'{"prompt": "x", "n": 200}', 400, "n is 200, but this service allows at most 128"),
        (b'{"prompt": "x", "logprobs": 30}', 400, "logprobs is 30, but this service allows at most 20"),
        (b'{"prompt": ""}', 400, "prompt is empty"),
        (b'{"prompt": "x", "stream": true, "top_p": 7}', 400, "top_p"),
        (b'{"prompt": [1, 99999], "stream": true}', 400, "outside the vocabulary"),
    ],
)
def test_a_request_at_fault_is_told_in_openai_s_shape(content: bytes, status: int, message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, max_body_bytes=8192, max_logprobs=20) as served:
            answer = await served.client.post("/v1/completions", content=content)
            error = answer.json()["error"]
            assert (answer.status_code, message in error["message"]) == (status, True), error
            assert error["type"] == "invalid_request_error"
            good = await served.post("/v1/completions", prompt="x", max_tokens=1)
            assert good.status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_sends_all_before_it_reads_is_told_that_its_body_is_too_large(announced: bool) -> None:
    """The rest of the body, more than the connection's buffers hold, does not break the connection."""
    body = b" " * (8 << 20)
    length = f"content-length: {len(body)}" if announced else "transfer-encoding: chunked"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{length}\r\n\r\n".encode()
    sent = body if announced else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, max_body_bytes=8192) as served:
            url = served.client.base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head + sent)
            await writer.drain()
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
            writer.close()
            assert (await served.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/v2/models/x/infer", "/generate", "/v1/none"])
def test_each_api_has_its_own_shape_of_errors(path: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.client.post(path, content=b"{")
            assert answer.status_code in (400, 404)
            error = answer.json()
            if path == "/v1/messages":
                assert error["type"] == "error"
                assert error["error"]["message"]
            else:
                assert isinstance(error["error"], dict if path == "/v1/none" else str)
            assert (await served.client.get("/v1/completions")).status_code == 405

    asyncio.run(scenario())


def test_unknown_fields_are_ignored_and_named_or_refused() -> None:
    body = {"prompt": "x", "max_tokens": 1, "foo": 1, "bär": 2}

    async def scenario() -> None:
        async with null_llm() as llm:
            async with http_serving(llm) as served:
                answer = await served.post("/v1/completions", **body)
                assert answer.status_code == 200
                assert answer.headers["x-carryall-ignored-fields"] == "foo, b?r"
                answer = await served.post("/v1/completions", prompt="x", max_tokens=1)
                assert "x-carryall-ignored-fields" not in answer.headers
            async with http_serving(llm, strict=True) as served:
                answer = await served.post("/v1/completions", **body)
                assert answer.status_code == 400
                assert "unknown fields: foo, bär" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_while_loading_only_health_answers() -> None:
    async def scenario() -> None:
        async with http_serving(None) as served:
            statuses = [
                (await served.client.get(path)).status_code
                for path in ("/health/live", "/health", "/health/ready")
            ]
            assert statuses == [200, 503, 503]
            answer = await served.post("/v1/completions", prompt="x")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert (await served.client.get("/v1/models")).json()["data"] == []

    asyncio.run(scenario())


def test_a_full_queue_asks_to_retry() -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=1, max_queue=1, step_seconds=0.005) as llm, http_serving(llm) as served:
            others = [asyncio.create_task(served.post("/v1/completions", **ENDLESS)) for _ in range(2)]
            await until(lambda: llm.stats().waiting)
            for stream in (False, True):
                answer = await served.post("/v1/completions", prompt="x", stream=stream)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"
            for other in others:
                other.cancel()
            await until(lambda: not llm.stats().running)

    asyncio.run(scenario())


def test_a_call_of_many_prompts_does_not_overfill_the_queue() -> None:
    texts = [f"text {n}" for n in range(40)]

    async def scenario() -> None:
        async with null_llm(max_slots=2, max_queue=4) as llm, http_serving(llm) as served:
            many = {"prompt": texts, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            answer = await served.post("/v1/completions", **many)
            assert answer.json()["usage"]["completion_tokens"] == 80
            whole = {one["index"]: one["text"] for one in answer.json()["choices"]}
            streamed = dict.fromkeys(whole, "")
            for event in (await served.events("/v1/completions", **many, stream=True))[:-1]:
                streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert streamed == whole
            both = await served.post("/v1/completions", **many, n=2)
            assert len(both.json()["choices"]) == 80
            scores = await served.post("/score", text="a b", continuations=texts)
            assert scores.status_code == 200, scores.text
            assert len(scores.json()["data"]) == 40

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_model_is_an_error_of_the_server(stream: bool) -> None:
    def fail(rows: object) -> None:
        raise ProviderRuntimeError("the device is on fire")

    async def scenario() -> None:
        async with null_llm(before_forward=fail) as llm, http_serving(llm) as served:
            if stream:  # it began when the request was queued
                (failed,) = await served.events("/v1/completions", prompt="x", stream=True)
                assert "on fire" in failed["error"]["message"]
                return
            answer = await served.post("/v1/completions", prompt="x")
            assert answer.status_code == 500
            assert "on fire" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_fault_within_a_stream_is_its_last_event() -> None:
    steps = 0

    def fail(rows: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise ProviderRuntimeError("the device is on fire")

    async def scenario() -> None:
        import openai

        async with null_llm(before_forward=fail, step_seconds=0.005) as llm, http_serving(llm) as served:
            stream = await served.openai().completions.create(
                model="toy", prompt="x", max_tokens=50, stream=True, extra_body={"ignore_eos": True}
            )
            texts: list[str] = []

            async def read() -> None:
                async for chunk in stream:
                    texts.append(chunk.choices[0].text)

            with pytest.raises(openai.APIError, match="on fire"):
                await read()
            assert texts

    asyncio.run(scenario())


async def connection(served: HttpServed, body: dict[str, Any]) -> tuple[Any, Any]:
    """A raw connection on which a completion was asked for."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["running", "waiting"])
def test_a_client_that_vanishes_frees_its_slot(stream: bool, when: str) -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=1, step_seconds=0.005) as llm, http_serving(llm) as served:
            connections = [await connection(served, {**ENDLESS, "stream": stream})]
            await until(lambda: llm.stats().running)
            if when == "waiting":
                connections.append(await connection(served, {**ENDLESS, "stream": stream}))
                await until(lambda: llm.stats().waiting)
            for _, writer in reversed(connections):
                writer.close()
            await until(lambda: not llm.stats().running and not llm.stats().waiting)
            assert llm.stats().cancelled == len(connections)
            await until(lambda: not served.models.llm().active)

    asyncio.run(scenario())


def test_a_body_that_does_not_come_ends_the_request() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, body_timeout_seconds=0.1) as served:
            host, _, port = served.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n{")
            answer = await asyncio.wait_for(reader.read(), 30)  # to the end of the connection
            assert b" 408 " in answer.splitlines()[0]
            assert b"connection: close" in answer.lower()
            writer.close()

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("headers", "config", "status"),
    [
        ({}, {}, 200),
        ({"Host": "localhost:1"}, {}, 200),
        ({"Host": "evil.example"}, {}, 403),
        ({"Origin": "https://evil.example"}, {}, 403),
        ({"Origin": "null"}, {}, 403),
        ({"Origin": "https://good.example"}, {"cors_origins": ("https://good.example",)}, 200),
        ({"Origin": "https://evil.example"}, {"cors_origins": ("https://good.example",)}, 403),
        ({"Origin": "https://evil.example"}, {"cors_origins": ("*",)}, 200),
    ],
)
def test_pages_of_other_origins_are_refused(
    headers: dict[str, str], config: dict[str, Any], status: int
) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, **config) as served:
            answer = await served.client.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers
            )
            assert answer.status_code == status
            if "cors_origins" in config and status == 200:
                assert answer.headers["access-control-allow-origin"] in (headers["Origin"], "*")

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("host.docker.internal:8000", 200),
        ("mac.local", 200),
        ("Models.LOCALHOST.", 200),
        ("localhost:1", 200),
        ("[::1]:8000", 200),
        ("internal", 403),
        ("host.docker.internal.evil.example", 403),
        ("notlocal", 403),
    ],
)
def test_names_that_no_one_can_own_reach_a_loopback_address(host: str, status: int) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.client.get("/v1/models", headers={"Host": host})
            assert answer.status_code == status
            if status == 403:
                assert "call it as localhost or by a name in .local" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_the_page_of_the_service_itself_is_welcome() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.client.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"Origin": served.url}
            )
            assert answer.status_code == 200

    asyncio.run(scenario())


def test_only_keys_of_the_file_are_let_in(tmp_path: Path) -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice-key", "bob-key")}
    file = tmp_path / "keys.toml"
    file.write_text(f'[alice]\nsha256 = "{digests["alice-key"]}"\n')
    tenants: list[str | None] = []

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, api_keys=file) as served:
            watch_tenants(llm, tenants)

            async def status(**headers: str) -> int:
                body = {"prompt": "x", "max_tokens": 1, "user": "mallory"}
                return (await served.client.post("/v1/completions", json=body, headers=headers)).status_code

            assert await status() == 401
            assert await status(Authorization="Bearer wrong") == 401
            assert await status(Authorization="Bearer alice-key") == 200
            assert await status(**{"x-api-key": "alice-key"}) == 200
            assert tenants == ["alice", "alice"]
            for path in ("/health", "/health/live"):
                assert (await served.client.get(path)).status_code == 200
            assert (await served.client.get("/v1/models")).status_code == 401
            assert await status(Authorization="Bearer bob-key") == 401
            file.write_text(
                f'[alice]\nsha256 = "{digests["alice-key"]}"\nmodels = ["other"]\n'
                f'[bob]\nsha256 = "{digests["bob-key"]}"\n'
            )
            assert await status(Authorization="Bearer bob-key") == 200
            assert await status(Authorization="Bearer alice-key") == 404

    asyncio.run(scenario())


def test_every_other_operation_needs_a_key(tmp_path: Path) -> None:
    """``GET /`` is a page for everybody; ``POST /`` generates text, as in text-generation-inference."""

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, api_keys=key_file(tmp_path, alice="")) as served:
            document = await served.client.get("/openapi.json", headers={"x-api-key": "alice-key"})
            operations = {
                (method, path) for path, methods in document.json()["paths"].items() for method in methods
            }
            assert {("get", path) for path in OPEN} | {("post", "/")} <= operations
            for method, path in sorted(operations):
                answer = await served.client.request(method, path, json={"inputs": "x", "prompt": "x"})
                wanted = 200 if method == "get" and path in OPEN else 401
                assert answer.status_code == wanted, (method, path)
            assert (await served.client.head("/health")).status_code == 200

    asyncio.run(scenario())


def watch_tenants(llm: AsyncLLM, seen: list[str | None]) -> None:
    """Note the tenant of each request."""
    group = llm.requests.group

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(options["tenant"])
        return group(*args, **options)

    llm.requests.group = watched  # type: ignore[method-assign]


def test_requests_keep_the_id_that_their_client_gave() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            given = await served.client.get("/health", headers={"X-Request-Id": "abc"})
            assert given.headers["x-request-id"] == "abc"
            made = await served.client.get("/health")
            assert len(made.headers["x-request-id"]) == 32

    asyncio.run(scenario())


def test_stopping_lets_requests_finish_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, http_serving(llm) as served:
            running = asyncio.create_task(
                served.post("/v1/completions", prompt="x", max_tokens=100, ignore_eos=True)
            )
            await until(lambda: llm.stats().running)
            draining = asyncio.create_task(served.models.drain(10))
            await asyncio.sleep(0.01)
            answer = await served.post("/v1/completions", prompt="x")
            assert (answer.status_code, "shutting down" in answer.text) == (503, True)
            assert (await running).json()["usage"]["completion_tokens"] == 100
            assert await draining

    asyncio.run(scenario())


def test_metrics_are_there_for_prometheus() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            await served.post("/v1/completions", prompt="x", max_tokens=3, ignore_eos=True)
            answer = await served.client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain")
            line = 'vllm:generation_tokens_total{engine="0",model_name="toy"} 3.0'
            assert line in answer.text.splitlines()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_large_body_is_read_or_refused_for_its_number_of_arrays() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            read = await served.client.post("/v1/completions", json={"model": "none", "user": "x" * 100_000})
            assert read.status_code == 404
            body = b'{"prompt": [' + b"[]," * 200_000 + b"[]]}"
            refused = await served.client.post("/v1/completions", content=body)
            assert refused.status_code == 400
            assert "more than 200,000 arrays and objects" in refused.json()["error"]["message"]

    asyncio.run(scenario())

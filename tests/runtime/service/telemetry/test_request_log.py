"""Records of requests: their ids, facts and, only if asked for, their text."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from grpc_serving import code_of, read, serving
from http_serving import http_serving
from null_llm import null_llm

from carryall import logs
from carryall.proto import generation_pb2 as pb
from carryall.runtime.service.telemetry.request_log import RequestLog

CANARY = "xyzzy-canary"
SHORT: Any = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the service logs as JSON."""
    out, logger = io.StringIO(), logging.getLogger("carryall.runtime.service")
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonFormatter())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield out
    logger.removeHandler(handler)
    logger.setLevel(level)


def records(out: io.StringIO, **facts: Any) -> list[dict[str, Any]]:
    """The records that have these facts."""
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    return [line for line in lines if facts.items() <= line.items()]


@pytest.mark.parametrize("content", [False, True])
def test_http_requests_are_logged_by_id_and_without_text(content: bool, written: io.StringIO) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            served.models.observers.add(RequestLog(content=content))
            served.client.headers["X-Request-Id"] = "mine"
            whole = await served.post("/v1/completions", prompt=CANARY, **SHORT)
            assert whole.headers["x-request-id"] == "mine"
            text = whole.json()["choices"][0]["text"]
            await served.post("/v1/completions", prompt=CANARY, stream=True, **SHORT)
            (prompt_tokens,) = {len(llm.encode(CANARY))}
            found = records(written, request_id="mine", model="toy", completion_tokens=3)
            assert [one["prompt_tokens"] for one in found] == [prompt_tokens] * 2
            assert [one["finish_reason"] for one in found] == ["length"] * 2
            assert all(0 < one["first_token_seconds"] <= one["seconds"] for one in found)
            async with asyncio.timeout(30):  # the last line is written after the client has its last byte
                while len(records(written, request_id="mine", path="/v1/completions", status=200)) < 2:
                    await asyncio.sleep(0.01)
            if content:
                assert [(one["prompt"], one["answers"]) for one in found] == [(CANARY, [text])] * 2
            else:
                assert CANARY not in written.getvalue()
                assert text not in written.getvalue()
            bad = await served.post("/v1/completions", prompt=CANARY, top_p=7)
            assert bad.status_code == 400
            assert records(written, request_id="mine", status=400)

    asyncio.run(scenario())


def test_a_client_that_left_is_an_abort(written: io.StringIO) -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, http_serving(llm) as served:
            served.models.observers.add(RequestLog())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await served.post("/v1/completions", prompt="x", max_tokens=4000, ignore_eos=True)
            async with asyncio.timeout(30):
                while not records(written, finish_reason="abort", error="CancelledError"):
                    await asyncio.sleep(0.005)

    asyncio.run(scenario())


def test_grpc_calls_have_ids_too(written: io.StringIO) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(llm) as served:
            request = pb.GenerateRequest(text=CANARY, sampling=SHORT)
            call = served.stub.Generate(request, metadata=(("x-request-id", "mine"),))
            await read(call)
            assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
            path = "/carryall.v1.GenerationService/Generate"
            assert records(written, request_id="mine", path=path, status="OK", method="gRPC")
            bad = served.stub.Generate(pb.GenerateRequest(text="x", sampling={"top_p": 7}))
            assert (await code_of(read(bad)))[0].name == "INVALID_ARGUMENT"
            metadata = dict(await bad.trailing_metadata())
            assert "grpc-status-details-bin" in metadata
            (own,) = records(written, status="INVALID_ARGUMENT")
            assert own["request_id"] == metadata["x-request-id"]
            odd = served.stub.Generate(request, metadata=(("x-request-id", "a" * 200),))
            await read(odd)
            assert len(dict(await odd.trailing_metadata())["x-request-id"]) == 32
            endless = pb.GenerateRequest(text="x", sampling={"max_tokens": 4000, "ignore_eos": True})
            left = served.stub.Generate(endless, metadata=(("x-request-id", "left"),))
            await left.read()
            left.cancel()
            async with asyncio.timeout(30):
                while not records(written, request_id="left", status="CANCELLED"):
                    await asyncio.sleep(0.005)
            assert CANARY not in written.getvalue()

    asyncio.run(scenario())

"""A timeout given on the wire ends the request, says why, and frees everything."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_serving import INFO, code_of, read, serving
from http_serving import http_serving
from null_llm import null_llm

from carryall.errors import RequestCancelled
from carryall.proto import generation_pb2 as pb
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.core.handler import LLMHandler
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.http.openai.chat import chat_request
from carryall.runtime.service.http.openai.completions import completion_request

SECONDS, TOKENS = 0.05, 4000  # of a thousandth of a second each, so that time is up long before
SLOW: dict[str, Any] = {"max_slots": 1, "step_seconds": 0.001}


def assert_free(llm: AsyncLLM) -> None:
    """Nothing runs, waits or holds KV for anybody."""
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.cancelled) == (0, 0, 2)
    assert stats.kv_tokens == stats.idle_kv_tokens
    llm.engine.check_integrity()


def test_grpc_says_that_the_deadline_ended_it() -> None:
    """Of two requests for one slot, the second is too late before it begins."""
    request = pb.GenerateRequest(
        text="def f(x):", timeout_seconds=SECONDS, sampling={"ignore_eos": True, "max_tokens": TOKENS}
    )

    async def scenario() -> None:
        async with null_llm(**SLOW) as llm, serving(llm) as served:
            calls = [served.stub.Generate(request) for _ in range(2)]
            for messages in await asyncio.gather(*map(read, calls)):
                assert messages[-1].finish_reason == pb.FINISH_REASON_TIMEOUT
                assert messages[-1].WhichOneof("stop_reason") is None
                assert sum(len(message.token_ids) for message in messages) < TOKENS
            assert_free(llm)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "request_of",
    [
        lambda options: completion_request({"prompt": "x", **options}),
        lambda options: chat_request({"messages": [{"role": "user", "content": "x"}], **options}),
    ],
    ids=["completions", "chat"],
)
def test_a_whole_answer_is_refused_with_the_reason(request_of: Any) -> None:
    request = request_of({"max_tokens": TOKENS, "timeout": SECONDS})

    async def scenario() -> None:
        async with null_llm(**SLOW) as llm:
            handler = LLMHandler()
            handler.ready(ServedModel(llm, INFO))
            for _ in range(2):
                with pytest.raises(RequestCancelled, match="timeout passed"):
                    await handler.complete(request)
            assert_free(llm)

    asyncio.run(scenario())


TALK = [{"role": "user", "content": "x"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": TOKENS, "timeout": SECONDS},
    "/v1/completions": {"prompt": "x", "max_tokens": TOKENS, "timeout": SECONDS},
    "/v1/responses": {"input": "x", "max_output_tokens": TOKENS, "timeout": SECONDS},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_ends_with_the_error(path: str) -> None:
    """None of these APIs has a finish reason for it, and clients refuse unknown ones."""

    async def scenario() -> None:
        async with null_llm(**SLOW) as llm, http_serving(llm) as served:
            events = await served.events(path, stream=True, ignore_eos=True, **STREAMS[path])
            last = events[-1].get("response", events[-1])
            assert "timeout passed" in last["error"]["message"]
            whole = await served.post(path, ignore_eos=True, **STREAMS[path])
            assert (whole.status_code, "timeout passed" in whole.text) == (499, True)
            assert_free(llm)

    asyncio.run(scenario())


def test_a_deadline_that_passes_in_the_queue_costs_no_work() -> None:
    """gRPC's own deadline, for a request whose turn does not come in time."""

    async def scenario() -> None:
        async with null_llm(**SLOW) as llm, serving(llm) as served:
            endless = pb.GenerateRequest(text="x", sampling={"ignore_eos": True, "max_tokens": TOKENS})
            running = served.stub.Generate(endless)
            await running.read()
            late = served.stub.Generate(pb.GenerateRequest(token_ids={"ids": [5] * 100}), timeout=SECONDS)
            code, _ = await code_of(read(late))
            assert code == grpc.StatusCode.DEADLINE_EXCEEDED
            running.cancel()
            async with asyncio.timeout(30):
                while llm.stats().cancelled < 2:
                    await asyncio.sleep(0.005)
            assert llm.stats().computed_tokens < 100  # those of the other request only
            assert_free(llm)

    asyncio.run(scenario())

"""A grammar that takes too much work while it generates is the request's fault, at every door."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_serving import code_of, read, serving
from http_serving import http_serving
from null_llm import null_llm

from carryall.proto import generation_pb2 as pb

# Ever more ways to read what was written: the work for a mask grows with the cube of the length.
FORM = {"grammar": "start: s /!/\ns: s s s | s s | /[a-z ]/ | /[a-z]/"}
OPTIONS: Any = {"temperature": 2.0, "seed": 1, "max_tokens": 400}
MESSAGE = "the grammar takes too much work; simplify it"
LIMIT = "limit 20000"


@pytest.mark.long
def test_http_answers_400_and_a_stream_ends_with_that_error() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": "x", "structured_output": FORM, **OPTIONS}),
        ("/v1/chat/completions", {**chat, "structured_output": FORM, **OPTIONS}),
    ]

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            for path, body in bodies:
                answer = await served.post(path, model="toy", **body)
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
                assert MESSAGE in error["message"]
                assert LIMIT in error["message"]
                events = await served.events(path, model="toy", stream=True, **body)
                assert events[-1]["error"] == error
            assert llm.stats().running == 0

    asyncio.run(scenario())


@pytest.mark.long
def test_grpc_ends_with_invalid_argument() -> None:
    sampling = {"structured_output": {"grammar": FORM["grammar"]}, **OPTIONS}
    request = pb.GenerateRequest(text="x", sampling=sampling)

    async def scenario() -> None:
        async with null_llm() as llm, serving(llm) as served:
            code, text = await code_of(read(served.stub.Generate(request)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert MESSAGE in text
            assert LIMIT in text

    asyncio.run(scenario())

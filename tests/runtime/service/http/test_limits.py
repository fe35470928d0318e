"""Budgets of API keys: requests, tokens, and the right to load models, over both transports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from api_keys import key_file
from grpc_serving import code_of, read, repository, serving
from http_serving import http_serving
from null_llm import null_llm

from carryall.client import AccessError, AsyncClient
from carryall.errors import QueueFullError
from carryall.proto import generation_pb2, kserve_pb2, kserve_pb2_grpc

ASK: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
SHORT: Any = {"max_tokens": 2, "ignore_eos": True}


def test_the_requests_of_a_key_are_limited(tmp_path: Path) -> None:
    file = key_file(tmp_path, few="requests_per_minute = 2", many="")

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, api_keys=file) as served:

            async def ask(key: str, path: str) -> Any:
                return await served.client.post(path, json={}, headers={"x-api-key": key})

            assert [(await ask("few-key", "/tokenize")).status_code for _ in range(2)] == [400, 400]
            refused = await ask("few-key", "/v1/messages")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "2 requests a minute" in refused.json()["error"]["message"]
            assert (await ask("many-key", "/v1/messages")).status_code == 400
            live = await served.client.get("/health/live", headers={"x-api-key": "few-key"})
            assert live.status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_a_key_are_limited(stream: bool, tmp_path: Path) -> None:
    file = key_file(tmp_path, few="tokens_per_day = 7")

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, api_keys=file) as served:
            served.client.headers["x-api-key"] = "few-key"
            answer = await served.post("/v1/completions", **{**ASK, "max_tokens": 1}, stream=stream)
            assert answer.status_code == 200  # 4 of 7 tokens
            answer = await served.post("/v1/completions", **ASK, stream=stream)
            assert answer.status_code == 200  # 11 of 7
            for path, body in (
                ("/v1/completions", {**ASK, "stream": stream}),
                ("/v1/embeddings", {"input": "x"}),
                ("/rerank", {"query": "x", "documents": ["y"]}),
                ("/score", {"text": "x", "continuations": ["y"]}),
            ):
                refused = await served.post(path, **body)
                assert (refused.status_code, "7 tokens a day" in refused.text) == (429, True), path
                assert int(refused.headers["retry-after"]) > 3600  # 5 of 7 a day
            assert (await served.post("/tokenize", prompt="x")).status_code == 200
            assert llm.stats().generated_tokens == 5

    asyncio.run(scenario())


def test_both_transports_share_the_budgets(tmp_path: Path) -> None:
    file = key_file(tmp_path, few="requests_per_minute = 3", other="")

    async def scenario() -> None:
        async with null_llm() as llm, serving(llm, repository(llm), api_keys=file) as served:
            metadata = (("x-api-key", "few-key"),)
            request = generation_pb2.GenerateRequest(text="x", sampling=SHORT)
            assert await read(served.stub.Generate(request, metadata=metadata))
            async with grpc.aio.insecure_channel(served.address) as channel:
                stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                asked = [kserve_pb2.ModelInferRequest(model_name="none", id=str(i)) for i in range(3)]
                answers = await read(stub.ModelStreamInfer(iter(asked), metadata=metadata))
                texts = sorted(answer.error_message for answer in answers)
            assert ["no model" in text for text in texts] == [True, True, False], texts
            assert "3 requests a minute" in texts[-1]
            code, details = await code_of(read(served.stub.Generate(request, metadata=metadata)))
            assert (code, "3 requests" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            async with AsyncClient(served.address, api_key="few-key", attempts=1) as client:
                with pytest.raises(QueueFullError):
                    await client.models()

    asyncio.run(scenario())


def test_only_admins_load_and_unload_models(tmp_path: Path) -> None:
    file = key_file(tmp_path, user="", boss="admin = true")

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, api_keys=file) as served:

            async def unload(key: str) -> int:
                path = "/v2/repository/models/toy/unload"
                return (await served.client.post(path, headers={"x-api-key": key})).status_code

            assert await unload("user-key") == 403
            assert served.models.models()[0].state == "ready"
            assert await unload("boss-key") == 200
            assert served.models.models()[0].state == "unloaded"

    asyncio.run(scenario())


def test_grpc_refuses_to_load_models_too(tmp_path: Path) -> None:
    file = key_file(tmp_path, user="")

    async def scenario() -> None:
        async with (
            null_llm() as llm,
            serving(llm, api_keys=file) as served,
            AsyncClient(served.address, api_key="user-key", attempts=1) as client,
        ):
            with pytest.raises(AccessError, match="admin = true"):
                await client.unload("toy")
            assert await client.models()

    asyncio.run(scenario())


def test_stored_responses_are_seen_by_their_key_alone(tmp_path: Path) -> None:
    file = key_file(tmp_path, me="", you="")

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, api_keys=file) as served:
            mine, yours = {"x-api-key": "me-key"}, {"x-api-key": "you-key"}
            body = {"model": "toy", "input": "x", "max_output_tokens": 2}
            made = await served.client.post("/v1/responses", json=body, headers=mine)
            path = f"/v1/responses/{made.json()['id']}"
            assert (await served.client.get(path, headers=yours)).status_code == 404
            assert (await served.client.delete(path, headers=yours)).status_code == 404
            after = {**body, "previous_response_id": made.json()["id"]}
            assert (await served.client.post("/v1/responses", json=after, headers=yours)).status_code == 404
            assert (await served.client.get(path, headers=mine)).status_code == 200

    asyncio.run(scenario())

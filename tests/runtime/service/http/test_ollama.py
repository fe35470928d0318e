"""Ollama's endpoints: lines of JSON, one a piece, the last with counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from encoder_kit import write_encoder
from grpc_serving import INFO
from http_serving import HttpServed, http_serving
from null_llm import null_llm

from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.text_encoder import TextEncoder
from carryall.runtime.models.model_source import ModelSummary
from carryall.runtime.service.core.chat import Conversation
from carryall.runtime.service.core.messages import Delta, GenerationRequest, Usage
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.http import ollama
from carryall.runtime.types.outputs import ToolCall
from carryall.runtime.types.sampling_params import SamplingParams

TURNS: Any = [{"role": "user", "content": "Hi"}]
OPTIONS: Any = {"temperature": 0, "num_predict": 12, "seed": -1, "num_ctx": 2048}


async def lines(served: HttpServed, path: str, **body: Any) -> list[Any]:
    answer = await served.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def expected(llm: AsyncLLM, prompt: Any) -> str:
    params = SamplingParams(temperature=0, max_tokens=12)
    *_, last = [output async for output in llm.generate(prompt, params)]
    return last.outputs[0].text


def test_a_chat_is_what_the_engine_gives_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            prompt = llm.encode("[user]Hi", add_special_tokens=False)
            text = await expected(llm, prompt)
            *pieces, end = await lines(
                served, "/api/chat", model="toy:latest", messages=TURNS, options=OPTIONS
            )
            assert "".join(piece["message"]["content"] for piece in pieces) == text
            assert len(pieces) > 1
            assert not any(piece["done"] for piece in pieces)
            assert (end["done"], end["done_reason"]) == (True, "length")
            assert (end["prompt_eval_count"], end["eval_count"]) == (len(prompt), 12)
            durations = [end[f"{part}_duration"] for part in ("prompt_eval", "eval")]
            assert min(durations) > 0
            assert end["eval_duration"] > 11 * 0.005e9  # eleven steps after the first token
            assert sum(durations) <= end["total_duration"]
            whole = await served.post("/api/chat", model="toy", messages=TURNS, options=OPTIONS, stream=False)
            assert whole.json()["message"] == {"role": "assistant", "content": text}

    asyncio.run(scenario())


@pytest.mark.parametrize("raw", [True, False])
def test_a_prompt_is_put_into_the_template_unless_it_is_raw(raw: bool) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            template = llm.encode("[system]S[user]x = 1", add_special_tokens=False)
            text = await expected(llm, "x = 1" if raw else template)
            body = {"model": "toy", "prompt": "x = 1", "system": "S", "raw": raw, "options": OPTIONS}
            *pieces, end = await lines(served, "/api/generate", **body)
            assert "".join(piece["response"] for piece in pieces) == text
            assert end["response"] == ""
            whole = (await served.post("/api/generate", stream=False, **body)).json()
            assert (whole["response"], whole["eval_count"]) == (text, 12)

    asyncio.run(scenario())


def test_a_format_is_held_to() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post("/api/chat", model="toy", messages=TURNS, format=schema, stream=False)
            assert json.loads(answer.json()["message"]["content"])["a"] in (1, 2)

    asyncio.run(scenario())


def test_models_are_listed_and_shown() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            listed = (await served.client.get("/api/tags")).json()["models"]
            assert [model["name"] for model in listed] == ["toy"]
            shown = (await served.post("/api/show", model="toy")).json()
            assert shown["model_info"]["onnx.context_length"] == 4096
            assert "version" in (await served.client.get("/api/version")).json()
            empty = (await served.post("/api/generate", model="toy")).json()
            assert (empty["done"], empty["done_reason"]) == (True, "load")

    asyncio.run(scenario())


SUMMARY = ModelSummary("llama", 7_340_032, "int4-fast", 5_600_000, "ab12", 1_700_000_000.0)


def test_lists_tell_family_size_and_quantization() -> None:
    async def scenario() -> None:
        async with null_llm() as llm:
            models = ModelRepository(
                {"toy": lambda: ServedModel(llm, INFO, summary=lambda: SUMMARY)}, aliases={"chat": "toy"}
            )
            async with http_serving(None, models) as served:
                listed = (await served.client.get("/api/tags")).json()["models"]
                assert [model["name"] for model in listed] == ["toy", "chat"]
                for model in listed:
                    assert (model["size"], model["digest"]) == (5_600_000, "ab12")
                    assert model["modified_at"].startswith("2023-11-14T22:13:20")
                    assert model["details"] == {
                        "parent_model": "",
                        "format": "onnx",
                        "family": "llama",
                        "families": ["llama"],
                        "parameter_size": "7.3M",
                        "quantization_level": "int4-fast",
                    }
                (running, _) = (await served.client.get("/api/ps")).json()["models"]
                assert (running["name"], running["size"], running["context_length"]) == (
                    "toy", 5_600_000, INFO.context_length,
                )  # fmt: skip
                shown = (await served.post("/api/show", model="toy")).json()
                assert shown["model_info"]["llama.context_length"] == INFO.context_length
                assert shown["model_info"]["general.parameter_count"] == 7_340_032
                await models.unload("toy")
                assert (await served.client.get("/api/ps")).json() == {"models": []}

    asyncio.run(scenario())


def test_a_model_that_is_served_counts_as_pulled() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            assert (await lines(served, "/api/pull", model="toy:latest"))[-1] == {"status": "success"}
            whole = await served.post("/api/pull", model="toy", stream=False)
            assert whole.json() == {"status": "success"}
            other = await served.post("/api/pull", model="gemma4")
            assert other.status_code == 404
            assert "carryall serve MODEL" in other.json()["error"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/api/create", "creates no models"),
        ("POST", "/api/copy", "--alias"),
        ("POST", "/api/push", "uploads no models"),
        ("DELETE", "/api/delete", "keep_alive 0"),
        ("POST", "/api/blobs/sha256:29fd", "carryall serve MODEL"),
    ],
)
def test_what_would_change_the_models_is_refused_in_words(method: str, path: str, message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.client.request(method, path, json={"model": "toy"})
            assert answer.status_code == 501
            assert answer.json().keys() == {"error"}
            assert message in answer.json()["error"]
            assert (await served.client.get("/api/tags")).json()["models"][0]["name"] == "toy"

    asyncio.run(scenario())


def test_an_encoder_counts_as_pulled(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    models = ModelRepository({"vectors": ModelLoader(lambda: TextEncoder(tmp_path), kind="encoder")})

    async def scenario() -> None:
        async with http_serving(None, models) as served:
            answer = await served.post("/api/pull", model="vectors", stream=False)
            assert answer.json() == {"status": "success"}

    asyncio.run(scenario())


def test_the_older_form_of_embeddings(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    models = ModelRepository({"vectors": ModelLoader(lambda: TextEncoder(tmp_path), kind="encoder")})

    async def scenario() -> None:
        async with http_serving(None, models) as served:
            several = (await served.post("/api/embed", model="vectors", input=["a b"])).json()
            single = (await served.post("/api/embeddings", model="vectors", prompt="a b")).json()
            assert single == {"embedding": several["embeddings"][0]}
            assert (await served.post("/api/embeddings", model="vectors")).json() == {"embedding": []}

    asyncio.run(scenario())


def test_vectors_are_cut_to_the_dimensions_that_are_asked_for(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    models = ModelRepository({"vectors": ModelLoader(lambda: TextEncoder(tmp_path), kind="encoder")})

    async def scenario() -> None:
        async with http_serving(None, models) as served:
            whole, cut = [
                (await served.post("/api/embed", model="vectors", input=["a", "b"], **more)).json()[
                    "embeddings"
                ]
                for more in ({}, {"dimensions": 3})
            ]
            for long, short in zip(whole, cut, strict=True):
                expected = np.array(long[:3]) / np.linalg.norm(long[:3])
                np.testing.assert_allclose(short, expected, rtol=1e-5)

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "change", "status", "message"),
    [
        ("/api/chat", {"model": "other"}, 404, "there are: toy"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400, "not base64"),
        ("/api/chat", {"format": "xml"}, 400, "'format' must be"),
        ("/api/chat", {"options": []}, 400, None),
        ("/api/chat", {"options": 3}, 400, "'options' must be"),
        ("/api/embed", {"input": "x"}, 501, "hidden states"),
    ],
)
def test_errors_have_ollama_s_shape(path: str, change: Any, status: int, message: str | None) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            body = {"model": "toy", "messages": TURNS, **change}
            answer = await served.post(path, **body)
            if message is None:  # an empty list counts as no options
                assert answer.status_code == 200
                return
            assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text

    asyncio.run(scenario())


def test_calls_are_sent_whole_when_they_end() -> None:
    handler: Any = SimpleNamespace(name="toy")
    lines = ollama._Lines(handler, GenerationRequest(prompt=Conversation([])), 0, chat_form=True)

    def calls(*pieces: ToolCall, **end: Any) -> list[Any]:
        delta = Delta(request_id="r", index=0, tool_calls=pieces, **end)
        found = [line["message"].get("tool_calls") for line in lines.of(delta)]
        return [call["function"] for each in found for call in each or []]

    assert calls(ToolCall("a", "one", '{"x":')) == []
    assert calls(ToolCall("", "", " 1}")) == []
    assert calls(ToolCall("b", "two", "{")) == [{"name": "one", "arguments": {"x": 1}}]
    assert calls(finish_reason="length", usage=Usage(1, 1, 0)) == [
        {"name": "two", "arguments": {"arguments": "{"}}
    ]

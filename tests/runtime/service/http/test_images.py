"""Models that read text only refuse images at every door that takes messages, in its shape of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from http_serving import http_serving
from null_llm import null_llm

Json = dict[str, Any]
REFUSED = "this model reads text only, not images"
URL = "data:image/png;base64,iVBORw0KGgo="
TEXT = {"type": "text", "text": "What is this?"}


def openai(answer: Json) -> str:
    assert answer["error"]["type"] == "invalid_request_error"
    return str(answer["error"]["message"])


def anthropic(answer: Json) -> str:
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    return str(answer["error"]["message"])


def ollama(answer: Json) -> str:
    assert list(answer) == ["error"]
    return str(answer["error"])


def user(*content: Json) -> list[Json]:
    return [{"role": "user", "content": list(content)}]


OPENAI = {"messages": user(TEXT, {"type": "image_url", "image_url": {"url": URL}})}
AUDIO = {"messages": user(TEXT, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})}
INPUT = {"type": "input_image", "image_url": URL}
CALL = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}
OLLAMA = {"messages": [{"role": "user", "content": "What is this?", "images": ["iVBORw0KGgo="]}]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "message", "told"),
    [
        ("/v1/chat/completions", OPENAI, openai, REFUSED),
        ("/v1/chat/completions", {**OPENAI, "stream": True}, openai, REFUSED),
        ("/v1/chat/completions", AUDIO, openai, "'input_audio'"),
        ("/tokenize", OPENAI, openai, REFUSED),
        ("/v1/responses", {"input": user(INPUT)}, openai, REFUSED),
        ("/v1/responses", {"input": user(INPUT), "stream": True}, openai, REFUSED),
        (
            "/v1/responses",
            {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [INPUT]}]},
            openai,
            REFUSED,
        ),
        ("/v1/messages", {"messages": user(TEXT, IMAGE), "max_tokens": 5}, anthropic, REFUSED),
        ("/v1/messages", {"messages": user(RESULT), "max_tokens": 5}, anthropic, REFUSED),
        ("/v1/messages/count_tokens", {"messages": user(IMAGE)}, anthropic, REFUSED),
        ("/api/chat", OLLAMA, ollama, REFUSED),
        ("/api/generate", {"prompt": "What is this?", "images": ["iVBORw0KGgo="]}, ollama, REFUSED),
        (
            "/api/generate",
            {"prompt": "Hm?", "images": ["iVBORw0KGgo="], "raw": True},
            ollama,
            "a raw prompt is text, and takes no images",
        ),
    ],
)
def test_images_are_refused(path: str, body: Json, message: Callable[[Json], str], told: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post(path, **body)
            assert answer.status_code == 400
            assert told in message(answer.json())
            assert llm.stats().finished == 0

    asyncio.run(scenario())

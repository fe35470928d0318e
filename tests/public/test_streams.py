"""Public reports of answers over HTTP: streams, reasons, usage, log probabilities, seeds."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm

from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import load_served_model
from carryall.runtime.service.http.openai.writing import chat_logprobs, completion_logprobs
from carryall.runtime.types.outputs import Logprob

CHAT = "/v1/chat/completions"
TURNS = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "toy", "messages": TURNS, "max_tokens": 8, "ignore_eos": True, "seed": 3}


def with_service(check: Callable[[HttpServed], Awaitable[None]]) -> None:
    """Run a check against a served toy model."""

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            await check(served)

    asyncio.run(scenario())


async def chunks(served: HttpServed, **options: Any) -> list[Any]:
    events = await served.events(CHAT, **{**ASKED, "stream": True, **options})
    assert events[-1] == "[DONE]"
    return events[:-1]


@pytest.mark.parametrize(
    "source",
    # An empty text in place of null, or no such field, where an answer goes on.
    ["sgl-project/sglang#3912", "ollama/ollama#4357", "mudler/LocalAI#1194", "vllm-project/vllm#19662"],
)
def test_only_the_end_of_an_answer_has_a_reason(source: str) -> None:
    async def check(served: HttpServed) -> None:
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in await chunks(served)]
        assert reasons == [None] * (len(reasons) - 1) + ["length"], source

    with_service(check)


@pytest.mark.parametrize(
    "source",
    [
        # Choices without an element were sent to clients that had not asked for usage.
        "openclaw/openclaw#14442",
        # Usage counted tokens that were never sent, and the reason never came.
        "anomalyco/opencode#43379",
        "earendil-works/pi#7441",
    ],
)
def test_usage_comes_where_it_is_asked_for_and_counts_what_was_sent(source: str) -> None:
    async def check(served: HttpServed) -> None:
        plain = await chunks(served)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in plain), source
        *pieces, last = await chunks(served, stream_options={"include_usage": True}, logprobs=True)
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
        sent = [
            token
            for piece in pieces
            for token in (piece["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert len(sent) == 8
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"

    with_service(check)


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        # The alternatives of the first token were repeated for each.
        "sgl-project/sglang#5761",
        # Each alternative had the name of the chosen token.
        "vllm-project/vllm#42887",
        # One alternative too few.
        "InternLM/lmdeploy#1548",
        # Two tokens in a piece, alternatives of the first one only.
        "sgl-project/sglang#2825",
        # Probabilities of the first token were positive.
        "togethercomputer/openapi#5",
        # A nucleus made alternatives minus infinite, which is no JSON.
        "sgl-project/sglang#5984",
    ],
)
def test_alternatives_are_those_of_their_token(source: str) -> None:
    async def check(served: HttpServed) -> None:
        options = {"logprobs": True, "top_logprobs": 5, "temperature": 0.7, "top_p": 0.3}
        whole = (await served.post(CHAT, **ASKED, **options)).json()["choices"][0]["logprobs"]["content"]
        pieces = await chunks(served, **options)
        streamed = [
            token
            for piece in pieces
            for token in (piece["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == whole, source
        assert len({json.dumps(token["top_logprobs"]) for token in whole}) == len(whole) == 8
        for token in whole:
            alternatives = token["top_logprobs"]
            assert len(alternatives) == 5 == len({bytes(each["bytes"]) for each in alternatives})
            values = [each["logprob"] for each in alternatives]
            assert values == sorted(values, reverse=True)
            assert max(values) <= 0 < sum(np.exp(values)) <= 1 + 1e-6
            assert {each["token"]: each["logprob"] for each in alternatives}[token["token"]] == token[
                "logprob"
            ]

    with_service(check)


def test_a_seed_holds_beside_requests_without_one() -> None:
    """vllm-project/vllm#51226, #6197: it held only where all requests of a batch had one."""

    async def check(served: HttpServed) -> None:
        async def text(**options: Any) -> str:
            answer = (await served.post(CHAT, **{**ASKED, "temperature": 1.5, **options})).json()
            return str(answer["choices"][0]["message"]["content"])

        alone = await text()
        several = await asyncio.gather(text(), *(text(seed=None) for _ in range(3)), text(seed=4), text())
        assert (several[0], several[-1]) == (alone, alone)
        assert len(set(several)) > 2

    with_service(check)


@pytest.mark.parametrize(
    "source",
    # The draws of several answers began with the request's seed each: all answers were one.
    ["tenstorrent/tt-metal#53077", "ollama/ollama#5045"],
)
def test_several_answers_of_a_seed_differ_and_come_again(source: str) -> None:
    async def check(served: HttpServed) -> None:
        async def texts() -> list[str]:
            answer = (await served.post(CHAT, **ASKED, n=4, temperature=1.5)).json()
            return [choice["message"]["content"] for choice in answer["choices"]]

        first = await texts()
        assert len(set(first)) == 4, source
        assert await texts() == first

    with_service(check)


@pytest.mark.parametrize(
    ("source", "options", "reason", "tokens"),
    [
        ("vectorch-ai/ScaleLLM#304", {"ignore_eos": True, "max_tokens": 20}, "length", 20),
        ("huggingface/text-generation-inference#1544", {"ignore_eos": True, "max_tokens": 12}, "length", 12),
        # An answer at the limit was said to have been stopped.
        ("ggml-org/llama.cpp#7198", {"max_tokens": 1}, "length", 1),
    ],
)
def test_the_limit_of_tokens_is_kept_and_told(
    source: str, options: dict[str, Any], reason: str, tokens: int
) -> None:
    async def check(served: HttpServed) -> None:
        answer = (await served.post(CHAT, **{**ASKED, **options})).json()
        assert answer["choices"][0]["finish_reason"] == reason, source
        assert answer["usage"]["completion_tokens"] == tokens

    with_service(check)


def test_tokens_of_one_text_stay_several() -> None:
    """sgl-project/sglang#32290: the last of them, the least likely, replaced the others."""
    entries = {
        65: Logprob(65, -0.5, 1, "A"),
        300: Logprob(300, -2.0, 2, "A"),
        7: Logprob(7, -3.0, 3, "\ufffd", (0xC3,)),
        8: Logprob(8, -4.0, 4, "\ufffd", (0xC4,)),
    }
    (top,) = completion_logprobs([65], [entries])["top_logprobs"]
    assert top == {"A": -0.5, "token_id:300": -2.0, "bytes:\\xc3": -3.0, "bytes:\\xc4": -4.0}
    (listed,) = (chat_logprobs([65], [entries], 4) or {})["content"]
    assert [each["logprob"] for each in listed["top_logprobs"]] == [-0.5, -2.0, -3.0, -4.0]


@pytest.mark.parametrize(
    "source",
    # Floats came where base64 was asked for; another name was not refused.
    ["runpod-workers/worker-infinity-embedding#30", "lmstudio-ai/lmstudio-bug-tracker#756"],
)
def test_vectors_have_the_encoding_that_was_asked_for(source: str) -> None:
    async def scenario() -> None:
        models = ModelRepository.of_one("draft", lambda: load_served_model("draft", max_slots=2))
        async with http_serving(None, models) as served:

            async def vector(**options: Any) -> Any:
                answer = await served.post("/v1/embeddings", model="draft", input="a b", **options)
                assert answer.status_code == 200, answer.text
                return answer.json()["data"][0]["embedding"]

            floats = await vector()
            packed = np.frombuffer(base64.b64decode(await vector(encoding_format="base64")), "<f4")
            np.testing.assert_array_equal(packed, np.array(floats, np.float32), source)
            refused = await served.post("/v1/embeddings", model="draft", input="a", encoding_format="md5")
            assert refused.status_code == 400
            assert "encoding_format" in refused.json()["error"]["message"]
        models.close()

    asyncio.run(scenario())

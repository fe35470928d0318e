"""The endpoints of text-generation-inference."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_serving import http_serving
from null_llm import null_llm

from carryall.runtime.types.sampling_params import SamplingParams

ASK: Any = {"inputs": "def f(x):", "parameters": {"max_new_tokens": 12}}


def test_a_continuation_is_the_greedy_one_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
            *_, last = [output async for output in llm.generate(ASK["inputs"], params)]
            expected = last.outputs[0]
            whole = (await served.post("/generate", **ASK)).json()
            assert whole == {"generated_text": expected.text}
            parameters = {"max_new_tokens": 12, "details": True, "return_full_text": True}
            full = (await served.post("/generate", inputs="def f(x):", parameters=parameters)).json()
            assert full["generated_text"] == "def f(x):" + expected.text
            assert full["details"]["finish_reason"] == "length"
            assert [token["id"] for token in full["details"]["tokens"]] == expected.token_ids
            events = await served.events("/generate_stream", **ASK)
            assert [one["token"]["id"] for one in events] == expected.token_ids
            assert "".join(one["token"]["text"] for one in events) == expected.text
            own = [entry[token].logprob for entry, token in zip(expected.logprobs or [], expected.token_ids,
                                                                  strict=True)]  # fmt: skip
            assert [one["token"]["logprob"] for one in events] == pytest.approx(own)
            assert events[-1]["generated_text"] == expected.text
            assert events[-1]["details"]["generated_tokens"] == 12
            assert {one["generated_text"] for one in events[:-1]} == {None}
            assert (await served.post("/", **ASK)).json() == [{"generated_text": expected.text}]
            assert len(await served.events("/", stream=True, **ASK)) == 12

    asyncio.run(scenario())


def test_prompts_are_truncated_and_their_tokens_and_the_likeliest_ones_are_reported() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            prompt = llm.encode(ASK["inputs"])[-3:]
            params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0)
            *_, expected = [output async for output in llm.generate(prompt, params)]
            asked = {"max_new_tokens": 4, "truncate": 3, "top_n_tokens": 2}
            parameters = {**asked, "details": True, "decoder_input_details": True}
            whole = (await served.post("/generate", inputs=ASK["inputs"], parameters=parameters)).json()
            details = whole["details"]
            assert whole["generated_text"] == expected.outputs[0].text
            assert [one["id"] for one in details["prefill"]] == prompt
            assert "".join(one["text"] for one in details["prefill"]) == llm.decode(prompt)
            own = [(entry or {})[token].logprob for entry, token in zip((expected.prompt_logprobs or [])[1:],
                                                                        prompt[1:], strict=True)]  # fmt: skip
            assert details["prefill"][0]["logprob"] is None
            assert [one["logprob"] for one in details["prefill"][1:]] == pytest.approx(own)
            likeliest = [
                [
                    token
                    for token, one in sorted(entry.items(), key=lambda pair: pair[1].rank)
                    if one.rank <= 2
                ]
                for entry in expected.outputs[0].logprobs or []
            ]
            assert [[one["id"] for one in top] for top in details["top_tokens"]] == likeliest
            events = await served.events("/generate_stream", inputs=ASK["inputs"], parameters=asked)
            assert [one["top_tokens"] for one in events] == details["top_tokens"]
            assert [one["token"]["id"] for one in events] == expected.outputs[0].token_ids
            assert events[-1]["details"]["input_length"] == 3
            long = {**asked, "truncate": 4096}  # more than there are: nothing is cut
            answer = await served.post("/generate", inputs="a", parameters={**long, "details": True})
            assert answer.status_code == 200

    asyncio.run(scenario())


def test_a_grammar_is_held_to() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            parameters = {"grammar": {"type": "regex", "value": "a{3}|b{4}"}, "do_sample": True}
            answer = await served.post("/generate", inputs="x", parameters=parameters)
            assert answer.json()["generated_text"] in ("aaa", "bbbb")
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
            parameters = {"grammar": {"type": "json", "value": schema}}
            answer = await served.post("/generate", inputs="x", parameters=parameters)
            assert json.loads(answer.json()["generated_text"]) == {}

    asyncio.run(scenario())


def test_unknown_parameters_are_ignored_with_a_header_or_refused() -> None:
    body = {"inputs": "x", "parameters": {"max_new_tokens": 1, "watermark_seed": 3}, "cache": True}

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post("/generate", **body)
            assert answer.status_code == 200
            assert answer.headers["x-carryall-ignored-fields"] == "cache, parameters.watermark_seed"
        async with null_llm() as llm, http_serving(llm, strict=True) as served:
            answer = await served.post("/generate", **body)
            assert (answer.status_code, "parameters.watermark_seed" in answer.json()["error"]) == (400, True)

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'inputs' must be a string"),
        ({"inputs": "x", "parameters": {"watermark": "yes"}}, "watermark must be"),
        ({"inputs": "x", "parameters": {"truncate": 0}}, "'truncate' must be an integer of at least 1"),
        ({"inputs": "x", "parameters": {"top_n_tokens": 1000, "details": True}}, "logprobs"),
        ({"inputs": "x", "parameters": {"decoder_input_details": True}}, "needs 'details': true"),
        ({"inputs": "x", "parameters": {"grammar": "x"}}, "'grammar' must have"),
        ({"inputs": "x", "parameters": {"temperature": -1}}, "temperature"),
    ],
)
def test_errors_have_their_shape(body: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post("/generate", **body)
            error = answer.json()
            assert (answer.status_code, error["error_type"]) == (400, "validation")
            assert message in error["error"]

    asyncio.run(scenario())

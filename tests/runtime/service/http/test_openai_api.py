"""OpenAI's endpoints over a real socket, most of them through OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest
from http_serving import http_serving
from null_llm import null_llm

from carryall.runtime.types.sampling_params import SamplingParams

PROMPT = "def f(x):"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
TURNS: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 5}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}},
]


def test_a_completion_is_what_the_engine_gives_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = served.openai()
            params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
            *_, expected = [output async for output in llm.generate(PROMPT, params)]
            options = {"model": "toy", "prompt": PROMPT, "extra_body": {"ignore_eos": True}, **GREEDY}
            whole = await client.completions.create(logprobs=2, **options)
            (choice,) = whole.choices
            assert (choice.text, choice.finish_reason) == (expected.outputs[0].text, "length")
            own = [
                entry[token].logprob
                for entry, token in zip(
                    expected.outputs[0].logprobs or [], expected.outputs[0].token_ids, strict=True
                )
            ]
            assert choice.logprobs.token_logprobs == pytest.approx(own)
            assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
            stream = await client.completions.create(
                stream=True, stream_options={"include_usage": True}, logprobs=2, **options
            )
            chunks = [chunk async for chunk in stream]
            pieces = [chunk.choices[0] for chunk in chunks[:-1]]
            assert "".join(piece.text for piece in pieces) == choice.text
            assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == "length"
            assert [
                logprob for piece in pieces for logprob in piece.logprobs.token_logprobs
            ] == choice.logprobs.token_logprobs
            assert [
                offset for piece in pieces for offset in piece.logprobs.text_offset
            ] == choice.logprobs.text_offset
            assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)
            assert len({chunk.id for chunk in chunks}) == 1

    asyncio.run(scenario())


def test_several_prompts_and_continuations_are_numbered_in_order() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = served.openai()
            tokens = llm.encode("x = 1")
            extra = {"ignore_eos": True}
            options: Any = {"model": "toy", "max_tokens": 5, "seed": 3, "extra_body": extra}
            both = await client.completions.create(prompt=[PROMPT, "x = 1"], n=2, **options)
            assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
            alone = [
                await client.completions.create(prompt=prompt, n=2, **options)
                for prompt in (PROMPT, [tokens])
            ]
            texts = [choice.text for one in alone for choice in one.choices]
            assert [choice.text for choice in both.choices] == texts
            assert len(set(texts)) > 1
            assert both.usage.completion_tokens == 20
            assert both.usage.prompt_tokens == len(llm.encode(PROMPT)) + len(tokens)
            streamed = [""] * 4
            async for chunk in await client.completions.create(
                prompt=[PROMPT, "x = 1"], n=2, stream=True, **options
            ):
                streamed[chunk.choices[0].index] += chunk.choices[0].text
            assert streamed == texts

    asyncio.run(scenario())


@pytest.mark.parametrize("most", [0, 1])
def test_echo_gives_the_prompts_log_probabilities_as_lm_eval_reads_them(most: int) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            tokens = llm.encode("def f(x): return x")
            asked: dict[str, Any] = {"model": "toy", "prompt": [tokens], "echo": True, "max_tokens": most,
                                     "logprobs": 1, "temperature": 0}  # fmt: skip
            answer = await served.openai().completions.create(**asked)
            (choice,) = answer.choices
            logprobs = choice.logprobs
            assert len(logprobs.tokens) == len(tokens) + most
            assert "".join(logprobs.tokens) == choice.text
            assert logprobs.token_logprobs[0] is None
            score = await llm.score("def", " f(x): return x")
            start = len(llm.encode("def"))
            assert logprobs.token_logprobs[start : len(tokens)] == pytest.approx(score[0].token_logprobs)
            assert answer.usage.completion_tokens == most
            stream = {"stream": True, "stream_options": {"include_usage": True}}
            *_, last, done = await served.events("/v1/completions", **asked, **stream)
            assert (last["usage"]["completion_tokens"], done) == (most, "[DONE]")

    asyncio.run(scenario())


def test_a_chat_is_streamed_in_openai_s_chunks() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            client = served.openai()
            options = {"model": "toy", "messages": TURNS, "extra_body": {"ignore_eos": True}, **GREEDY}
            whole = await client.chat.completions.create(logprobs=True, top_logprobs=2, **options)
            message = whole.choices[0].message
            assert whole.usage.completion_tokens == 12
            assert len(whole.choices[0].logprobs.content) == 12
            assert [len(entry.top_logprobs) for entry in whole.choices[0].logprobs.content] == [2] * 12
            stream = await client.chat.completions.create(
                stream=True, stream_options={"include_usage": True}, logprobs=True, **options
            )
            chunks = [chunk async for chunk in stream]
            first, *middle, end, usage = chunks
            assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
            assert "".join(chunk.choices[0].delta.content for chunk in middle) == message.content
            assert len([e for chunk in middle for e in chunk.choices[0].logprobs.content]) == 12
            assert end.choices[0].finish_reason == "length"
            assert (usage.choices, usage.usage.completion_tokens) == ([], 12)
            assert chunks[1].usage is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": ["ab", "cd"]}),
        ("completions", {"prompt": "ab", "n": 2}),
        ("chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
    ],
)
def test_the_last_text_and_the_end_are_one_chunk(path: str, asked: Any) -> None:
    async def chunks(host: str) -> list[bytes]:
        """The chunks of the transfer encoding."""
        body = json.dumps({**asked, "max_tokens": 5, "ignore_eos": True, "stream": True})
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write((head + body).encode())
        await reader.readuntil(b"\r\n\r\n")
        found = []
        while size := int(await reader.readline(), 16):
            found.append((await reader.readexactly(size + 2))[:-2])
        writer.close()
        return found

    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            *earlier, last = await chunks(served.url.removeprefix("http://"))
            assert earlier
            assert not any(b"[DONE]" in one for one in earlier)
            assert b'"finish_reason":"length"' in last
            assert last.endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


def test_usage_may_be_stated_all_along() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            chunks = await served.events(
                "/v1/chat/completions",
                **{"messages": TURNS, "stream": True, "ignore_eos": True, **GREEDY},
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
            assert chunks.pop() == "[DONE]"
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-1] == 12
            assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "now"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_a_demanded_tool_call_cannot_be_missed(choice: Any, names: set[str]) -> None:
    """The model answers at random, and its template knows no tools; the grammar leaves it no choice."""
    import json

    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm, http_serving(llm) as served:
            client = served.openai()
            options: Any = {"model": "toy", "messages": TURNS, "tools": TOOLS, "tool_choice": choice}
            options |= {"parallel_tool_calls": False, "seed": 5}
            whole = await client.chat.completions.create(**options)
            assert whole.choices[0].finish_reason == "tool_calls"
            assert whole.choices[0].message.content is None
            (call,) = whole.choices[0].message.tool_calls
            assert call.function.name in names
            json.loads(call.function.arguments)
            name, arguments, pieces = "", "", 0
            async for chunk in await client.chat.completions.create(stream=True, **options):
                for delta in chunk.choices[0].delta.tool_calls or []:
                    assert delta.index == 0
                    name += delta.function.name or ""
                    arguments += delta.function.arguments
                    pieces += 1
                reason = chunk.choices[0].finish_reason
            assert (name, arguments) == (call.function.name, call.function.arguments)
            assert (pieces > 1, reason) == (True, "tool_calls")

    asyncio.run(scenario())


def test_a_response_format_is_held_to() -> None:
    import json

    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.openai().chat.completions.create(
                model="toy",
                messages=TURNS,
                seed=1,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )
            assert set(json.loads(answer.choices[0].message.content)) == {"a"}

    asyncio.run(scenario())


def test_models_are_listed_with_their_context() -> None:
    from carryall.runtime.service.core.repository import ModelRepository

    async def scenario() -> None:
        from grpc_serving import INFO

        from carryall.runtime.service.core.served_model import ServedModel

        async with null_llm() as llm:
            models = ModelRepository.of_one("toy", lambda: ServedModel(llm, INFO), aliases={"org/toy": "toy"})
            async with http_serving(None, models) as served:
                listed = [model async for model in await served.openai().models.list()]
                assert [(model.id, model.max_model_len) for model in listed] == [
                    ("toy", 4096),
                    ("org/toy", 4096),
                ]
                assert (await served.openai().models.retrieve("org/toy")).root == "toy"
                answer = await served.openai().completions.create(model="org/toy", prompt="x", max_tokens=1)
                assert answer.model == "toy"

    asyncio.run(scenario())


def test_other_models_are_not_found_unless_any_name_will_do() -> None:
    import openai

    async def scenario() -> None:
        async with null_llm() as llm:
            async with http_serving(llm) as served:
                with pytest.raises(openai.NotFoundError, match="there are: toy") as caught:
                    await served.openai().completions.create(model="gpt-5", prompt="x")
                assert caught.value.code == "model_not_found"
            async with http_serving(llm, any_model_name=True) as served:
                answer = await served.openai().completions.create(model="gpt-5", prompt="x", max_tokens=1)
                assert answer.model == "toy"

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(encoding: str) -> None:
    from carryall.runtime.service.core.repository import ModelRepository
    from carryall.runtime.service.core.served_model import load_served_model

    async def scenario() -> None:
        models = ModelRepository.of_one("draft", lambda: load_served_model("draft", max_slots=2))
        async with http_serving(None, models) as served:
            handler = models.llm()
            expected = await handler.embed(["def f", "x = 1"])
            answer = await served.post(
                "/v1/embeddings", model="draft", input=["def f", "x = 1"], encoding_format=encoding
            )
            found = [entry["embedding"] for entry in answer.json()["data"]]
            if encoding == "base64":
                found = [np.frombuffer(base64.b64decode(one), "<f4") for one in found]
            np.testing.assert_allclose(found, expected.vectors, atol=1e-6)
            short = await served.openai().embeddings.create(model="draft", input="def f", dimensions=4)
            assert len(short.data[0].embedding) == 4
            assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-5)
            assert short.usage.prompt_tokens == len(await handler.tokenize("def f"))
        models.close()

    asyncio.run(scenario())

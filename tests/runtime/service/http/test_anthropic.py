"""Anthropic's messages, through Anthropic's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm

from carryall.runtime.types.sampling_params import SamplingParams

TURNS: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client_of(served: HttpServed) -> Any:
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
    served.closing.push_async_callback(client.close)
    return client


@pytest.mark.long
def test_a_message_is_what_the_engine_gives_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            client = client_of(served)
            options: Any = {
                "model": "toy",
                "system": "Be kind.",
                "messages": TURNS,
                "extra_body": {"temperature": 0},
            }
            whole = await client.messages.create(max_tokens=12, **options)
            prompt = llm.encode("[system]Be kind.[user]Hi", add_special_tokens=False)
            *_, expected = [
                output async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))
            ]
            assert whole.content[0].text == expected.outputs[0].text
            assert whole.stop_reason == "max_tokens"
            cached = whole.usage.cache_read_input_tokens or 0
            assert (whole.usage.input_tokens + cached, whole.usage.output_tokens) == (len(prompt), 12)
            async with client.messages.stream(max_tokens=12, **options) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == final.content[0].text == whole.content[0].text
            assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
            count = await client.messages.count_tokens(
                **{k: options[k] for k in ("model", "system", "messages")}
            )
            assert count.input_tokens == len(prompt)

    asyncio.run(scenario())


def test_a_stop_sequence_is_told() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = client_of(served)
            options: Any = {"model": "toy", "messages": TURNS, "max_tokens": 30}
            options["extra_body"] = {"temperature": 0}
            text = (await client.messages.create(**options)).content[0].text
            stop = text[3:6]
            cut = await client.messages.create(stop_sequences=[stop], **options)
            assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
            assert cut.content[0].text == text[: text.index(stop)]

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_demanded_tool_is_used(choice: Any) -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm, http_serving(llm) as served:
            client = client_of(served)
            options: Any = {"model": "toy", "messages": TURNS, "tools": [TOOL], "max_tokens": 400}
            options["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
            whole = await client.messages.create(**options)
            (block,) = whole.content
            assert (block.type, block.name, whole.stop_reason) == ("tool_use", "weather", "tool_use")
            assert set(block.input) == {"city"}
            async with client.messages.stream(**options) as stream:
                kinds = [one.type async for one in stream]
                final = await stream.get_final_message()
            assert kinds.count("input_json") > 1
            assert set(final.content[0].input) == {"city"}

    asyncio.run(scenario())


def test_blocks_become_what_the_template_knows() -> None:
    from carryall.runtime.service.core.chat import Conversation
    from carryall.runtime.service.http.anthropic import read_body

    body = {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "S"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "dry"}],
                    },
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
        "tools": [TOOL],
        "metadata": {"user_id": "u"},
    }
    request = read_body(body, {"top_k": 3})
    function = {"name": "weather", "arguments": {"city": "Bonn"}}
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.turns() == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "content": "let me see",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "dry"},
        {"role": "user", "content": "thanks"},
    ]
    told = {"name": "weather", "parameters": TOOL["input_schema"], "description": "of a city"}
    assert request.prompt.tools == [{"type": "function", "function": told}]
    assert (request.params.top_k, request.params.max_tokens, request.tenant) == (3, 5, "u")


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "at least 1 message"),
        ({"messages": [{"role": "user", "content": []}]}, "at least 1 message with content"),
        (
            {"system": "Be brief.", "messages": [{"role": "user", "content": []}]},
            "at least 1 message with content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "an image must have"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "must be one of system, developer, user"),
        ({"tools": [{"name": "x"}]}, "an 'input_schema'"),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice' must be"),
        ({"tool_choice": {"type": "any"}}, "tools are: none"),
        ({"thinking": {"type": "deep"}}, "'thinking' must have"),
        ({"max_tokens": None}, "'max_tokens' is required"),
        ({"max_tokens": ...}, "'max_tokens' is required"),
    ],
)
def test_unsupported_requests_are_refused_in_anthropics_error_shape(
    change: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            body = {"messages": TURNS, "max_tokens": 5, **change}
            if body["max_tokens"] is ...:
                del body["max_tokens"]
            answer = await served.post("/v1/messages", **body)
            error = answer.json()
            assert (answer.status_code, error["type"]) == (400, "error")
            assert error["error"]["type"] == "invalid_request_error"
            assert message in error["error"]["message"]

    asyncio.run(scenario())


def test_a_budget_of_thoughts_is_an_option() -> None:
    from carryall.runtime.service.http.anthropic import read_body

    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 90}
    for thinking, effort, budget in (
        ({"type": "enabled", "budget_tokens": 64}, None, 64),
        ({"type": "enabled"}, None, None),
        ({"type": "disabled"}, None, None),
        ({"type": "adaptive"}, "medium", 45),
        ({"type": "enabled", "budget_tokens": 64}, "medium", 64),
    ):
        output = {"output_config": {"effort": effort}} if effort else {}
        request = read_body({**body, "thinking": thinking, **output}, {})
        assert request.params.reasoning_budget == budget


def test_the_line_that_changes_with_each_conversation_is_left_out() -> None:
    from carryall.runtime.service.core.chat import Conversation
    from carryall.runtime.service.http.anthropic import read_body

    def system(*texts: str) -> list[str]:
        blocks = [{"type": "text", "text": text} for text in texts]
        body = {"messages": [{"role": "user", "content": "x"}], "system": blocks, "max_tokens": 9}
        prompt = read_body(body, {}).prompt
        assert isinstance(prompt, Conversation)
        (first, *_) = prompt.turns()
        return [str(first["content"])] if first["role"] == "system" else []

    line = "x-anthropic-billing-header: cc_version=2.1.181.a3f; cc_entrypoint=cli; cch={};"
    assert system(line.format("1b2c3"), "You are an agent.") == ["You are an agent."]
    assert system(line.format("00000") + "\n\nYou are an agent.") == ["You are an agent."]
    assert line in system("You are an agent.", line)[0]  # behind other text it is the user's own
    assert system(line) == []

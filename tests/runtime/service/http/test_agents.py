"""Requests as coding agents send them: tools of every kind, their history, long waits, long prompts."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc_serving import serving
from http_serving import http_serving
from large_tools import large_tool
from null_llm import null_llm, null_model
from scripted_model import Call, Turn, scripted_llm

from carryall.proto import generation_pb2
from carryall.providers.base import Row
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.service.http import sse
from carryall.runtime.service.telemetry.request_log import RequestLog

IGNORED = "x-carryall-ignored-fields"
SHELL: Any = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string", "maxLength": 8}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. This is a FREEFORM tool.",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "*** Begin Patch" LF "*** End Patch" LF?\n%import common.LF\n',
    },
}
# As codex sends them.
CODEX: list[Any] = [
    SHELL,
    PATCH,
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}},
    {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [{**SHELL, "name": "look"}]},
]
HISTORY: list[Any] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"},
    {"type": "local_shell_call", "call_id": "c2", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "call_id": "c2", "output": "a.py"},
    {"type": "function_call", "call_id": "c3", "name": "look", "namespace": "mcp__docs", "arguments": ""},
    {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "found"}]},
]  # fmt: skip


def test_codex_s_tools_and_history_are_taken_and_hosted_ones_named() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = served.openai()
            raw = await client.responses.with_raw_response.create(
                model="toy", input=HISTORY, tools=CODEX, max_output_tokens=4, instructions="You are Codex."
            )
            named = "tools.web_search, tools.local_shell, tools.image_generation, tools.tool_search"
            assert raw.headers[IGNORED] == f"input.web_search_call, {named}"
            response = raw.parse()
            assert response.output_text
            assert [tool.type for tool in response.tools][:3] == ["function", "custom", "web_search"]

    asyncio.run(scenario())


@pytest.mark.long
def test_a_custom_tool_is_called_with_its_text_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = served.openai()
            choice = {"type": "custom", "name": "apply_patch"}
            options: Any = {"model": "toy", "input": "Fix it.", "tools": CODEX, "tool_choice": choice}
            options |= {"max_output_tokens": 200, "temperature": 0}
            (call,) = (await client.responses.create(**options)).output
            assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
            events = [event async for event in await client.responses.create(stream=True, **options)]
            kinds = [event.type for event in events]
            assert "response.custom_tool_call_input.delta" in kinds
            (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
            assert done.input == call.input
            result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done!"}
            again = [*HISTORY, call.model_dump(exclude_none=True), result]
            after = await client.responses.create(model="toy", input=again, tools=CODEX, max_output_tokens=2)
            assert after.status == "incomplete"

    asyncio.run(scenario())


@pytest.mark.long
def test_a_call_within_a_namespace_names_it() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            body = {"input": "x", "tools": CODEX, "tool_choice": {"type": "function", "name": "look"}}
            answer = await served.post("/v1/responses", model="toy", max_output_tokens=60, **body)
            (call,) = answer.json()["output"]
            assert (call["type"], call["name"], call["namespace"]) == ("function_call", "look", "mcp__docs")

    asyncio.run(scenario())


@pytest.mark.long
def test_a_custom_tool_of_a_chat_is_called_with_its_text() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = served.openai()
            tool: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
            answer = await client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "Fix it."}],
                tools=[tool],
                tool_choice={"type": "custom", "custom": {"name": "apply_patch"}},
                max_tokens=200,
            )
            (call,) = answer.choices[0].message.tool_calls
            assert (call.type, call.custom.name) == ("custom", "apply_patch")

    asyncio.run(scenario())


@pytest.mark.long
def test_claude_code_s_server_tools_are_left_out_and_named() -> None:
    async def scenario() -> None:
        from anthropic import AsyncAnthropic

        async with null_llm() as llm, http_serving(llm) as served:
            client = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
            served.closing.push_async_callback(client.close)
            schema = {"type": "object", "properties": {"a": {"type": "string"}}}
            search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
            found: Any = [{"type": "web_search_result", "title": "T", "url": "https://example.org"}]
            raw = await client.messages.with_raw_response.create(
                model="toy",
                max_tokens=4,
                tools=[
                    search,
                    {"type": "bash_20250124", "name": "bash"},
                    {"name": "Read", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
                ],
                messages=[
                    {"role": "user", "content": "Search."},
                    {
                        "role": "assistant",
                        "content": [
                            {
                                "type": "server_tool_use",
                                "id": "s",
                                "name": "web_search",
                                "input": {"query": "x"},
                            },
                            {"type": "web_search_tool_result", "tool_use_id": "s", "content": found},
                            {"type": "text", "text": "Found."},
                        ],
                    },
                    {"role": "user", "content": "Go on."},
                ],
            )
            assert raw.headers[IGNORED] == "tools.web_search_20250305, tools.bash_20250124"
            assert (await raw.parse()).content

    asyncio.run(scenario())


def test_strict_refuses_what_is_left_out() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, strict=True) as served:
            answer = await served.post("/v1/responses", model="toy", input="x", tools=CODEX)
            assert answer.status_code == 400
            assert "tools.web_search" in answer.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "tools": [{"kind": "x" * 11_000}]}),
        ("/v1/responses", {"input": [{"type": "message", "role": "x" * 11_000}]}),
        ("/v1/responses", {"input": "x", "tool_choice": {"type": "x" * 11_000}}),
        ("/v1/messages", {"max_tokens": 1, "messages": [], "thinking": {"type": "x" * 11_000}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x" * 11_000}]}]}),
        ("/v1/chat/completions", {"messages": [], "logit_bias": {"x" * 11_000: 1}}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "format": "x" * 11_000}),
    ],
)
def test_messages_of_errors_cut_values(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post(path, model="toy", **body)
            assert answer.status_code == 400
            assert len(json.dumps(answer.json())) < 600

    asyncio.run(scenario())


USER = [{"role": "user", "content": "x"}]
# What each API sends at once, and what it sends while the model reads the prompt.
STREAMS: list[Any] = [
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 2}, '"role":"assistant"', ": ping"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}, None, ": ping"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 2}, "response.in_progress", ": ping"),
    ("/v1/messages", {"messages": USER, "max_tokens": 2}, "message_start", "event: ping"),
    ("/api/chat", {"messages": USER, "options": {"num_predict": 2}}, None, '"content": ""'),
    ("/api/generate", {"prompt": "x", "raw": True, "options": {"num_predict": 2}}, None, '"response": ""'),
    ("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 2}}, None, ": ping"),
    ("/v2/models/toy/generate_stream", {"text_input": "x", "max_tokens": 2}, None, ": ping"),
]


@pytest.mark.long
@pytest.mark.parametrize(("path", "body", "opening", "ping"), STREAMS)
def test_a_stream_opens_and_pings_before_the_model_has_run(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], opening: str | None, ping: str
) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.05)
    may_run = threading.Event()

    def before_forward(rows: Sequence[Row]) -> None:
        assert may_run.wait(30)

    async def scenario() -> None:
        async with null_llm(before_forward=before_forward) as llm, http_serving(llm) as served:
            given = body if path.startswith(("/v2", "/gen")) else {"model": "toy", "stream": True, **body}
            text = ""
            try:
                async with served.client.stream("POST", path, json=given) as answer:
                    assert answer.status_code == 200
                    async for piece in answer.aiter_text():
                        text += piece
                        if text.count(ping) >= 2:
                            assert opening is None or text.index(opening) < text.index(ping)
                            may_run.set()
            finally:
                may_run.set()
            assert text.count(ping) >= 2
            after = text[text.rindex(ping) :]
            assert len(after) > 40  # the answer

    asyncio.run(scenario())


@pytest.mark.long
def test_pings_are_what_the_clients_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent second in the middle of a stream."""
    from anthropic import AsyncAnthropic

    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)

    async def scenario() -> None:
        async with null_llm(step_seconds=0.2) as llm, http_serving(llm) as served:
            openai = served.openai()
            chunks = await openai.chat.completions.create(
                model="toy", messages=USER, max_tokens=3, stream=True, temperature=0
            )
            said = [chunk.choices[0].delta.content or "" async for chunk in chunks]
            events = await openai.responses.create(
                model="toy", input="x", max_output_tokens=3, stream=True, temperature=0
            )
            assert [event.type async for event in events][-1] == "response.incomplete"
            client = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
            served.closing.push_async_callback(client.close)
            async with client.messages.stream(
                model="toy", messages=USER, max_tokens=3, extra_body={"temperature": 0}
            ) as stream:
                message = await stream.get_final_message()
            assert message.content[0].text == "".join(said) != ""

    asyncio.run(scenario())


def test_a_grpc_stream_opens_before_the_model_has_run() -> None:
    may_run = threading.Event()

    def before_forward(rows: Sequence[Row]) -> None:
        assert may_run.wait(30)

    async def scenario() -> None:
        async with null_llm(before_forward=before_forward) as llm, serving(llm) as served:
            call = served.stub.Generate(generation_pb2.GenerateRequest(text="x"))
            try:
                await asyncio.wait_for(call.initial_metadata(), 10)
            finally:
                may_run.set()
            assert "".join([message.text_delta async for message in call])

    asyncio.run(scenario())


def test_an_invalid_schema_still_has_a_status_of_its_own() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post(
                "/v1/chat/completions", model="toy", messages=USER, stream=True, response_format=form
            )
            assert answer.status_code == 400

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_known_as_such(stream: bool) -> None:
    """By its code in OpenAI's client, and by the words that Claude Code looks for in Anthropic's."""
    from anthropic import AsyncAnthropic
    from anthropic import BadRequestError as AnthropicError
    from openai import BadRequestError

    long: Any = [{"role": "user", "content": "x y " * 4000}]

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            openai = served.openai()
            for create, told in (
                (openai.chat.completions.create, {"messages": long}),
                (openai.responses.create, {"input": long}),
            ):
                with pytest.raises(BadRequestError) as caught:
                    await create(model="toy", stream=stream, **told)
                assert (caught.value.code, caught.value.type) == (
                    "context_length_exceeded",
                    "invalid_request_error",
                )
            client = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
            served.closing.push_async_callback(client.close)
            with pytest.raises(AnthropicError) as refused:
                await client.messages.create(model="toy", max_tokens=5, messages=long, stream=stream)
            found = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", refused.value.message)
            assert found is not None
            assert int(found[1]) > int(found[2]) == llm.context_length - 1

    asyncio.run(scenario())


@pytest.mark.long
def test_a_conversation_of_more_messages_than_tokens_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post(
                "/v1/chat/completions", model="toy", messages=[{"role": "user", "content": ""}] * 60_000
            )
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "it has 60000 messages" in error["message"]

    asyncio.run(scenario())


UNIQUE: Any = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 1}}}
SCHEMAS: list[Any] = [
    (
        "/v1/chat/completions",
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}},
        },
    ),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": UNIQUE}}},
    ),
    (
        "/v1/messages",
        {"messages": USER, "output_config": {"format": {"type": "json_schema", "schema": UNIQUE}}},
    ),
    (
        "/v1/messages",
        {
            "messages": USER,
            "tools": [{"name": "f", "input_schema": UNIQUE}],
            "tool_choice": {"type": "any"},
        },
    ),
    ("/api/chat", {"messages": USER, "format": UNIQUE, "stream": False, "options": {"num_predict": 3}}),
]


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("path", "body"), SCHEMAS)
def test_keywords_that_no_grammar_holds_are_named(path: str, body: dict[str, Any], strict: bool) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, strict=strict) as served:
            limit = {"/v1/responses": "max_output_tokens", "/api/chat": None}.get(path, "max_tokens")
            answer = await served.post(path, model="toy", **body, **({limit: 3} if limit else {}))
            if strict:
                assert answer.status_code == 400
                assert "schema.uniqueItems" in answer.text
            else:
                assert answer.status_code == 200, answer.text
                assert answer.headers[IGNORED] == "schema.uniqueItems"

    asyncio.run(scenario())


def test_models_have_anthropic_s_shape_for_its_client() -> None:
    from anthropic import AsyncAnthropic

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
            served.closing.push_async_callback(client.close)
            page = await client.models.list()
            assert [(model.id, model.type, model.display_name) for model in page.data] == [
                ("toy", "model", "toy")
            ]
            assert (page.has_more, page.first_id, page.last_id) == (False, "toy", "toy")
            one = await client.models.retrieve("toy")
            assert (one.id, one.created_at.tzinfo is not None) == ("toy", True)
            assert (await served.openai().models.list()).data[0].object == "model"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "options", [{"seed": -1}, {"max_tokens": -1}, {"top_k": -1}, {"seed": -7, "top_k": -1}]
)
def test_minus_one_means_none(options: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            body = {"stop": ["e"], "max_tokens": 20, **options}
            answer = await served.post("/v1/chat/completions", model="toy", messages=USER, **body)
            assert answer.status_code == 200, answer.text
            answer = await served.post("/v1/completions", model="toy", prompt="x", **body)
            assert answer.status_code == 200, answer.text

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", '"temperature": 1e999', "not inf"),
        ("/v1/chat/completions", '"max_tokens": -3', "max_tokens"),
        ("/v1/messages", '"max_tokens": 1, "system": 5', "system"),
    ],
)
def test_values_that_mean_nothing_are_errors(path: str, body: str, told: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.client.post(path, content=f'{{"messages": {json.dumps(USER)}, {body}}}')
            assert answer.status_code == 400
            assert told in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_request_that_is_left_is_logged_with_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    may_run = threading.Event()

    def before_forward(rows: Sequence[Row]) -> None:
        assert may_run.wait(30)

    async def scenario() -> None:
        async with null_llm(before_forward=before_forward) as llm, http_serving(llm) as served:
            served.models.observers.add(RequestLog(content=False))
            try:
                body = {"model": "toy", "messages": USER, "stream": True}
                async with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    assert answer.status_code == 200
                async with asyncio.timeout(30):
                    while not (lines := [r for r in caplog.records if r.name.endswith("request_log")]):
                        await asyncio.sleep(0.01)
            finally:
                may_run.set()
            fields = vars(lines[0])["fields"]
            count = len(llm.encode("[user]x", add_special_tokens=False))
            assert (fields["prompt_tokens"], fields["finish_reason"]) == (count, "abort")

    asyncio.run(scenario())


ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments.items() %}({{ name }}={{ value }}){% endfor %}"
    "{% endfor %}{% endfor %}{{ tools or '' }}"
)


@pytest.mark.parametrize(
    ("arguments", "told"), [("", ""), ('{"a": 1}', "(a=1)"), ('{"a": "cut', '(arguments={"a": "cut)')]
)
def test_cut_arguments_do_not_end_a_conversation(arguments: str, told: str) -> None:
    """Not even where the template reads objects only, as that of Qwen3-Coder."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]

    async def scenario() -> None:
        async with null_llm(template=ITEMS) as llm, http_serving(llm) as served:
            tokens = (await served.post("/tokenize", model="toy", messages=turns)).json()["tokens"]
            text = f"[user]x[assistant]{told}[tool]ok"
            assert tokens == llm.encode(text, add_special_tokens=False)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_client_that_reconnects_100_times_leaves_nothing_behind() -> None:
    """It asks for the same long prompt again and again, and closes each stream after its head."""
    talk = [{"role": "system", "content": "word " * 1200}, *USER]
    body: Any = {"model": "toy", "messages": talk, "max_tokens": 4, "temperature": 0, "stream": True}

    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, http_serving(llm) as served:
            for attempt in range(100):
                async with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    assert answer.status_code == 200
                    if attempt % 2:
                        await anext(answer.aiter_lines())
            while (stats := llm.stats()).running or stats.waiting:
                await asyncio.sleep(0.01)
            events = await served.events("/v1/chat/completions", **body)
            usage = events[-2].get("usage")
            after = llm.stats()
            assert (after.running, after.waiting, after.failed) == (0, 0, 0)
            assert after.cancelled + after.finished == 101
            # What was computed before a client left is kept: the prompt is computed about once.
            assert after.computed_tokens < 3 * 1200 + 100 * 8, usage
            said = "".join(
                choice["delta"].get("content") or "" for event in events[:-1] for choice in event["choices"]
            )
        async with null_llm() as llm, http_serving(llm) as served:
            again = (await served.post("/v1/chat/completions", **{**body, "stream": False})).json()
            assert again["choices"][0]["message"]["content"] == said

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "LONG"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "LONG"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "LONG"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "LONG"}]}),
    ],
)
def test_a_prompt_larger_than_the_pool_is_an_error_at_once(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """Also beside a request that fills it: nothing waits for room that cannot come."""

    async def scenario() -> None:
        pool = EngineConfig(kv_bytes=500 * 1024)  # of the toy model's 1,024 bytes a token
        llm = AsyncLLM(null_model(step_seconds=0.01), engine_config=pool)
        async with http_serving(llm) as served:
            beside = asyncio.create_task(served.post("/v1/completions", prompt="x", max_tokens=100))
            asked = json.loads(json.dumps(body).replace("LONG", "word " * 600))
            answer = await asyncio.wait_for(served.post(path, model="toy", stream=stream, **asked), 10)
            assert answer.status_code == 400
            assert "500" in answer.text
            assert not beside.done()
            assert (await beside).status_code == 200
        llm.shutdown()

    asyncio.run(scenario())


CUT_BODIES: list[Any] = [
    ("/v1/chat/completions", "max_tokens", {"messages": USER, "tools": [{"type": "function", "function": {
        key: SHELL[key] for key in ("name", "description", "parameters")}}]}),
    ("/v1/responses", "max_output_tokens", {"input": "x", "tools": [SHELL]}),
    ("/v1/messages", "max_tokens", {"messages": USER, "tools": [
        {"name": "exec_command", "input_schema": SHELL["parameters"]}]}),
]  # fmt: skip


def said(path: str, answer: Any) -> tuple[str, list[tuple[str, str]], bool]:
    """The text of an answer, its calls, and whether it was cut."""
    if path.endswith("messages"):
        blocks = answer["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        calls = [
            (block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"
        ]
        return "".join(texts), calls, answer["stop_reason"] == "max_tokens"
    if path.endswith("responses"):
        items = answer["output"]
        texts = [part["text"] for item in items for part in item.get("content", [])]
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        return "".join(texts), calls, answer["status"] == "incomplete"
    (choice,) = answer["choices"]
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return choice["message"]["content"] or "", calls, choice["finish_reason"] == "length"


@pytest.mark.long
@pytest.mark.parametrize(("path", "limit", "body"), CUT_BODIES)
def test_a_call_cut_at_any_token_leaves_no_markup(
    path: str, limit: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """First nothing is shown, then a call that is not complete; the answer says that it was cut."""

    def rule(turns: list[Turn]) -> Call:
        return Call("exec_command", {"cmd": "ls"})

    async def scenario() -> None:
        async with scripted_llm(tmp_path, rule) as llm, http_serving(llm) as served:
            shown = []
            for most in range(1, 60):
                answer = await served.post(path, model="toy", **{limit: most}, **body)
                text, calls, cut = said(path, answer.json())
                assert (answer.status_code, text) == (200, "")
                assert [name for name, _ in calls] in ([], ["exec_command"])
                shown.append(bool(calls))
                if not cut:
                    break
            assert json.loads(calls[0][1]) == {"cmd": "ls"}
            assert shown == sorted(shown)
            assert not shown[0]

    asyncio.run(scenario())


SIXTY = [large_tool(number) for number in range(60)]
CALLED = {"path_7": "src/a.py", "mode": "read"}
SIXTY_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER, "tools": SIXTY}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", **each["function"]} for each in SIXTY]}),
    ("/v1/messages", {"messages": USER, "max_tokens": 200, "tools": [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
        for each in SIXTY]}),
    ("/api/chat", {"messages": USER, "tools": SIXTY, "stream": False}),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("style", ["tagged objects", "parameters"])
def test_sixty_tools_with_large_schemas_are_called_by_their_schema(style: str, tmp_path: Path) -> None:
    """Of 100 kB, once the model begins a call; and each further request finds them in the cache."""
    assert len(json.dumps(SIXTY)) > 100_000

    async def scenario() -> None:
        async with (
            scripted_llm(tmp_path, lambda _: Call("tool_7", CALLED), style) as llm,
            http_serving(llm) as served,
        ):
            for path, body in SIXTY_BODIES:
                calls = []
                for _ in range(2):
                    answer = await served.post(path, model="toy", **body)
                    assert answer.status_code == 200, answer.text[:300]
                    assert IGNORED not in answer.headers
                    calls.append(calls_of(path, answer.json()))
                assert calls == [[("tool_7", CALLED)]] * 2, path
            demanded = {**SIXTY_BODIES[0][1], "tool_choice": "required", "max_tokens": 200}
            answer = await served.post("/v1/chat/completions", model="toy", **demanded)
            assert calls_of("/v1/chat/completions", answer.json())[0] == ("tool_7", CALLED)

    asyncio.run(scenario())


def calls_of(path: str, answer: Any) -> list[tuple[str, Any]]:
    """The names and arguments of an answer's calls."""
    if path == "/api/chat":
        return [
            (call["function"]["name"], call["function"]["arguments"])
            for call in answer["message"]["tool_calls"]
        ]
    return [(name, json.loads(arguments)) for name, arguments in said(path, answer)[1]]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_beta_headers_and_queries_of_anthropic_s_clients_change_nothing(path: str) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,unknown-2026-01-01"}

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, strict=True) as served:
            body = {"model": "toy", "messages": USER, "max_tokens": 4, "temperature": 0}
            if path.endswith("count_tokens"):
                del body["max_tokens"], body["temperature"]
            plain = await served.post(path, **body)
            beta = await served.client.post(f"{path}?beta=true", json=body, headers=headers)
            assert plain.status_code == beta.status_code == 200, beta.text
            kept = [{**each.json(), "id": "", "usage": None} for each in (plain, beta)]
            assert kept[0] == kept[1]

    asyncio.run(scenario())

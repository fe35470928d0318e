"""Tool calls that a model makes by itself are passed on as they arrive, in each API."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from grpc_serving import serving
from http_serving import HttpServed, http_serving
from null_llm import TEMPLATE, null_llm

from carryall.client import AsyncClient
from carryall.runtime.service.core.answer_parts import AnswerParts, CallDelta, TextPart
from carryall.runtime.service.core.chat import Conversation
from carryall.runtime.service.core.messages import Delta, GenerationRequest
from carryall.runtime.types.outputs import ToolCall, merged_calls

# The tags say that the model writes calls as Hermes does.
HERMES = TEMPLATE + "{# <tool_call> #}"
ARGUMENTS = re.compile(r'\{"city": "[a-z]{40}"\}')
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("one", "two")]
# Free letters, because the engine takes what a grammar forces in one step.
GRAMMAR = r"""
start: "Hm. " one two
one: "<tool_call>{\"name\": \"one\", \"arguments\": " arguments "}</tool_call>"
two: "<tool_call>{\"name\": \"two\", \"arguments\": " arguments "}</tool_call>"
arguments: "{\"city\": \"" CITY "\"}"
CITY: /[a-z]{40}/
"""


def delta(*calls: ToolCall, text: str = "") -> Delta:
    return Delta(request_id="r", index=0, tool_calls=calls, text=text)


@pytest.mark.parametrize("parallel", [True, False])
def test_pieces_of_calls_are_numbered(parallel: bool) -> None:
    parts = AnswerParts(GenerationRequest(prompt=Conversation([], parallel_calls=parallel)))
    first = list(parts.of(delta(ToolCall("a", "one", '{"x'), text="Hm.")))
    assert first == [TextPart("text", "Hm."), CallDelta(0, "", "a", "one"), CallDelta(0, '{"x')]
    second = list(parts.of(delta(ToolCall("", "", '": 1}'), ToolCall("b", "two", ""))))
    third = list(parts.of(delta(ToolCall("", "", "{}"))))
    assert second == [CallDelta(0, '": 1}'), *([CallDelta(1, "", "b", "two")] if parallel else [])]
    assert third == ([CallDelta(1, "{}")] if parallel else [])
    assert parts.calls == 1 + parallel


def test_pieces_are_merged() -> None:
    pieces = [ToolCall("a", "one", "{"), ToolCall("", "", "}"), ToolCall("b", "two", "[]")]
    assert merged_calls(pieces) == [ToolCall("a", "one", "{}"), ToolCall("b", "two", "[]")]
    assert merged_calls(pieces[1:]) == [ToolCall("", "", "}"), ToolCall("b", "two", "[]")]
    assert merged_calls([]) == []


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "tools": TOOLS, "grammar": GRAMMAR, "max_tokens": 200, **more}


def streamed(events: list[Any]) -> tuple[str, dict[int, list[str]], dict[int, str]]:
    """Content, pieces of arguments by call, and names by call."""
    content = ""
    pieces: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for choice in [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]:
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or []:
            if call["function"].get("name"):
                names[call["index"]] = call["function"]["name"]
            pieces.setdefault(call["index"], []).append(call["function"].get("arguments") or "")
    return content, pieces, names


async def chunks(served: HttpServed, **more: Any) -> tuple[str, dict[int, list[str]], dict[int, str]]:
    sent = {"structured_output": {"grammar": GRAMMAR}}
    given = {name: value for name, value in body(**more).items() if name != "grammar"}
    return streamed(await served.events("/v1/chat/completions", **given, **sent, stream=True))


@pytest.mark.long
def test_openai_and_grpc() -> None:
    async def scenario() -> None:
        async with null_llm(template=HERMES, step_seconds=0.01) as llm:
            async with http_serving(llm) as served:
                content, pieces, names = await chunks(served)
                assert (content, names) == ("Hm.", {0: "one", 1: "two"})
                assert all(ARGUMENTS.fullmatch("".join(each)) for each in pieces.values())
                assert min(len([piece for piece in each if piece]) for each in pieces.values()) > 1
                content, pieces, names = await chunks(served, parallel_tool_calls=False)
                assert names == {0: "one"}
                assert ARGUMENTS.fullmatch("".join(pieces[0]))
                content, pieces, names = await chunks(served, max_tokens=26)
                assert (content, names) == ("Hm.", {0: "one"})
                assert re.fullmatch(r'\{"city":( "[a-z]*)?', "".join(pieces[0]))  # cut off
            async with serving(llm) as grpc_served, AsyncClient(grpc_served.address) as client:
                reply = await client.chat(
                    [{"role": "user", "content": "x"}], tools=TOOLS, max_tokens=200,
                    structured_output={"grammar": GRAMMAR},
                )  # fmt: skip
                assert [call.name for call in reply.first.tool_calls] == ["one", "two"]
                assert all(ARGUMENTS.fullmatch(call.arguments) for call in reply.first.tool_calls)

    asyncio.run(scenario())

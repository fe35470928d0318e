"""python anthropic_client.py URL: what users of Anthropic's client do."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from checks import check, main

CLIENT = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the newest client has no parameter for it
TURNS: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS: Any = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]


@check
def messages() -> None:
    answer = CLIENT.messages.create(model="toy", messages=TURNS, max_tokens=4, system="Be short.")
    assert answer.role == "assistant"
    assert answer.usage.output_tokens <= 4


@check
def messages_stream() -> None:
    with CLIENT.messages.stream(model="toy", messages=TURNS, max_tokens=4) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(block.text for block in final.content if block.type == "text") == text


@check
def tools() -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = CLIENT.messages.create(
        model="toy", messages=TURNS, max_tokens=2000, tools=TOOLS, tool_choice=choice, **GREEDY
    )
    (block,) = answer.content
    assert (block.type, answer.stop_reason) == ("tool_use", "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    past: Any = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    turns = [*TURNS, *past]
    CLIENT.messages.create(model="toy", messages=turns, max_tokens=3, tools=TOOLS)


@check
def tools_stream() -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    with CLIENT.messages.stream(
        model="toy", messages=TURNS, max_tokens=2000, tools=TOOLS, tool_choice=choice, **GREEDY
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.content[0].type == "tool_use"


@check
def count_tokens() -> None:
    assert CLIENT.messages.count_tokens(model="toy", messages=TURNS).input_tokens > 0


@check
def errors() -> None:
    try:
        CLIENT.messages.create(model="none", messages=TURNS, max_tokens=4)
    except anthropic.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


main()

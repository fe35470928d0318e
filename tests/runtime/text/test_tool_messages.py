"""Tools, calls and results as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carryall.errors import ChatTemplateError
from carryall.runtime.text.parsers.formats import HERMES, AnswerFormat
from carryall.runtime.text.parsers.registry import message_parser
from carryall.runtime.text.tool_messages import as_text

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "time?"}


def call(arguments: Any, name: str = "now") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_description_joins_the_first_message_that_may_have_it() -> None:
    (system, ask) = as_text([ASK], [TOOL], system=True)
    assert (system["role"], ask) == ("system", ASK)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system["content"]
    (system, ask) = as_text([{"role": "system", "content": "Be brief."}, ASK], [TOOL], system=True)
    assert system["content"].startswith("Be brief.\n\nYou can call")
    assert ask == ASK
    (only,) = as_text([ASK], [TOOL], system=False)
    assert only["role"] == "user"
    assert only["content"].endswith("</tool_call>\n\ntime?")


def test_without_tools_a_plain_conversation_stays_as_it_is() -> None:
    parts = [{"role": "user", "content": [{"type": "image"}], "name": "a"}]
    assert as_text(parts, [], system=True) == parts


def test_past_calls_are_text_that_the_parser_reads_back() -> None:
    turns: list[dict[str, Any]] = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call({"zone": "é"}), call('{"zone": "b"}')]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "13:00"}]},
    ]
    _, answer, results = as_text(turns, [], system=True)
    parser = message_parser(AnswerFormat("test", calls=HERMES), tools=[TOOL])
    assert parser is not None
    parser.push(answer["content"])
    parser.end()
    assert answer["role"] == "assistant"
    assert "tool_calls" not in answer
    names = [call.name for call in parser.message.tool_calls if call.name]
    arguments = "".join(call.arguments for call in parser.message.tool_calls)
    assert (names, arguments) == (["now", "now"], '{"zone": "é"}{"zone": "b"}')
    assert results["role"] == "user"
    assert results["content"] == (
        "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response>"
    )


PICTURE = {"type": "image"}


def test_pictures_stay_in_their_place_among_results_calls_and_the_description() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [PICTURE], "tool_calls": [call({})]},
        {"role": "tool", "content": [{"type": "text", "text": "seen: "}, PICTURE]},
        {"role": "tool", "content": "12:00"},
    ]
    ask, answer, results = as_text(turns, [TOOL], system=False)
    assert ask["content"][0]["text"].startswith("You can call")
    assert ask["content"][1:] == [text("\n\n"), PICTURE, text("what?")]
    assert answer["content"][:2] == [PICTURE, text("\n")]
    assert results["content"] == [
        *(text("<tool_response>\n"), text("seen: "), PICTURE, text("\n</tool_response>")),
        *(text("\n"), text("<tool_response>\n"), text("12:00"), text("\n</tool_response>")),
    ]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("turns", "tools", "words"),
    [
        ([ASK], [{"name": object()}], "must be JSON"),
        ([{"role": "system", "content": [{"type": "audio"}]}], [TOOL], "must be text"),
        ([{"role": "tool", "content": 5}], [], "must be text"),
        ([{"role": "assistant", "tool_calls": ["now"]}], [], "name of a function"),
        ([{"role": "assistant", "tool_calls": [call({}, name=5)]}], [], "name of a function"),  # type: ignore[arg-type]
        ([{"role": "assistant", "tool_calls": [call({1, 2})]}], [], "must be JSON"),
    ],
)
def test_what_is_no_text_is_refused(turns: Any, tools: Any, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        as_text(turns, tools, system=True)

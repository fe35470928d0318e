"""Answers are parsed by a tokenizer's ``response_template`` as transformers parses them (recorded)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.parsers.registry import AnswerFormats, message_parser
from carryall.runtime.text.parsers.response_template import stated_format
from carryall.runtime.types.outputs import merged_calls

GOLDEN = json.loads((Path(__file__).parent / "response_templates.json").read_text(encoding="utf-8"))["cases"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
# A template that tells nothing of thoughts and calls.
BARE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# tools #}"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "template", "answer", "content", "reasoning", "calls"), GOLDEN, ids=[case[0] for case in GOLDEN]
)
def test_answers_are_read_as_transformers_reads_them(
    name: str, template: Any, answer: str, content: str, reasoning: str, calls: list[Any], size: int
) -> None:
    formats = AnswerFormats(ChatTemplate({"default": BARE}, {}), None, template)
    parser = message_parser(formats.of(None, with_tools=True), tools=TOOLS)
    assert parser is not None
    for start in range(0, len(answer), size):
        parser.push(answer[start : start + size])
    parser.end()
    found = parser.message
    assert (found.content.text, found.reasoning.text) == (content, reasoning)
    assert [[call.name, json.loads(call.arguments)] for call in merged_calls(found.tool_calls)] == calls
    assert formats.derived(None, with_tools=True).notes == ()


def test_what_a_template_shows_and_proves_stays() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    stated = {"fields": {"thinking": {"open": "<other>", "close": "</other>"}}}
    answer = AnswerFormats(ChatTemplate({"default": source}, {}), None, stated).of(None, with_tools=False)
    assert answer.thought is not None
    assert answer.thought.close == "</think>"


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (5, "no fields"),
        ({}, "no fields"),
        ({"fields": {"thinking": 5}}, "no object"),
        ({"fields": {"thinking": {"open": "<t>"}}}, "'close' is missing"),
        ({"fields": {"thinking": {"open_pattern": "(a+)+", "close": "b"}}}, "not understood"),
        ({"fields": {"thinking": {"open_pattern": "a|b", "close": "b"}}}, "not understood"),
        ({"fields": {"thinking": {"open_pattern": "a*", "close": "b"}}}, "not understood"),
        ({"fields": {"tool_calls": {"open": "<c>", "close": "</c>"}}}, "no transform"),
        (
            {"fields": {"tool_calls": {"open": "<c>", "close": "</c>", "content": "kv-lines",
                                       "transform": {"function": "{content}"}}}},
            "'kv-lines'",
        ),
        (
            {"fields": {"tool_calls": {
                "open_pattern": r"<c=(?P<name>\w+)>", "close": "</c>", "content": "xml-inline",
                "content_args": {"tag_pattern": "(?P<value>.*)(?P<key>.*)"},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            }}},
            "in this order",
        ),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named_and_left_out(template: Any, note: str) -> None:
    stated = stated_format(template)
    assert (stated.thought, stated.calls) == (None, None)
    assert note in " ".join(stated.notes)
    formats = AnswerFormats(ChatTemplate({"default": BARE}, {}), None, template)
    assert note in " ".join(formats.derived(None, with_tools=True).notes)

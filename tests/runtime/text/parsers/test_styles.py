"""The result of each parser style, and independence of how the text is split."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import UsageError
from carryall.runtime.text.parsers.base import MessageParser
from carryall.runtime.text.parsers.formats import PYTHONIC, QWEN_XML, AnswerFormat, Thought
from carryall.runtime.text.parsers.json_span import JsonSpan
from carryall.runtime.text.parsers.registry import STYLES, message_parser, named_format
from carryall.runtime.types.outputs import merged_calls

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
THINK = AnswerFormat("test", Thought("<think>", "</think>"))
PLAIN = AnswerFormat("test")
FORMATS = {name: named_format(PLAIN, name) for name in STYLES}
FORMATS |= {"think": THINK, "qwen": named_format(THINK, "hermes")}
FORMATS |= {"xml": AnswerFormat("test", calls=QWEN_XML), "python": AnswerFormat("test", calls=PYTHONIC)}
FORMATS["magistral"] = named_format(AnswerFormat("test", Thought("[THINK]", "[/THINK]")), "mistral")


def parser(name: str, prompt: str = "") -> MessageParser:
    answer_parser = message_parser(FORMATS[name], prompt, tools=TOOLS)
    assert answer_parser is not None
    return answer_parser


def parsed(one: MessageParser, *pieces: str, cut: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and the calls' names and arguments."""
    for piece in pieces:
        one.push(piece)
    one.end(cut=cut)
    message = one.message
    calls = [(call.name, call.arguments) for call in merged_calls(message.tool_calls)]
    return message.content.text, message.reasoning.text, calls


W, T = ("get_weather", '{"city": "Paris"}'), ("now", "{}")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'
CUT = '{"name": "get_weather", "argum'

CASES: list[tuple[str, str, tuple[str, str, list[Any]]]] = [
    ("hermes", "Hello", ("Hello", "", [])),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", ("", "", [W])),
    ("hermes", f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>{NOW}</tool_call>\n",
     ("Let me see.", "", [W, T])),
    ("hermes", f"<tool_call>{WEATHER}", ("", "", [W])),
    ("hermes", f"x <tool_call>{CUT}", (f"x <tool_call>{CUT}", "", [])),
    ("hermes", "<tool_call>no JSON</tool_call> y", ("<tool_call>no JSON</tool_call> y", "", [])),
    ("hermes", "1 < 2 <tool", ("1 < 2 <tool", "", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}", "b": [1, {}]}, "id": 3}\n</tool_call> end',
     ("end", "", [("f", '{"a": "}", "b": [1, {}]}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", "", [("f", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a"</tool_call> y', ("y", "", [("f", '{"a"')])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
     ("", "", [("f", '{"a": 1}')])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}},{"arguments": {}, "name": "g"},{"x": 1}]',
     ('{"x": 1}]', "", [("f", '{"a": 1}'), ("g", "{}")])),
    ("mistral", '[TOOL_CALLS]f{"a": 1', ("", "", [("f", '{"a": 1')])),
    ("llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', ("", "", [W])),
    ("llama", f"<|python_tag|>{WEATHER}; {NOW}", ("", "", [W, T])),
    ("llama", '{"answer": 42} it is', ('{"answer": 42} it is', "", [])),
    ("llama", "Plain {words}", ("Plain {words}", "", [])),
    ("llama", f"; x<|python_tag|>{NOW}", ("; x", "", [T])),
    ("llama", CUT, (CUT, "", [])),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {NOW}]", ("", "", [W, T])),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}',
     ("", "", [W, T])),
    ("mistral", 'So: [TOOL_CALLS]now{} ', ("So:", "", [T])),
    ("mistral", f"[TOOL_CALLS] [{CUT}", (f"[TOOL_CALLS] [{CUT}", "", [])),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     ("Yes.", "Hm.", [])),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', ("", "a", [W])),
    ("harmony", "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.now"
     "<|channel|>commentary json<|message|>{}", ("First.", "", [T])),
    ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a', ("", "", [("now", '{"a')])),
    ("harmony", "no channels", ("no channels", "", [])),
    ("think", "<think>\nhm\n</think>\n\nYes.", ("Yes.", "hm", [])),
    ("think", "Yes. <think>", ("Yes. <think>", "", [])),
    ("qwen", f"<think>\n\n</think>\n\n<tool_call>{NOW}</tool_call>", ("", "", [T])),
    ("qwen", f"<think><tool_call>{NOW}</tool_call>", ("", "", [T])),
    ("qwen", f"<think><tool_call>{NOW}</tool_call></think>\n", ("", "", [T])),
    ("qwen", f"<think><tool_call>{NOW}</tool_call></think>No.", ("No.", f"<tool_call>{NOW}</tool_call>", [])),
    ("magistral", f"[THINK]hm[/THINK]Ok[TOOL_CALLS][{NOW}]", ("Ok", "hm", [T])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_the_style_gives_the_expected_messages(name: str, text: str, expected: Any) -> None:
    assert parsed(parser(name), text) == expected
    assert parsed(parser(name), *text) == expected  # character by character


CUTS: list[tuple[str, str, tuple[str, str, list[Any]]]] = [
    ("hermes", f"x <tool_call>{CUT}", ("x", "", [("get_weather", "")])),
    ("hermes", '<tool_call>\n{"name": "get_wea', ("", "", [])),
    ("hermes", "<tool_call>\n", ("", "", [])),
    ("hermes", f"<tool_call>{NOW}</tool_call>\n<tool_call>", ("", "", [T])),
    ("hermes", "<tool_call>no JSON", ("<tool_call>no JSON", "", [])),
    ("hermes", '<tool_call>{"answer": 42} x', ('<tool_call>{"answer": 42} x', "", [])),
    ("hermes", "1 < 2 <tool", ("1 < 2 <tool", "", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", "", [("f", '{"a": 1')])),
    ("llama", CUT, ("", "", [("get_weather", "")])),
    ("llama", '{"name": "get_wea', ('{"name": "get_wea', "", [])),
    ("llama", '{"name": "Ada", "born"', ('{"name": "Ada", "born"', "", [])),
    ("llama", '<|python_tag|>{"name": "get_wea', ("", "", [])),
    ("mistral", "So: [TOOL_CALLS]get_wea", ("So:", "", [])),
    ("mistral", "[TOOL_CALLS]get_weather[ARGS]", ("", "", [("get_weather", "")])),
    ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]a1[AR", ("", "", [])),
    ("mistral", "[TOOL_CALLS] is a marker", ("[TOOL_CALLS] is a marker", "", [])),
    ("mistral", f"[TOOL_CALLS] [{CUT}", ("", "", [("get_weather", "")])),
    ("xml", "<tool_call>\n<function=get_weather", ("", "", [])),
    ("xml", "<tool_call>\n<func", ("", "", [])),
    ("xml", "<tool_call> is a tag", ("<tool_call> is a tag", "", [])),
    ("python", "<|tool_call_start|>[get_wea", ("", "", [])),
    ("harmony", "<|channel|>commentary to=functions.get_wea", ("", "", [])),
    ("qwen", f"<think><tool_call>{CUT}", ("", f"<tool_call>{CUT}", [])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CUTS)
def test_a_call_that_is_cut_before_its_arguments_is_no_text(name: str, text: str, expected: Any) -> None:
    """As OpenAI's service answers; raw markup in a text is a fault there (vLLM's issue 47903)."""
    assert parsed(parser(name), text, cut=True) == expected
    assert parsed(parser(name), *text, cut=True) == expected


def test_a_prompt_may_open_the_reasoning() -> None:
    assert parsed(parser("think", "...<think>\n"), "hm</think>Yes.") == ("Yes.", "hm", [])
    assert parsed(parser("think", "...<think>\n\n</think>\n\n"), "Yes.") == ("Yes.", "", [])


FRAGMENTS = [
    "<|channel|>", "[TOOL_CALLS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>",
    "[ARGS]", "<|message|>", "<|end|>", "<|call|>",
    "<|start|>assistant", "<|channel|>final", "<|channel|>analysis", " to=functions.now", WEATHER, NOW, CUT,
    "[", "]", "{", "}", '"', "\\", ";", " ", "\n", "text", "<", "é",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    opened=st.booleans(),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_the_result_is_independent_of_the_pieces(
    name: str, fragments: list[str], opened: bool, cuts: list[int]
) -> None:
    text, prompt = "".join(fragments), "<think>" * opened
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert parsed(parser(name, prompt), *pieces) == parsed(parser(name, prompt), text)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_parsed_parts_are_never_withdrawn(name: str, fragments: list[str]) -> None:
    one = parser(name)
    content = reasoning = ""
    calls = 0
    for fragment in [*fragments, None]:
        if fragment is None:
            one.end()
        else:
            one.push(fragment)
        message = one.message
        assert message.content.text.startswith(content)
        assert message.reasoning.text.startswith(reasoning)
        assert len(message.tool_calls) >= calls
        content, reasoning, calls = message.content.text, message.reasoning.text, len(message.tool_calls)


@pytest.mark.long
@given(
    st.recursive(st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)), st.data()
)
def test_the_end_of_a_json_value(value: Any, data: st.DataObject) -> None:
    text = json.dumps([value], ensure_ascii=data.draw(st.booleans()))
    behind = data.draw(st.sampled_from(["", " ", "}", "x{"]))
    cut = data.draw(st.integers(0, len(text) - 1))
    span = JsonSpan()
    assert span.end(text[:cut]) is None
    assert span.end(text + behind) == len(text)


def test_ids_are_what_mistral_s_templates_demand() -> None:
    one = parser("mistral")
    one.push(f"[TOOL_CALLS][{NOW}, {NOW}]")
    ids = [call.id for call in merged_calls(one.message.tool_calls)]
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call) for call in ids)
    assert len(set(ids)) == 2


def test_without_tools_or_reasoning_there_is_nothing_to_parse() -> None:
    assert message_parser(FORMATS["hermes"]) is None
    assert message_parser(PLAIN, tools=TOOLS) is None
    assert message_parser(FORMATS["harmony"]) is not None


def test_a_style_may_be_chosen() -> None:
    with pytest.raises(UsageError, match="no tool call style 'x'; choose one of harmony, mistral"):
        named_format(PLAIN, "x")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("llama", '{"name": "f", "parameters": ', "}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>", "<|call|>"),
    ],
)
def test_arguments_are_passed_on_as_they_arrive(name: str, before: str, after: str) -> None:
    """Every character of the arguments is there when it was written, but for what may begin a marker."""
    one, arguments = parser(name), '{"city": "Paris {x}", "days": [1, 2, {"y": null}]}'
    one.push(before)
    for written, character in enumerate(arguments, start=1):
        one.push(character)
        (call,) = merged_calls(one.message.tool_calls)
        assert (call.name, call.arguments) == (
            "f",
            arguments[:written].rstrip() if name == "harmony" else arguments[:written],
        )
    one.push(after)
    one.end()
    (call,) = merged_calls(one.message.tool_calls)
    assert (call.arguments, one.message.content.text) == (arguments, "")

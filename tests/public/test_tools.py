"""Public reports of calls of tools and of vectors: pieces equal the whole, shortened vectors are normed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from chat_styles import template

from carryall.runtime.service.core.messages import Embeddings
from carryall.runtime.service.http.openai.embeddings import asked_vectors, read_embeddings
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.parsers.base import ParsedMessage
from carryall.runtime.text.parsers.formats import AnswerFormat, Thought
from carryall.runtime.text.parsers.registry import AnswerFormats, message_parser, named_format
from carryall.runtime.types.outputs import merged_calls

VLLM = "vllm-project/vllm#"


def calls(style: str, text: str, size: int) -> list[tuple[str, str]]:
    """Return the calls of an answer that arrives in pieces of ``size`` characters."""
    tools = [{"type": "function", "function": {"name": name}} for name in "abf"]
    parser = message_parser(named_format(AnswerFormat("test"), style), "", tools=tools)
    assert parser is not None
    for start in range(0, len(text), size):
        parser.push(text[start : start + size])
    parser.end()
    return [(call.name, call.arguments) for call in merged_calls(parser.message.tool_calls)]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("source", "style", "text", "expected"),
    [
        (  # the arguments behind a call without any were lost
            f"{VLLM}47901",
            "mistral",
            '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 42}}]',
            [("a", "{}"), ("b", '{"x": 42}')],
        ),
        (  # the first key of a nested object was lost
            f"{VLLM}21046",
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"outer": {"inner": {"k": [1]}}, "none": {}}}</tool_call>',
            [("f", '{"outer": {"inner": {"k": [1]}}, "none": {}}')],
        ),
        (  # quotes were doubled at the beginning of a text
            f"{VLLM}10395",
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"wd": 23, "sd": 0.8, "id": "Q39", "m": ""}}</tool_call>',
            [("f", '{"wd": 23, "sd": 0.8, "id": "Q39", "m": ""}')],
        ),
        (  # the object around the arguments became a part of them
            f"{VLLM}47977",
            "hermes",
            '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>',
            [("f", '{"a": "}"}')],
        ),
        (  # braces of deep objects were miscounted
            f"{VLLM}38103",
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": {"b": {"c": {"d": "{"}}}}}</tool_call>',
            [("f", '{"a": {"b": {"c": {"d": "{"}}}}')],
        ),
        (  # calls beside each other were not read
            f"{VLLM}11097",
            "mistral",
            '[TOOL_CALLS][{"name": "a", "arguments": {"x": [1, 2]}}, {"name": "b", "arguments": {"y": "]"}}]',
            [("a", '{"x": [1, 2]}'), ("b", '{"y": "]"}')],
        ),
        (  # the first brace that closed ended the arguments
            "unslothai/unsloth#5811",
            "mistral",
            '[TOOL_CALLS]f{"a": {"b": {"c": 1}}, "d": "}"}',
            [("f", '{"a": {"b": {"c": 1}}, "d": "}"}')],
        ),
        (  # "<" in the arguments ended them
            "unslothai/unsloth#5811",
            "llama",
            '<|python_tag|>{"name": "f", "parameters": {"code": "if x < 10: pass"}}',
            [("f", '{"code": "if x < 10: pass"}')],
        ),
        (  # the second call was sent as text
            "waybarrios/vllm-mlx#55",
            "hermes",
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "b", "arguments": {}}</tool_call>',
            [("a", "{}"), ("b", "{}")],
        ),
    ],
)
def test_calls_in_pieces_equal_the_whole(
    source: str, style: str, text: str, expected: list[tuple[str, str]], size: int
) -> None:
    assert calls(style, text, size) == expected, source


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("source", "calls_style", "text", "content", "expected"),
    [
        (  # the call stayed a part of the text
            f"{VLLM}22975",
            "parameters",
            "Let me see.\n<call>\n<function=f>\n<parameter=x>\nclass A\\(\n</parameter>\n</function>\n"
            "</call>",
            "Let me see.",
            [("f", {"x": "class A\\("})],
        ),
        (  # streamed, all of it was text
            "raullenchai/Rapid-MLX#171",
            "parameters",
            "\n<call>\n<function=a>\n<parameter=x>\n1 < 2\n</parameter>\n</function>\n</call>",
            "",
            [("a", {"x": "1 < 2"})],
        ),
        (  # two calls became one
            f"{VLLM}24478",
            "names with ids",
            '<|calls|><|call|>functions.a:0<|args|>{"x": "1"}<|end_call|><|call|>functions.b:1<|args|>{}'
            "<|end_call|><|end_calls|>",
            "",
            [("a", {"x": "1"}), ("b", {})],
        ),
        (  # equal arguments were read by the parameters of the other tool
            f"{VLLM}47986",
            "typed parameters",
            '\n<calls>\n<invoke name="a">\n<parameter name="x" string="true">1</parameter>\n</invoke>\n'
            '<invoke name="b">\n<parameter name="x" string="false">1</parameter>\n</invoke>\n</calls>',
            "",
            [("a", {"x": "1"}), ("b", {"x": 1})],
        ),
    ],
)
def test_calls_of_a_template_in_pieces_equal_the_whole(
    source: str, calls_style: str, text: str, content: str, expected: list[tuple[str, Any]], size: int
) -> None:
    text_property = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": text_property}} for name in "af"
    ] + [{"type": "function", "function": {"name": "b"}}]
    formats = AnswerFormats(ChatTemplate({"default": template(calls_style)}, {}))
    parser = message_parser(formats.of(None, with_tools=True), "", tools=tools)
    assert parser is not None
    for start in range(0, len(text), size):
        parser.push(text[start : start + size])
    parser.end()
    merged = merged_calls(parser.message.tool_calls)
    assert parser.message.content.text == content, source
    assert [(call.name, json.loads(call.arguments)) for call in merged] == expected, source


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TYPED = {
    "s": TEXT,
    "n": NUMBER,
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "l": {"type": "array", "items": TEXT},
    "maybe": {"anyOf": [TEXT, {"type": "null"}]},
}


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("source", "calls_style", "text", "expected"),
    [
        # Objects and lists within arguments were cut at the first bracket that closed, or became texts.
        (
            "inclusionAI/AReno#36",
            "quoted by a token",
            "<|call>call:f{actions:[{a:<|q|>x<|q|>,n:1},{a:<|q|>y<|q|>}]}<call|>",
            {"actions": [{"a": "x", "n": 1}, {"a": "y"}]},
        ),
        (
            "raullenchai/Rapid-MLX#1102",
            "quoted by a token",
            "<|call>call:f{arguments:{message:<|q|>How } are, you?<|q|>},to:<|q|>b<|q|>}<call|>",
            {"arguments": {"message": "How } are, you?"}, "to": "b"},
        ),
        (
            "Blaizzy/mlx-vlm#916",
            "quoted by a token",
            "<|call>call:f{path:<|q|>t.txt<|q|>,edits:[{newText:<|q|>o<|q|>,oldText:<|q|>a<|q|>}]}<call|>",
            {"path": "t.txt", "edits": [{"newText": "o", "oldText": "a"}]},
        ),
        (
            "osaurus-ai/vmlx-swift#76",
            "quoted by a token",
            "<|call>call:f{verb:<|q|>click<|q|>,target:{mark:1}}<call|>",
            {"verb": "click", "target": {"mark": 1}},
        ),
        (  # a text with a line break within an object was no value
            "ml-explore/mlx-swift-lm#626",
            "quoted by a token",
            "<|call>call:f{note:{text:<|q|>line one\nline two<|q|>}}<call|>",
            {"note": {"text": "line one\nline two"}},
        ),
        # The quotes of JSON and Python were a part of the texts.
        (
            f"{VLLM}51284",
            "quoted by a token",
            '<|call>call:f{refs:["ds_1"],o:{"mode": "fast"}}<call|>',
            {"refs": ["ds_1"], "o": {"mode": "fast"}},
        ),
        (
            f"{VLLM}51284",
            "quoted by a token",
            "<|call>call:f{refs:['ds_1', 'b']}<call|>",
            {"refs": ["ds_1", "b"]},
        ),
        (  # a bracket in them ended the arguments
            "jundot/omlx#1854",
            "quoted by a token",
            '<|call>call:f{"content": "has } brace"}<call|>',
            {"content": "has } brace"},
        ),
        (  # a quote within a text ended it, and the rest became keys
            f"{VLLM}48678",
            "quoted by a token",
            "<|call>call:f{code:<|q|>r = sql(<|q|><|q|><|q|> SELECT <|q|><|q|><|q|>).df()<|q|>,"
            "refs:[<|q|>d<|q|>]}<call|>",
            {"code": 'r = sql(""" SELECT """).df()', "refs": ["d"]},
        ),
        (  # arguments without a comma between them became one
            "hybridgroup/yzma#243",
            "quoted by a token",
            "<|call>call:f{command:<|q|>look<|q|>angle:90}<call|>",
            {"command": "look", "angle": 90},
        ),
        (  # texts without quotes stay texts
            "ml-explore/mlx-lm#1105",
            "quoted by a token",
            "<|call>call:f{city:New York,n:42,ok:true,none:null}<call|>",
            {"city": "New York", "n": 42, "ok": True, "none": None},
        ),
        (  # constants of Python and of JSON, and single quotes
            "ggml-org/llama.cpp#24178",
            "Python calls",
            "<|calls|>[f(a=True, b=None, c='it', d=false)]<|end_calls|>",
            {"a": True, "b": None, "c": "it", "d": False},
        ),
        (  # lists and objects broke the expression that looked for a call
            "ml-explore/mlx-lm#1246",
            "Python calls",
            "<|calls|>[f(x=[{'a': 1}, 'b, c)'], y={\"k\": [1, 2]})]<|end_calls|>",
            {"x": [{"a": 1}, "b, c)"], "y": {"k": [1, 2]}},
        ),
        (  # keywords of Python as names, and numbers that Python refuses
            "theroyallab/tabbyAPI#464",
            "Python calls",
            "<|calls|>[f(class='/home/u', n=007)]<|end_calls|>",
            {"class": "/home/u", "n": "007"},
        ),
        (  # the quote that opens a text that may be null was lost, and a bracket doubled
            f"{VLLM}40197",
            "keys and values",
            "\n<call>f\n<key>maybe</key>\n<value>Smith</value>\n<key>l</key>\n"
            '<value>["Acme","Beta"]</value>\n</call>',
            {"maybe": "Smith", "l": ["Acme", "Beta"]},
        ),
        (  # without the tag that opens the value, the call had no arguments
            f"{VLLM}49249",
            "keys and values",
            "\n<call>f\n<key>s</key>how many days</value>\n<key>n</key>\n<value>2</value>\n</call>",
            {"s": "how many days", "n": 2},
        ),
        # A call without arguments was never sent.
        (f"{VLLM}41654", "keys and values", "\n<call>f</call>", {}),
        (f"{VLLM}44327", "keys and values", "\n<call>f\n</call>", {}),
        (  # in pieces, values had other types than as a whole
            f"{VLLM}23324",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n"
            "<parameter=s>\n5\n</parameter>\n</function>\n</call>",
            {"n": 5, "b": True, "s": "5"},
        ),
        (  # constants of Python for a flag
            f"{VLLM}23099",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</call>",
            {"b": True},
        ),
        (  # the first argument was taken for all
            "yigit353/langchain-qwq#19",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=o>\n"
            '{"a": {"b": [1]}}\n</parameter>\n</function>\n</call>',
            {"n": 5, "o": {"a": {"b": [1]}}},
        ),
        (  # a value without its closing tag failed the request
            "ollama/ollama#17914",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=s>\nab c\n<parameter=n>\n5\n</parameter>\n</function>\n"
            "</call>",
            {"s": "ab c", "n": 5},
        ),
        (  # the same at the last value
            "ollama/ollama#17914",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\nab c\n</function>\n"
            "</call>",
            {"n": 5, "s": "ab c"},
        ),
        (  # a value was cut at a tag of its own
            "raullenchai/Rapid-MLX#1515",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=s>\nIt ends with </parameter> here, </function> or </call>.\n"
            "</parameter>\n</function>\n</call>",
            {"s": "It ends with </parameter> here, </function> or </call>."},
        ),
        (  # the same with a pair of tags
            "Neroued/ninfer#138",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=s>\np = r'<parameter=n>\\n(.*?)\\n</parameter>'\n"
            "<parameter=s>\n1\n</parameter>\nx\n</parameter>\n</function>\n</call>",
            {"s": "p = r'<parameter=n>\\n(.*?)\\n</parameter>'\n<parameter=s>\n1\n</parameter>\nx"},
        ),
        (  # a value that was closed with the parameter's name swallowed the next
            "anthropics/claude-code#83088",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=s>\nlong text</s>\n<parameter=l>\n[1]\n</parameter>\n"
            "</function>\n</call>",
            {"s": "long text", "l": [1]},
        ),
        # Closing tags that are spelled wrongly became a part of the value.
        *(
            (
                "sgl-project/sglang#27337",
                "parameters",
                f"\n<call>\n<function=f>\n<parameter=s>\nParis\n{close}\n</function>\n</call>",
                {"s": "Paris"},
            )
            for close in ("</parameter/>", "</parameter1>", "</parameter", "</parameter_function>")
        ),
        (  # the tag of a key without its bracket was an error
            "ml-explore/mlx-lm#1881",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=s\nParis\n</parameter>\n<parameter=l\n[1, 2]\n</parameter>\n"
            "</function>\n</call>",
            {"s": "Paris", "l": [1, 2]},
        ),
        (  # the same in front of a value with such a bracket
            "vllm-project/vllm#39771",
            "parameters",
            "\n<call>\n<function=f>\n<parameter=s\na > b\n</parameter>\n</function>\n</call>",
            {"s": "a > b"},
        ),
        (  # lists were texts
            "ollama/ollama#15098",
            "parameters",
            '\n<call>\n<function=f>\n<parameter=l>\n["a", "b"]\n</parameter>\n</function>\n</call>',
            {"l": ["a", "b"]},
        ),
        (  # an answer that ends before the section does had no call
            "sgl-project/sglang#40236",
            "typed parameters",
            '\n<calls>\n<invoke name="f">\n<parameter name="s" string="true">a</parameter>\n</invoke>\n',
            {"s": "a"},
        ),
        (  # a parameter without its type was left out, and the call made without arguments
            "sgl-project/sglang#39435",
            "typed parameters",
            '\n<calls>\n<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n</calls>',
            {"n": 1},
        ),
    ],
)
def test_arguments_in_other_forms_than_json(
    source: str, calls_style: str, text: str, expected: Any, size: int
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": TYPED}}}]
    (call,) = parsed(calls_style, text, tools, size).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("f", expected), source


def parsed(calls_style: str, text: str, tools: list[dict[str, Any]], size: int) -> ParsedMessage:
    """Return the message of an answer that arrives in pieces of ``size`` characters."""
    formats = AnswerFormats(ChatTemplate({"default": template(calls_style)}, {}))
    parser = message_parser(formats.of(None, with_tools=True), "", tools=tools)
    assert parser is not None
    for start in range(0, len(text), size):
        parser.push(text[start : start + size])
    parser.end()
    message = parser.message
    message.tool_calls = merged_calls(message.tool_calls)
    return message


@pytest.mark.parametrize(
    ("source", "calls_style", "text"),
    [
        # Markup without its section was made a call, although an answer may speak of it.
        (
            "ai-dynamo/frontend-crates#123",
            "typed parameters",
            '<invoke name="f">\n<parameter name="s" string="true">a</parameter>\n</invoke>',
        ),
        # Brackets of a normal answer began a call.
        ("ml-explore/mlx-lm#1260", "Python calls", "Use [f(x=1)] for that."),
    ],
)
def test_texts_that_look_like_calls_stay_texts(source: str, calls_style: str, text: str) -> None:
    message = parsed(calls_style, text, [{"type": "function", "function": {"name": "f"}}], 1)
    assert (message.content.text, message.tool_calls) == (text, []), source


def test_names_with_dots_are_whole() -> None:
    """ggml-org/llama.cpp#24178: the name ended at the dot."""
    tools = [{"type": "function", "function": {"name": "Calendar.create"}}]
    text = "<|calls|>[Calendar.create(title='x')]<|end_calls|>"
    (call,) = parsed("Python calls", text, tools, 1).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("Calendar.create", {"title": "x"})


@pytest.mark.parametrize(
    ("source", "pieces", "thought", "content"),
    [
        # A tag that came in two pieces was lost with what was around it.
        ("mozilla-ai/any-llm#1242", ["<think>reason</th", "ink>answer"], "reason", "answer"),
        ("InternLM/lmdeploy#4754", ["<think>a", "</th", "ink>", "b"], "a", "b"),
        # Both tags in one piece: the second was not seen.
        ("BerriAI/litellm#14121", ["<think>short</think>answer"], "short", "answer"),
        # Tags that the answer itself names were lost, or began a thought.
        (f"{VLLM}48971", ["<think>a</think>", "write <think>x</think> so"], "a", "write <think>x</think> so"),
        # Answers without a thought were empty.
        ("sgl-project/sglang#4711", ["just an ", "answer"], "", "just an answer"),
        ("rllm-org/rllm#405", ["2 < 3, and </x>"], "", "2 < 3, and </x>"),
        # The beginning of a tag at the end was lost.
        ("ai-dynamo/dynamo#11251", ["<think>a</think>b", "<thi"], "a", "b<thi"),
        ("ai-dynamo/dynamo#11251", ["<think>a</thi"], "a</thi", ""),
        # The tag that begins a thought was a part of the answer.
        (
            f"{VLLM}45687",
            ["<think>", "Reasoning", " content", "</think>", "content"],
            "Reasoning content",
            "content",
        ),
    ],
)
def test_thoughts_are_apart_from_the_answer(
    source: str, pieces: list[str], thought: str, content: str
) -> None:
    parser = message_parser(AnswerFormat("test", Thought("<think>", "</think>")))
    assert parser is not None
    for piece in pieces:
        parser.push(piece)
    parser.end()
    assert (parser.message.reasoning.text, parser.message.content.text) == (thought, content), source


def test_shortened_vectors_are_normed_behind_the_cut() -> None:
    """huggingface/text-embeddings-inference#676: which of both comes first was open."""
    ask = read_embeddings({"input": "a", "dimensions": 2})
    vectors = np.array([[0.6, 0.0, 0.8], [0.0, 0.28, 0.96]], np.float32)
    cut = asked_vectors(ask, Embeddings(vectors, 2))
    np.testing.assert_allclose(cut, [[1, 0], [0, 1]], rtol=0, atol=1e-7)
    plain = read_embeddings({"input": "a", "dimensions": 2, "normalize": False})
    np.testing.assert_array_equal(asked_vectors(plain, Embeddings(vectors, 2)), vectors[:, :2])

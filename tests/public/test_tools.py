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

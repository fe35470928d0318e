"""Public reports of calls of tools and of vectors: pieces equal the whole, shortened vectors are normed."""

from __future__ import annotations

import numpy as np
import pytest

from carryall.runtime.service.core.messages import Embeddings
from carryall.runtime.service.http.openai.embeddings import cut_vectors, read_embeddings
from carryall.runtime.text.parsers.formats import AnswerFormat
from carryall.runtime.text.parsers.registry import message_parser, named_format
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
    ],
)
def test_calls_in_pieces_equal_the_whole(
    source: str, style: str, text: str, expected: list[tuple[str, str]], size: int
) -> None:
    assert calls(style, text, size) == expected, source


def test_shortened_vectors_are_normed_behind_the_cut() -> None:
    """huggingface/text-embeddings-inference#676: which of both comes first was open."""
    ask = read_embeddings({"input": "a", "dimensions": 2})
    vectors = np.array([[0.6, 0.0, 0.8], [0.0, 0.28, 0.96]], np.float32)
    cut = cut_vectors(ask, Embeddings(vectors, 2))
    np.testing.assert_allclose(cut, [[1, 0], [0, 1]], rtol=0, atol=1e-7)
    plain = read_embeddings({"input": "a", "dimensions": 2, "normalize": False})
    np.testing.assert_array_equal(cut_vectors(plain, Embeddings(vectors, 2)), vectors[:, :2])

"""Answers that must be tool calls: their schema, and how they are read in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import RequestError
from carryall.exporter.demo import demo_path
from carryall.runtime.service.core.chat import converse, read_tool_choice, read_tools
from carryall.runtime.service.core.tool_choice import CallSplitter, calls_schema, read_calls
from carryall.runtime.text.grammars import GrammarCompiler
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.structured_output import StructuredOutput

REF: dict[str, Any] = {
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/Point"}},
    "required": ["p"],
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": REF}},
    {"type": "function", "function": {"name": "g"}},
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls_ = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), values, max_size=3)), min_size=1)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("answer", "only", "parallel", "right"),
    [
        ([call("f", {"p": {"x": 1}})], None, True, True),
        ([call("f", {"p": {"x": "1"}})], None, True, False),
        ([call("g", {}), call("f", {"p": {"x": 1}})], None, True, True),
        ([call("g", {}), call("g", {})], None, False, False),
        ([call("g", {})], "f", True, False),
        ([call("f", {"p": {"x": 1}})], "f", True, True),
        ([call("h", {})], None, True, False),
        ([], None, True, False),
    ],
)
def test_the_schema_allows_calls_of_the_tools_only(
    answer: Any, only: str | None, parallel: bool, right: bool
) -> None:
    """Asked of the grammar that the model is held to."""
    tokenizer = Tokenizer(demo_path("pycoder"))
    tools = [tool for tool in TOOLS if only in (None, tool["function"]["name"])]
    schema = calls_schema(tools, parallel=parallel and only is None)
    compiler = GrammarCompiler(tokenizer, [1], tokenizer.vocab_size)
    matcher = compiler.compile(StructuredOutput(json_schema=schema)).result()
    tokens = [*tokenizer.encode(json.dumps(answer), add_special_tokens=False), 1]
    assert (matcher.valid_prefix(tokens) == len(tokens)) is right


def test_a_tool_that_is_not_there_is_refused() -> None:
    for choice, tools, told in (
        ({"type": "function", "function": {"name": "h"}}, TOOLS, "'h'; the request's tools are: f, g"),
        ("required", [], "tools are: none"),
    ):
        with pytest.raises(RequestError, match=told):
            converse([], {}, tools=read_tools(tools), choice=read_tool_choice(choice))
    with pytest.raises(RequestError, match="must have a 'name'"):
        read_tools([{"type": "function", "function": {}}])


@pytest.mark.long
@settings(deadline=None)
@given(calls_, st.integers(1, 7), st.sampled_from([None, 1]))
def test_pieces_of_any_size_give_the_same_calls(
    calls: list[tuple[str, dict[str, Any]]], size: int, indent: int | None
) -> None:
    text = json.dumps([call(*one) for one in calls], indent=indent)
    splitter = CallSplitter()
    names: list[str | None] = []
    arguments = [""] * len(calls)
    for start in range(0, len(text), size):
        for delta in splitter.push(text[start : start + size]):
            names += [delta.name] if delta.id else []
            arguments[delta.index] += delta.arguments
    assert list(zip(names, map(json.loads, arguments), strict=True)) == calls
    whole = read_calls(text)
    assert [(one.name, one.arguments) for one in whole] == list(zip(names, arguments, strict=True))
    assert len({one.id for one in whole}) == len(calls)


def test_a_call_that_was_cut_off_is_read_as_far_as_it_goes() -> None:
    (cut,) = read_calls('[{"name": "f", "arguments": {"city": "Par')
    assert (cut.name, cut.arguments) == ("f", '{"city": "Par')

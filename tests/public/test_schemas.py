"""Public reports of structured outputs: what a grammar must take, and what it must not.

Each row is a schema of our own for one report.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from carryall.exporter.demo import demo_path
from carryall.runtime.text.grammars import GrammarCompiler
from carryall.runtime.text.json_schema import held_schema
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.structured_output import StructuredOutput

END = 1
VLLM = "vllm-project/vllm#"
KIND = {"type": "string", "enum": ["SUV", "Coupe"]}
BASE = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 10}}, "required": ["x"]}


@functools.cache
def compiler() -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer(demo_path("pycoder"))
    return tokenizer, GrammarCompiler(tokenizer, [END], tokenizer.vocab_size)


def takes(schema: Any, value: Any) -> bool:
    """Whether a grammar of the schema takes a value's JSON as a whole."""
    tokenizer, grammars = compiler()
    tokens = [*tokenizer.encode(json.dumps(value), add_special_tokens=False), END]
    matcher = grammars.compile(StructuredOutput(json_schema=schema)).result().copy()
    return matcher.valid_prefix(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("source", "schema", "right", "wrong"),
    [
        (  # an enumeration behind a reference, and one of the items of a list, were refused
            f"{VLLM}15236",
            {
                "$defs": {"kind": KIND},
                "type": "object",
                "properties": {"one": {"$ref": "#/$defs/kind"}, "many": {"type": "array", "items": KIND}},
                "required": ["one", "many"],
            },
            [{"one": "SUV", "many": ["Coupe", "SUV"]}],
            [{"one": "Van", "many": []}, {"one": "SUV", "many": ["Van"]}],
        ),
        (  # the bounds of an integer were not supported
            f"{VLLM}12028",
            {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}}},
            [{"n": 1}, {"n": 5}],
            [{"n": 0}, {"n": 6}, {"n": 15}],
        ),
        (  # several branches of allOf were ignored
            f"{VLLM}56556",
            {
                "$defs": {"base": BASE},
                "allOf": [
                    {"$ref": "#/$defs/base"},
                    {"type": "object", "properties": {"y": {"type": "string"}}, "required": ["y"]},
                ],
            },
            [{"x": 10, "y": "a"}],
            [{"x": 9, "y": "a"}, {"x": 10}, {"y": "a"}],
        ),
        (  # a pattern that matches only a declared property led to an answer without an end
            "guidance-ai/llguidance#265",
            {
                "type": "object",
                "properties": {"score": {"type": "integer", "multipleOf": 5}},
                "required": ["score"],
                "additionalProperties": False,
                "patternProperties": {"^score$": {"type": "integer"}},
            },
            [{"score": 15}],
            [{"score": 7}, {}, {"other": 1}],
        ),
        (  # patterns of texts were refused
            "ollama/ollama#8185",
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
            ["AB-12"],
            ["AB12", "xAB-12"],
        ),
        (  # further properties of any name were made of ":" only
            "noamgat/lm-format-enforcer#94",
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "tool_name": {"type": "string"},
                        "parameters": {
                            "type": "object",
                            "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "number"}]},
                        },
                    },
                    "required": ["tool_name", "parameters"],
                },
                "minItems": 1,
                "maxItems": 1,
            },
            [[{"tool_name": "search", "parameters": {"query": "penguin", "pages": 2}}]],
            [[], [{"tool_name": "search", "parameters": {"query": None}}]],
        ),
        (  # branches that add to the properties around them were ignored
            "ggml-org/llama.cpp#7703",
            {
                "type": "object",
                "properties": {"action": {"type": "string", "enum": ["go", "drop"]}},
                "required": ["action"],
                "anyOf": [
                    {
                        "properties": {"action": {"const": "go"}, "place": {"enum": ["mall"]}},
                        "required": ["place"],
                    },
                    {
                        "properties": {"action": {"const": "drop"}, "item": {"enum": ["cup"]}},
                        "required": ["item"],
                    },
                ],
            },
            [{"action": "go", "place": "mall"}, {"action": "drop", "item": "cup"}],
            [{"action": "go"}, {"action": "run", "place": "mall"}],
        ),
        (  # bounds below zero
            "guidance-ai/guidance#1023",
            {"type": "array", "items": {"type": "integer", "exclusiveMinimum": -12, "maximum": -3}},
            [[-11, -3, -5]],
            [[-12], [-2], [0], [11]],
        ),
        (  # any JSON value is an answer
            f"{VLLM}52011",
            {},
            [1, "a", None, [True], {"a": {}}],
            [],
        ),
    ],
)
def test_a_grammar_takes_what_the_schema_takes(
    source: str, schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    for value in right:
        assert takes(schema, value), (source, value)
    for value in wrong:
        assert not takes(schema, value), (source, value)


def test_an_invalid_pattern_is_named() -> None:
    """ggml-org/llama.cpp#19051: it made the whole answer free, and only a log told it."""
    held = held_schema(json.dumps({"type": "string", "pattern": "^a[b$"}))
    assert (json.loads(held.text), held.loosened) == ({"type": "string"}, ("pattern",))

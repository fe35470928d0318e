"""Schemas as generators write them: what a grammar holds of them, and what it names."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import InvalidSamplingError
from carryall.exporter.demo import demo_path
from carryall.runtime.text.grammars import GrammarCompiler, GrammarMatcher
from carryall.runtime.text.json_schema import held_schema
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.structured_output import StructuredOutput

END = 1
STRING, BOOLEAN = {"type": "string"}, {"type": "boolean"}


@functools.cache
def tools() -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer(demo_path("pycoder"))
    return tokenizer, GrammarCompiler(tokenizer, [END], tokenizer.vocab_size)


def matcher_of(schema: Any) -> GrammarMatcher:
    return tools()[1].compile(StructuredOutput(json_schema=schema)).result().copy()


def takes(schema: Any, value: Any) -> bool:
    return takes_text(schema, json.dumps(value))


def takes_text(schema: Any, text: str) -> bool:
    tokens = [*tools()[0].encode(text, add_special_tokens=False), END]
    return matcher_of(schema).valid_prefix(tokens) == len(tokens)


def an_object(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": STRING}, **more}


@pytest.mark.parametrize(
    ("schema", "loosened", "right", "wrong"),
    [
        ({"type": "array", "items": BOOLEAN, "uniqueItems": True}, ["uniqueItems"], [[True, True]], [[1]]),
        ({"type": "array", "items": BOOLEAN, "uniqueItems": False}, [], [[True, True]], [["x"]]),
        (
            {"type": "array", "items": STRING, "contains": {"const": "x"}, "minContains": 1},
            ["contains", "minContains"], [["a"]], [[1]],
        ),
        (an_object(propertyNames={"maxLength": 3}), ["propertyNames"], [{"a": "x"}], [{"b": 1}]),
        (an_object(dependentRequired={"a": ["b"]}), ["dependentRequired"], [{"a": "x"}], [{"b": 1}]),
        (an_object(minProperties=1), ["minProperties"], [{"a": "x"}], [{"a": 1}]),
        (an_object(required=["a"], minProperties=1), [], [{"a": "x"}], [{}]),
        (an_object(unevaluatedProperties=False), [], [{"a": "x"}], [{"b": 1}]),
        (
            {"allOf": [an_object()], "unevaluatedProperties": False},
            ["unevaluatedProperties"], [{"a": "x"}], [{"a": 1}],
        ),
        ({"type": "string", "not": {"const": "x"}}, ["not"], ["x"], [1]),
        (an_object(**{"if": an_object(), "then": {"required": ["a"]}}), ["if", "then"], [{}], [{"a": 1}]),
        ({"type": "string", "pattern": "^(?=.*x).*$"}, ["pattern"], ["abc"], [1]),
        ({"type": "string", "pattern": r"\bfoo\b"}, ["pattern"], ["abc"], [1]),
        ({"type": "string", "pattern": "^(a)\\1$"}, ["pattern"], ["abc"], [1]),
        ({"type": "string", "pattern": "^a+$"}, [], ["aa"], ["ab"]),
        ({"type": "string", "format": "uuid"}, [], ["0b0e4f2c-1d2e-4f3a-8b4c-5d6e7f809102"], ["x"]),
        ({"type": "string", "format": "color"}, ["format"], ["red"], [1]),
        ({"oneOf": [STRING, {"type": "string", "maxLength": 3}]}, ["oneOf"], ["ab", "abcd"], [1]),
        ({"oneOf": [STRING, {"type": "integer"}]}, [], ["ab", 1], [True]),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["minimum"], [-5, 2**40], ["x", 1.5],
        ),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [], [4], [3]),
        ({"type": "string", "minLength": 2.0}, [], ["ab"], ["a"]),
        ({"type": "array", "items": {"type": "array", "items": {"not": {}}}}, ["not"], [[[1]]], [1]),
    ],
)  # fmt: skip
def test_what_a_grammar_cannot_say_is_left_out_and_named(
    schema: Any, loosened: list[str], right: list[Any], wrong: list[Any]
) -> None:
    assert list(held_schema(json.dumps(schema)).loosened) == loosened
    for value in right:
        assert takes(schema, value), value
    for value in wrong:
        assert not takes(schema, value), value


REF = {"$ref": "#/$defs/base"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (an_object(), [{}, {"a": "x"}], [{"b": 1}]),
        (an_object(additionalProperties=True), [{"b": 1}], [{"a": 1}]),
        (an_object(additionalProperties=BOOLEAN), [{"b": True}], [{"b": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
        ({"type": "object"}, [{}, {"b": 1}], [1]),
        (an_object(required=["a", "z"]), [{"a": "x", "z": 1}], [{"a": "x"}, {"a": "x", "z": 1, "b": 2}]),
        ({"type": "object", "properties": {"o": an_object()}}, [{"o": {"a": "x"}}], [{"o": {"b": 1}}]),
        ({"type": "array", "items": an_object()}, [[{"a": "x"}]], [[{"b": 1}]]),
        ({"anyOf": [an_object(), {"type": "null"}]}, [{"a": "x"}, None], [{"b": 1}]),
        # What schemas say together may not be forbidden by one of them.
        (
            {"allOf": [an_object(required=["a"]), {"properties": {"b": BOOLEAN}, "required": ["b"]}]},
            [{"a": "x", "b": True}], [{"a": "x"}, {"a": "x", "b": 1}],
        ),
        (
            {"allOf": [REF, {"properties": {"b": BOOLEAN}, "required": ["b"]}],
             "$defs": {"base": an_object()}},
            [{"a": "x", "b": True}], [{"a": 1, "b": True}],
        ),
        (
            an_object(anyOf=[{"properties": {"b": BOOLEAN}, "required": ["b"]}]),
            [{"a": "x", "b": True}], [{"b": 1}],
        ),
        (an_object(anyOf=[{"required": ["a"]}]), [{"a": "x"}], [{"a": "x", "b": 1}]),
        ({**REF, "$defs": {"base": an_object()}}, [{"a": "x"}], [{"b": 1}]),
        (
            {**REF, "properties": {"b": BOOLEAN}, "$defs": {"base": an_object()}},
            [{"a": "x", "b": True}], [{"b": 1}],
        ),
    ],
)  # fmt: skip
def test_objects_are_closed_where_the_schema_is_silent(
    schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    for value in right:
        assert takes(schema, value), value
    for value in wrong:
        assert not takes(schema, value), value


OPEN = an_object(additionalProperties=BOOLEAN)
DIGITS = {"type": "object", "patternProperties": {"[0-9]": STRING}, "additionalProperties": BOOLEAN}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (OPEN, [{"a": "x", "b": True}], ['{"\\u0061": true}']),
        (DIGITS, [{"1": "x", "b": True}], ['{"\\u0031": true}', '{"\\u00e91": true}']),
        ({"allOf": [an_object(), {"type": "object", "properties": {"b": BOOLEAN}}]},
         [{"a": "x", "b": True, "c": 1}], ['{"\\u0061": 1}']),
    ],
)  # fmt: skip
def test_names_of_open_objects_are_spelled_in_one_way(
    schema: Any, right: list[Any], wrong: list[str]
) -> None:
    """An escape would give a declared name, or one that a pattern matches, another schema."""
    for value in right:
        assert takes(schema, value), value
    for text in wrong:
        assert not takes_text(schema, text), text


def test_control_characters_are_written_by_their_numbers() -> None:
    for schema in (
        {"type": "object", "additionalProperties": STRING},
        an_object(),
        an_object(required=["a"]),
    ):
        assert takes(schema, {"a": "\x1b[0m"})
    escaped = an_object(additionalProperties={"const": "\x1b"})
    assert takes(escaped, {"a": "x", "b": "\x1b"})
    assert not takes(OPEN, {"a": "\x1b"})  # there, no text is


@pytest.mark.parametrize(
    ("patterns", "right", "wrong"),
    [
        ({"^s$": BOOLEAN}, [{"s": True}], [{"s": True, "t": True}]),
        ({"^s$": {}}, [{"s": True}], [{"s": True, "t": True}]),
        ({"^(s|q)$": BOOLEAN}, [{"s": True, "q": True}], [{"s": True, "t": True}]),
        ({"^s": BOOLEAN}, [{"s": True, "sx": True}], [{"s": True, "sx": 1}]),
        ({"^[s]$": BOOLEAN, "^q$": STRING}, [{"s": True, "q": "x"}], [{"s": True, "q": True}]),
        ({"s": BOOLEAN}, [{"s": True, "xs": False}], [{"s": True, "x": True}]),
        ({"^s$|^q": BOOLEAN}, [{"s": True, "qx": False}], [{"s": True, "qx": 1}, {"s": True, "xq": True}]),
        (
            {"^q|s$": BOOLEAN},
            [{"s": True, "qx": True, "xs": True}],
            [{"s": True, "qx": 1}, {"s": True, "x": True}],
        ),
        ({"^[|]$|^(s|t)$": BOOLEAN}, [{"s": True, "t": True, "|": True}], [{"s": True, "t": 1}]),
    ],
)
def test_a_pattern_that_matches_declared_properties_applies_to_them(
    patterns: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    schema = {
        "type": "object", "properties": {"s": BOOLEAN}, "required": ["s"], "additionalProperties": False,
        "patternProperties": patterns,
    }  # fmt: skip
    for value in right:
        assert takes(schema, value), value
    for value in wrong:
        assert not takes(schema, value), value
    # After the first property the text either goes on or ends: the grammar fails at neither.
    matcher = matcher_of(schema)
    for token in tools()[0].encode('{"s": true', add_special_tokens=False):
        matcher.observe(token)
    assert matcher.error == ""


def test_a_pattern_demands_what_the_declaration_does_not() -> None:
    schema = {
        "type": "object",
        "properties": {"s": {}},
        "required": ["s"],
        "patternProperties": {"^s$": STRING},
    }
    assert takes(schema, {"s": "x"})
    assert not takes(schema, {"s": 1})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not valid JSON"),
        ("false", "'false' allows no output"),
        ('{"items":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ('{"items":' * 150 + "{}" + "}" * 150, "nested too deeply"),
        ('{"type": "thing"}', "Invalid type: thing"),
        ('{"$ref": "https://example.org/x"}', "is not present"),
    ],
)
def test_a_schema_that_cannot_be_used_says_why(text: str, told: str) -> None:
    with pytest.raises(InvalidSamplingError, match=re.escape(told)):
        matcher_of(text)


names = st.sampled_from(["a", "b", "ab", "x"])
leaves = st.sampled_from([STRING, BOOLEAN, {}, {"type": "null"}, {"const": 1}])
patterns_ = st.dictionaries(st.sampled_from(["^a", "^ab$", "b$", "^x$"]), leaves, max_size=2)
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=3)},
            optional={
                "required": st.lists(names, max_size=2, unique=True),
                "additionalProperties": st.sampled_from([True, False, BOOLEAN]),
                "patternProperties": patterns_,
            },
        )
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
    ),
    max_leaves=6,
)


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value fits a schema, by the keywords that ``schemas`` draws."""
    if "anyOf" in schema and not any(fits(item, value) for item in schema["anyOf"]):
        return False
    if "const" in schema and (isinstance(value, bool) or value != schema["const"]):
        return False
    kinds = {"string": str, "boolean": bool, "null": type(None), "object": dict}
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return False
    if not isinstance(value, dict):
        return True
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in value.items():
        applied = [properties[name]] if name in properties else []
        applied += [patterns[pattern] for pattern in patterns if re.search(pattern, name)]
        if not applied and isinstance(more := schema.get("additionalProperties", True), dict):
            applied = [more]
        if not all(fits(each, item) for each in applied):
            return False
        if not applied and schema.get("additionalProperties") is False:
            return False
    return set(schema.get("required", ())) <= set(value)


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(schemas, st.integers(0, 2**32 - 1))
def test_any_way_through_a_grammar_ends_in_a_text_that_fits(schema: Any, seed: int) -> None:
    try:
        matcher = matcher_of(schema)
    except InvalidSamplingError:
        return  # some allow no text
    random = np.random.default_rng(seed)
    tokenizer, tokens = tools()[0], list[int]()
    while not matcher.finished and len(tokens) < 40:
        logits = random.standard_normal(tokenizer.vocab_size).astype(np.float32)
        matcher.apply(logits)  # raises if no text goes on
        tokens.append(int(np.argmax(logits)))
        matcher.observe(tokens[-1])
    if matcher.finished:
        text = tokenizer.decode(tokens)
        assert fits(schema, json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "#/$defs/a",
        ),
        (an_object(required=["b"]) | {"properties": {"b": {"$ref": "#/properties/b"}}}, "#/properties/b"),
        ({"$ref": "#"}, "#"),
        ({"items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}}, "#/$defs/a~1b"),
    ],
)
def test_a_reference_to_itself_is_refused(schema: Any, named: str) -> None:
    """Its grammar would end after the name of the property: no text of it is valid."""
    with pytest.raises(InvalidSamplingError, match=re.escape(f"'{named}' leads to itself")):
        held_schema(json.dumps(schema))


def test_a_schema_may_contain_itself() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/properties/left"}}}
    assert takes(tree, {"left": {"right": {}}})
    chain = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": STRING}}
    assert takes(chain, "x")
    assert not takes(chain, 1)

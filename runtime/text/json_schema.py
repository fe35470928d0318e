"""JSON schemas as generators write them, in the form that a grammar can hold.

A grammar reads a text once, from left to right. It cannot count different items, look ahead, or demand that
one of two schemas does not match. Such keywords are left out, so that the text is held to the rest of its
schema, and they are named, so that a client knows what it must check itself.

Objects whose schema says nothing of further properties are closed: a small model that may invent fields does
so until it is cut. llama.cpp and xgrammar close them too.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any
from urllib.parse import unquote

import llguidance

from ...errors import InvalidSamplingError
from ...records import dataclass

Json = dict[str, Any]

# Left out always, unless the value says nothing.
_UNSAYABLE = ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames",
              "dependentRequired", "dependentSchemas", "dependencies", "not", "if", "then", "else",
              "$dynamicRef", "$recursiveRef")  # fmt: skip
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "unevaluatedItems": (True, {}), "propertyNames": (True, {}),
    "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},),
    "contains": (), "minContains": (), "maxContains": (),
}  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_BRANCHES = ("allOf", "anyOf", "oneOf")

# Of llguidance. Without a limit, a weak model may fill the context with whitespace. ``_disjoint`` tells of
# ``oneOf``.
JSON_OPTIONS: Mapping[str, Any] = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}",
    "coerce_one_of": True,
}
# In an object that is open, "\u0061" is a name that llguidance takes for another one than a declared "a".
_WITHOUT_NUMBERS: Mapping[str, Any] = {**JSON_OPTIONS, "json_allowed_escapes": 'nrbtf\\"'}
# Characters that are written by their numbers only, in values and in patterns.
_NUMBERED = re.compile(r"\\u00[01]|\\\\[uxc]|\x7f")


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """A schema that a grammar can hold.

    Args:
        text: the schema as JSON.
        loosened: the keywords that it leaves out, each once.
        options: of llguidance, with which it is compiled.
    """

    text: str
    loosened: tuple[str, ...]
    options: Mapping[str, Any]


@functools.lru_cache(maxsize=256)
def held_schema(text: str) -> HeldSchema:
    """Return a schema without what a grammar cannot say.

    Args:
        text: the schema as JSON.

    Raises:
        InvalidSamplingError: it is not JSON, is ``false``, is nested too deeply, or a reference names itself.
    """
    try:
        schema = json.loads(text)
        _check_references(schema)
        reader = _Reader(frozenset(_extended(schema)))
        held = reader.read(schema)
        written = json.dumps(held, ensure_ascii=False)
    except RecursionError:
        raise InvalidSamplingError("json_schema is nested too deeply") from None
    except ValueError as error:
        raise InvalidSamplingError(f"json_schema is not valid JSON: {error}") from error
    if held is False:
        raise InvalidSamplingError("json_schema 'false' allows no output")
    without_numbers = reader.has_open_names and not _NUMBERED.search(written)
    options = _WITHOUT_NUMBERS if without_numbers else JSON_OPTIONS
    return HeldSchema("{}" if held is True else written, tuple(reader.loosened), options)


def _check_references(schema: Any) -> None:
    """Refuse references that lead to themselves: a grammar of them ends in the middle of an answer.

    Raises:
        InvalidSamplingError: the schema behind a reference is that reference.
    """
    waiting, sound = [schema], set[str]()
    while waiting:
        item = waiting.pop()
        waiting += item if isinstance(item, list) else item.values() if isinstance(item, dict) else ()
        start = item.get("$ref") if isinstance(item, dict) else None
        passed: set[str] = set()
        while isinstance(start, str) and start.startswith("#") and start not in sound:
            if start in passed:
                raise InvalidSamplingError(f"json_schema: the reference '{start}' leads to itself")
            passed.add(start)
            target = _referred(schema, start)
            start = target.get("$ref") if isinstance(target, dict) else None
        sound |= passed


def _referred(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference names, as a JSON pointer; None if there is none."""
    for key in reference.removeprefix("#").split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _extended(schema: Any) -> Iterator[str]:
    """Yield the references to schemas that others extend: closed, they would forbid what these add."""
    if isinstance(schema, list):
        for item in schema:
            yield from _extended(item)
    if not isinstance(schema, dict):
        return
    branches = [item for name in _BRANCHES for item in _listed(schema.get(name))]
    extends = isinstance(schema.get("allOf"), list) or (branches and _adds_properties(schema, shallow=True))
    for branch in branches if extends else ():
        if isinstance(branch, dict) and isinstance(branch.get("$ref"), str):
            yield branch["$ref"]
    if isinstance(schema.get("$ref"), str) and _adds_properties({**schema, "$ref": None}):
        yield schema["$ref"]
    for value in schema.values():
        yield from _extended(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _adds_properties(schema: Any, *, shallow: bool = False) -> bool:
    """Return whether a schema, or with ``shallow`` only its own keywords, may allow properties by name."""
    if not isinstance(schema, dict):
        return False
    if schema.get("properties") or schema.get("patternProperties"):
        return True
    if shallow:
        return False
    return isinstance(schema.get("$ref"), str) or any(
        _adds_properties(item) for name in _BRANCHES for item in _listed(schema.get(name))
    )


@dataclass(slots=True)
class _Reader:
    """Rewrites one schema.

    Args:
        extended: references to schemas that stay open.

    Attributes:
        loosened: the keywords that were left out.
        has_open_names: whether an object declares some of its names, and allows others.
    """

    extended: frozenset[str]
    loosened: dict[str, None] = field(default_factory=dict)
    has_open_names: bool = False

    def read(self, schema: Any, *, closes: bool = True, path: str = "#") -> Any:
        """Return a schema in the form that a grammar can hold.

        Args:
            schema: the schema.
            closes: whether nothing around it adds properties.
            path: the reference that names it.
        """
        if not isinstance(schema, dict):
            return schema
        held = self._without_unsayable(schema)
        self._fit_values(held)
        branches = [item for name in _BRANCHES for item in _listed(held.get(name))]
        extends = any(map(_adds_properties, branches)) or isinstance(held.get("$ref"), str)
        closes = closes and path not in self.extended
        if closes and not extends and isinstance(held.get("properties"), dict):
            _close(held)
        # What is beside branches extends each of them, and the branches of ``allOf`` extend each other.
        beside = _adds_properties(held, shallow=True)
        for name, value in held.items():
            if name in _MAPS and isinstance(value, dict):
                held[name] = {
                    key: self.read(item, path=f"{path}/{name}/{key}") for key, item in value.items()
                }
            elif name in _LISTS and isinstance(value, list):
                alone = name == "prefixItems" or (
                    closes and not beside and (name != "allOf" or len(value) == 1) and not held.get("$ref")
                )
                held[name] = [self.read(item, closes=alone) for item in value]
            elif name in ("items", "additionalProperties", "additionalItems"):
                several = isinstance(value, list)
                held[name] = [self.read(item) for item in value] if several else self.read(value)
        if isinstance(held.get("patternProperties"), dict):
            _separate_patterns(held)
        if _adds_properties(held, shallow=True) and held.get("additionalProperties") is not False:
            self.has_open_names = True
        return held

    def _without_unsayable(self, schema: Json) -> Json:
        held = {**schema}
        for name in _UNSAYABLE:
            if name in held and held.pop(name) not in _SAYS_NOTHING.get(name, ()):
                self.loosened[name] = None
        if "unevaluatedProperties" in held:
            value = held.pop("unevaluatedProperties")
            alone = not any(name in held for name in (*_BRANCHES, "$ref"))
            if alone and "additionalProperties" not in held:
                held["additionalProperties"] = value
            elif value not in (True, {}):
                self.loosened["unevaluatedProperties"] = None
        if not _disjoint(_listed(held.get("oneOf"))):
            self.loosened["oneOf"] = None
        return held

    def _fit_values(self, held: Json) -> None:
        """Rewrite, or leave out, values that a grammar cannot hold."""
        for name in _COUNTS:
            if isinstance(held.get(name), float) and held[name].is_integer():
                held[name] = int(held[name])
        for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            exclusive = held.pop(name) if isinstance(held.get(name), bool) else False  # of draft 4
            if exclusive and bound in held:
                held[name] = held.pop(bound)
        properties = held.get("properties")
        if not isinstance(properties, dict) or not set(properties) <= set(_names(held.get("required"))):
            for name in ("minProperties", "maxProperties"):
                if name in held and held.pop(name) != 0:
                    self.loosened[name] = None
        for name in ("pattern", "format"):
            if isinstance(held.get(name), str) and not _is_held(
                json.dumps({"type": "string", name: held[name]})
            ):
                del held[name]
                self.loosened[name] = None
        kind = held.get("type")
        bounds = {name: held[name] for name in _BOUNDS if name in held}
        if bounds and kind in ("integer", "number") and not _is_held(json.dumps({"type": kind, **bounds})):
            for name in bounds:
                if not _is_held(json.dumps({"type": kind, name: held[name]})):
                    del held[name]
                    self.loosened[name] = None


@functools.lru_cache(maxsize=4096)
def _is_held(text: str) -> bool:
    """Return whether llguidance takes a schema without references."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
        return not llguidance.LLMatcher.validate_grammar(grammar)
    except ValueError:
        return False


def _names(value: Any) -> list[str]:
    return [name for name in _listed(value) if isinstance(name, str)]


def _close(held: Json) -> None:
    """Forbid properties that are not declared, if the schema says nothing of them.

    Those that it demands count as declared.
    """
    if "additionalProperties" in held:
        return
    properties = dict(held["properties"])
    for name in _names(held.get("required")):
        properties.setdefault(name, {})
    held["properties"], held["additionalProperties"] = properties, False


def _disjoint(branches: list[Any]) -> bool:
    """Return whether at most one of several schemas can match, as their types or a constant property tell."""
    if len(branches) < 2:
        return True
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    kinds = [branch.get("type") for branch in branches]
    texts = [kind for kind in kinds if isinstance(kind, str)]
    if len(set(texts)) == len(branches) and not {"integer", "number"} <= set(texts):
        return True
    constants = [_constants(branch) for branch in branches]
    return any(
        all(name in known for known in constants)
        and len({value for known in constants for value in known[name]})
        == sum(len(known[name]) for known in constants)
        for name in constants[0]
    )


def _constants(branch: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the values of required properties that may have only some, as JSON."""
    properties = branch.get("properties")
    constants: dict[str, tuple[str, ...]] = {}
    for name in _names(branch.get("required")):
        schema = properties.get(name) if isinstance(properties, dict) else None
        if isinstance(schema, dict) and ("const" in schema or isinstance(schema.get("enum"), list)):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            constants[name] = tuple(json.dumps(value, sort_keys=True) for value in values)
    return constants


def _separate_patterns(held: Json) -> None:
    """Apply patterns to the declared properties that they match, and leave out those that match no others.

    A name that is both declared and matched must fit both schemas. A pattern whose every match is declared
    would leave the grammar a key that no text spells: it fails in the middle of an answer.
    """
    properties = dict(held["properties"]) if isinstance(held.get("properties"), dict) else {}
    left: Json = {}
    for pattern, schema in held["patternProperties"].items():
        matched = [name for name in properties if _matches(pattern, name)]
        for name in matched:
            if schema not in (True, {}, properties[name]):
                properties[name] = {"allOf": [properties[name], schema]}
        if not matched or _matches_others(pattern, tuple(matched)):
            left[pattern] = schema
    if properties:
        held["properties"] = properties
    held["patternProperties"] = left
    if not left:
        del held["patternProperties"]


@functools.lru_cache(maxsize=4096)
def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a part of a name, in time linear to it, unlike Python's ``re``."""
    matcher = _matcher(f"/{_whole(pattern)}/")
    if matcher is None:
        return False
    tokens = _bytes().tokenize_str(name)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@functools.lru_cache(maxsize=1024)
def _matches_others(pattern: str, names: tuple[str, ...]) -> bool:
    """Return whether a pattern matches any text but these."""
    known = _slashed(f"({'|'.join(map(re.escape, names))})")
    matcher = _matcher(f"/{_whole(pattern)}/ & ~/{known}/")
    if matcher is None:
        return True
    matcher.compute_bitmask()
    return not matcher.is_stopped()


def _whole(pattern: str) -> str:
    """Return a regular expression of the whole texts in which a pattern matches a part."""
    return _slashed("|".join(f"({_whole_alternative(part)})" for part in _alternatives(pattern)))


def _whole_alternative(pattern: str) -> str:
    """Return ``_whole`` of a pattern without alternatives, whose anchors hold for all of it."""
    head = "" if pattern.startswith("^") else "(?s:.*)"
    escapes = len(pattern.removesuffix("$")) - len(pattern.removesuffix("$").rstrip("\\"))
    tail = "" if pattern.endswith("$") and escapes % 2 == 0 else "(?s:.*)"
    body = pattern.removeprefix("^")
    return f"{head}({body if tail else body.removesuffix('$')}){tail}"


def _alternatives(pattern: str) -> list[str]:
    """Split a pattern at the bars that are in no group and no class: an anchor holds for its alternative."""
    parts, depth, in_class, escaped = [""], 0, False, False
    for letter in pattern:
        bar = letter == "|" and not (depth or in_class or escaped)
        if bar:
            parts.append("")
            continue
        parts[-1] += letter
        if escaped or letter == "\\":
            escaped = not escaped
        elif in_class or letter == "[":
            in_class = letter != "]"
        else:
            depth += (letter == "(") - (letter == ")")
    return parts


def _matcher(rule: str) -> llguidance.LLMatcher | None:
    """Return a matcher of bytes for a terminal of Lark; None if it is not valid."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_lark(f"start: A\nA: {rule}")
        matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0)
    except ValueError:
        return None
    return None if matcher.is_error() else matcher


def _slashed(regex: str) -> str:
    return re.sub(r"(?<!\\)/", r"\/", regex).replace("\n", r"\n")


@functools.cache
def _bytes() -> llguidance.LLTokenizer:
    """Return a tokenizer whose tokens are bytes."""
    return llguidance.LLTokenizer("byte")

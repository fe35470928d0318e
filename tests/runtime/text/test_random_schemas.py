"""Texts of a schema's grammar are valid by the package jsonschema, and no grammar ends inside of one."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import pytest
from fuzzing import new_seeds
from random_schemas import RandomSchemas

from carryall.errors import InvalidSamplingError
from carryall.runtime.text.json_schema import held_schema

TEXTS = 6  # of each schema
KEPT = (10_020,)  # an escape in a name that a pattern matches


def without(schema: Any, names: tuple[str, ...]) -> Any:
    """Return a schema without the keywords that its grammar leaves out."""
    if isinstance(schema, list):
        return [without(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    held = {}
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs"):
            held[name] = {key: without(item, names) for key, item in value.items()}
        elif name not in names:
            held[name] = value if name in ("enum", "const", "required") else without(value, names)
    return {name: value for name, value in held.items() if name not in names}


def check(seed: int) -> int:
    """Check texts of one schema; return how many were complete."""
    schemas = RandomSchemas(seed)
    schema = schemas.schema()
    try:
        held = held_schema(json.dumps(schema))
        grammar = llguidance.LLMatcher.grammar_from_json_schema(held.text, dict(held.options))
    except (InvalidSamplingError, ValueError):
        return 0
    if llguidance.LLMatcher.validate_grammar(grammar):
        return 0  # no text is valid, or a keyword is refused by name
    judge = jsonschema.Draft202012Validator(without(schema, held.loosened))
    tokenizer, count = llguidance.LLTokenizer("byte"), 0
    for _ in range(TEXTS):
        text = schemas.text(llguidance.LLMatcher(tokenizer, grammar, log_level=0))
        if text is not None:
            errors = [error.message for error in judge.iter_errors(json.loads(text))]
            assert errors == [], (seed, schema, text)
            count += 1
    return count


def test_texts_of_some_schemas_are_valid() -> None:
    assert sum(check(seed) for seed in (*range(40), *KEPT)) > 40


@pytest.mark.slow
def test_texts_of_many_schemas_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    counts = [check(seed) for seed in new_seeds()]
    with capsys.disabled():
        print(f"{len(counts)} schemas, {sum(counts)} texts")
    assert sum(counts) > len(counts)

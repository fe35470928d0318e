"""Files and values for the form of a text that are none: one line, the documented exit code, valid JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall
from carryall.plain_json import plain_json


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, ["run", "demo", "x = ", "-q", "--max-tokens", "4", *map(str, args)])


@pytest.mark.parametrize("option", ["--json-schema", "--grammar", "--tools"])
def test_a_binary_file(option: str, tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b'{"a": "\xff\xfe"}')
    result = run(option, path, *(["--chat"] if option == "--tools" else []))
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(path) in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "content", "why"),
    [
        ("--json-schema", "false", "allows no output"),
        ("--json-schema", "{", "is not valid JSON"),
        ("--json-schema", "5", "json_schema"),
        ("--grammar", "start: (", "grammar cannot be used"),
    ],
)
def test_a_file_that_states_no_form(option: str, content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "form"
    path.write_text(content)
    result = run(option, path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_invalid_regex_is_wrong_use() -> None:
    result = run("--regex", "((")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "regex cannot be used" in result.stderr


def test_the_schema_true_allows_any_json(tmp_path: Path) -> None:
    path = tmp_path / "schema"
    path.write_text(" true\n")
    result = run("--json-schema", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"a": math.nan, "b": [math.inf, (1.5, -math.inf)]}, '{"a": null, "b": [null, [1.5, null]]}'),
        ({"é": "NaN"}, '{"é": "NaN"}'),
        ([1, None, True], "[1, null, true]"),
    ],
)
def test_json_holds_no_nan(document: Any, text: str) -> None:
    assert plain_json(document) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

"""Write the answers of a journal to files, in the order of the input: JSON lines or Parquet, and errors."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ....errors import UsageError
from ....plain_json import plain_json
from ..inputs.files import arrow, plain_suffix, remove, replacing
from .journal import Journal, LineResult

_PARQUET_ROWS = 4096
_RESULTS = (
    "line",
    "custom_id",
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "response",
    "embedding",
)
_VECTOR = b'"object": "embedding"'
_ARROW_TYPES = {"string": "string", "integer": "int64", "number": "float64", "boolean": "bool_"}


def export(journal: Journal, output: str, errors: str | None) -> None:
    """Write the results file, and the errors file if a line failed. Each file is written atomically.

    Args:
        journal: the journal of the job.
        output: file or URL of the results: Parquet if it ends in ``.parquet``, else JSON lines.
        errors: file or URL of the errors; None writes none.

    Raises:
        OSError: a file cannot be written.
        MissingExtraError: Parquet needs pyarrow.
    """
    if plain_suffix(output) == ".parquet":
        kept = kept_columns(journal.answers("code IS NULL AND extra IS NOT NULL"))
        vectors = any(_VECTOR in answer.record for answer in journal.answers("code IS NULL"))
        answers = journal.answers("code IS NULL")
        write_parquet(answers, output, journal.fact("job"), kept, vectors=vectors)
    else:
        write_lines(journal.lines("code IS NULL"), output)
    if errors is not None and journal.totals().failed:
        write_lines(journal.lines("code IS NOT NULL"), errors)
    elif errors is not None:
        remove(errors)


def check_output(name: str, keep: Sequence[str]) -> None:
    """Check, before any work, that an output of this name can hold the results.

    Raises:
        UsageError: a kept column has the name of a column of the results.
        MissingExtraError: Parquet needs pyarrow.
    """
    if plain_suffix(name) != ".parquet":
        return
    arrow(f"writing {name}")
    for column in keep:
        if column in _RESULTS:
            raise UsageError(
                f"'{column}' is a column of the results; rename the input's column, or omit --keep {column}"
            )


def write_lines(lines: Iterator[bytes], name: str) -> None:
    """Write a file of lines."""
    with replacing(name) as stream:
        stream.writelines(line + b"\n" for line in lines)


def write_parquet(
    answers: Iterator[LineResult],
    name: str,
    facts: Mapping[str, Any] | None,
    kept: Mapping[str, str],
    *,
    vectors: bool = False,
) -> None:
    """Write a table with a row for each answer and a column for each property of the job's JSON schema.

    Args:
        answers: the answers of lines that succeeded.
        name: file or URL of the table.
        facts: the facts of the job.
        kept: Arrow types of the columns kept from the input; see ``kept_columns``.
        vectors: write the column ``embedding`` too, the vector of the first text of a line.

    Raises:
        OSError: the file cannot be written.
        MissingExtraError: pyarrow is not installed.
    """
    pyarrow = arrow(f"writing {name}")
    properties = schema_properties(facts)
    fields = [
        ("line", pyarrow.int64()),
        ("custom_id", pyarrow.string()),
        *((column, getattr(pyarrow, kind)()) for column, kind in kept.items()),
        ("text", pyarrow.string()),
        *([("embedding", pyarrow.list_(pyarrow.float32()))] if vectors else []),
        *((f"output.{key}", getattr(pyarrow, kind)()) for key, kind in properties.items()),
        ("finish_reason", pyarrow.string()),
        ("prompt_tokens", pyarrow.int64()),
        ("completion_tokens", pyarrow.int64()),
        ("response", pyarrow.string()),
    ]
    schema = pyarrow.schema(fields)
    with replacing(name) as stream, pyarrow.parquet.ParquetWriter(stream, schema) as writer:
        while batch := list(itertools.islice(answers, _PARQUET_ROWS)):
            rows = [_table_row(answer, kept, properties, vectors=vectors) for answer in batch]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def schema_properties(facts: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the properties of the job's JSON schema, with their Arrow types."""
    options = (facts or {}).get("options", {})
    schema = (options.get("structured_output") or {}).get("json_schema")
    schema = json.loads(schema) if isinstance(schema, str) else schema
    found = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return {
        name: _ARROW_TYPES.get(str(rule.get("type")) if isinstance(rule, dict) else "", "string")
        for name, rule in found.items()
    }


def kept_columns(answers: Iterator[LineResult]) -> dict[str, str]:
    """Return the columns kept from the input, with an Arrow type that holds all their values."""
    kinds: dict[str, set[str]] = {}
    for answer in answers:
        for column, value in (json.loads(answer.extra) if answer.extra else {}).items():
            kinds.setdefault(column, set()).add(_kind(value))
    return {column: _common(found - {"null"}) for column, found in kinds.items()}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool_"
    if isinstance(value, int):
        return "int64" if -(2**63) <= value < 2**63 else "string"
    return "null" if value is None else "float64" if isinstance(value, float) else "string"


def _common(kinds: set[str]) -> str:
    if kinds == {"int64", "float64"}:
        return "float64"
    return kinds.pop() if len(kinds) == 1 else "string"


def _table_row(
    answer: LineResult, kept: Mapping[str, str], properties: Mapping[str, str], *, vectors: bool
) -> dict[str, Any]:
    record = json.loads(answer.record)
    body = record["response"]["body"]
    text = text_of(body)
    row: dict[str, Any] = {
        "line": answer.number,
        "custom_id": record["custom_id"],
        "text": text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "response": plain_json(body),
    }
    if vectors:
        row["embedding"] = embedding_of(body)
    columns = json.loads(answer.extra) if answer.extra else {}
    row |= {column: _as_kind(columns.get(column), kind) for column, kind in kept.items()}
    found = _object(text) if properties else {}
    row |= {f"output.{name}": _as_kind(found.get(name), kind) for name, kind in properties.items()}
    return row


def _as_kind(value: Any, kind: str) -> Any:
    """Convert a value to the type of its column; a string column holds other values as JSON."""
    if kind == "string" and not isinstance(value, str):
        return None if (text := plain_json(value)) == "null" else text
    if kind == "float64" and isinstance(value, int):
        return float(value)
    return value


def _object(text: str | None) -> dict[str, Any]:
    """Return the JSON object of a text; an empty one if the text is not one, such as a truncated text."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def text_of(body: Mapping[str, Any] | None) -> str | None:
    """Return the text of a response or of its first choice; None if there is none."""
    if body is None:
        return None
    if body.get("object") == "response":
        return _response_text(body)
    choices = body.get("choices")
    if not choices:
        return None
    choice = choices[0]
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return text if isinstance(text, str) else None


def embedding_of(body: Mapping[str, Any] | None) -> list[float] | None:
    """The first vector of a response, if it has one."""
    data = (body or {}).get("data")
    vector = data[0].get("embedding") if data else None
    if isinstance(vector, str):
        decoded: list[float] = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
        return decoded
    return list(vector) if vector else None


def _response_text(response: Mapping[str, Any]) -> str | None:
    """The text of a response object of /v1/responses."""
    contents = [item["content"] for item in response["output"] if item["type"] == "message"]
    parts = [part["text"] for content in contents for part in content if part["type"] == "output_text"]
    return "".join(parts) if parts else None

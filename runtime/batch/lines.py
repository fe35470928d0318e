"""Lines of a batch file, read one at a time and turned into requests.

Two forms, which may be mixed:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "...", "max_tokens": 8}}
    {"prompt": "...", "max_tokens": 8}   or   {"messages": [...]}

The first is OpenAI's (https://platform.openai.com/docs/guides/batch); the second is its body by itself,
to which a custom_id may be added (else it is `line-N`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...errors import RequestError
from ..service.messages import GenerationRequest
from ..service.openai import ENDPOINTS, Endpoint

MAX_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch file."""

    number: int
    custom_id: str
    endpoint: Endpoint
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be sent, and why."""

    number: int
    custom_id: str | None
    code: str  # invalid_line, invalid_request or duplicate_custom_id
    message: str


class LineReader:
    """Iterates over the requests of a stream, holding one line at a time; empty lines are skipped.

    Args:
        stream: the file, or a pipe.
        defaults: options of lines that do not have them.
    """

    def __init__(self, stream: BinaryIO, defaults: Mapping[str, Any] | None = None) -> None:
        self.bytes_read = 0
        self._stream = stream
        self._defaults = defaults or {}
        self._first_line_of: dict[str, int] = {}

    def __iter__(self) -> Iterator[BatchLine | BadLine]:
        """Yield every line that is not empty, in order."""
        number = 0
        while data := self._stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            self.bytes_read += len(data)
            if len(data) > MAX_LINE_BYTES:
                self._skip_rest(data)
                yield BadLine(number, None, "invalid_line", f"the line is longer than {MAX_LINE_BYTES} bytes")
            elif data.strip():
                line = parse_line(number, data, self._defaults)
                yield self._refuse_duplicate(line) if isinstance(line, BatchLine) else line

    def _skip_rest(self, data: bytes) -> None:
        while data and not data.endswith(b"\n"):
            data = self._stream.readline(MAX_LINE_BYTES)
            self.bytes_read += len(data)

    def _refuse_duplicate(self, line: BatchLine) -> BatchLine | BadLine:
        first = self._first_line_of.setdefault(line.custom_id, line.number)
        if first == line.number:
            return line
        message = f"custom_id '{line.custom_id}' was used before, in line {first}"
        return BadLine(line.number, line.custom_id, "duplicate_custom_id", message)


def parse_line(number: int, data: bytes, defaults: Mapping[str, Any]) -> BatchLine | BadLine:
    """Turn one line into a request."""
    try:
        record = _json_object(data)
    except RequestError as error:
        return BadLine(number, None, "invalid_line", str(error))
    custom_id = record.get("custom_id")
    try:
        endpoint, body = _endpoint_and_body(record)
        request = endpoint.request({**defaults, **body})
    except RequestError as error:
        return BadLine(
            number, custom_id if isinstance(custom_id, str) else None, "invalid_request", str(error)
        )
    return BatchLine(number, custom_id or f"line-{number}", endpoint, request)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8-sig")
        record = json.loads(text)
        if "\\ud" in text.lower():  # half a surrogate pair is valid JSON, but no text
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise RequestError(f"the line is not valid UTF-8 text: {error}") from error
    except ValueError as error:
        raise RequestError(f"the line is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the line is nested too deeply") from error
    if not isinstance(record, dict):
        raise RequestError(f"the line must be a JSON object, not {type(record).__name__}")
    return record


def _endpoint_and_body(record: dict[str, Any]) -> tuple[Endpoint, Mapping[str, Any]]:
    custom_id = record.get("custom_id")
    if "url" in record or "body" in record:
        url, body = record.get("url"), record.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise RequestError("'custom_id' must be a text that is not empty")
        if record.get("method", "POST") != "POST":
            raise RequestError(f"'method' must be \"POST\", not {record['method']!r}")
        if not isinstance(url, str) or url not in ENDPOINTS:
            raise RequestError(f"'url' must be one of {', '.join(ENDPOINTS)}, not {url!r}")
        if not isinstance(body, dict):
            raise RequestError("'body' must be a JSON object")
        return ENDPOINTS[url], body
    if custom_id is not None and (not isinstance(custom_id, str) or not custom_id):
        raise RequestError("'custom_id' must be a text that is not empty")
    body = {name: value for name, value in record.items() if name != "custom_id"}
    if "messages" in body:
        return ENDPOINTS["/v1/chat/completions"], body
    if "prompt" in body:
        return ENDPOINTS["/v1/completions"], body
    raise RequestError("the line needs 'prompt', 'messages', or 'url' and 'body'")

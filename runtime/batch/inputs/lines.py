"""Parse rows of the input into requests. The bodies are checked later, by the workers.

A JSON line has one of two forms, which may be mixed:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "...", "max_tokens": 8}}
    {"prompt": "...", "max_tokens": 8}   or   {"messages": [...]}   or   {"input": "..."}

The first is OpenAI's (https://platform.openai.com/docs/guides/batch); without a url, the body tells it. The
second is the body alone, with an optional custom_id (default: `line-N`). A body with `input` is a request to
/v1/embeddings, or to /v1/responses if that is the job's endpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from ....errors import RequestError
from ....options import shown
from ....records import dataclass
from .sources import DIGEST_BYTES, SourceRow
from .templates import PromptTemplate

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
URLS = (COMPLETIONS, CHAT, RESPONSES, EMBEDDINGS, SCORE, RERANK, TRANSCRIPTIONS, TRANSLATIONS)
# The field that selects the endpoint of a body without a url.
# The first that a body has decides: answers to a conversation are scored.
_URL_OF_FIELD = {"continuations": SCORE, "messages": CHAT, "prompt": COMPLETIONS, "input": EMBEDDINGS,
            "documents": RERANK, "file": TRANSCRIPTIONS}  # fmt: skip
_NUMBERED = re.compile(r"line-(\d+)")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch file."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]
    digest: bytes = b""
    id_key: bytes | None = None  # digest of the custom_id, if the line states one
    extra: str | None = None  # see ``Answer``


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a valid request, and the reason."""

    number: int
    custom_id: str
    code: str  # invalid_line, invalid_request or duplicate_custom_id
    message: str
    digest: bytes = b""
    id_key: bytes | None = None
    file: str | None = None
    line: int | None = None  # in that file
    extra: str | None = None


class CustomIds:
    """The first line of each custom_id, in a temporary SQLite database that moves to disk as it grows."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("CREATE TABLE ids (key BLOB PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID")
        self._db.execute("BEGIN")  # never committed: each run builds a new index

    def first_use(self, key: bytes, number: int) -> int:
        """Return the first line with this custom_id key; ``number`` is stored if there is none."""
        self._db.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, number))
        found = self._db.execute("SELECT number FROM ids WHERE key = ?", (key,)).fetchone()
        return int(found[0])

    def close(self) -> None:
        """Close and delete the database."""
        self._db.close()


def id_key(custom_id: str) -> bytes:
    """Return the digest of a custom_id."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def parse_row(row: SourceRow, template: PromptTemplate, endpoint: str | None = None) -> BatchLine | BadLine:
    """Parse a row into a request.

    Args:
        row: a row of a file.
        template: makes requests from the records of tables, and from JSON lines if it has a text.
        endpoint: the only url that lines may use; None allows all.
    """
    custom_id, key, extra = f"line-{row.number}", None, None
    code = "invalid_line"
    try:
        record = _record(row)
        templated = template.text is not None or isinstance(row.data, dict)
        given = template.custom_id(record) if templated else record.get("custom_id")
        if isinstance(given, str) and given and _is_text(given):  # a fault of the rest is told under its id
            custom_id, key = given, id_key(given)
        if row.fault is not None:
            raise RequestError(row.fault)
        if isinstance(row.data, dict) or b"\\ud" in row.data.lower():
            _check_text(record)
        code = "invalid_request"
        extra = template.kept(record)
        if templated:
            record = template.body(record, row.pictures)
        url, body = _url_and_body(record, endpoint)
        if endpoint is not None and url != endpoint:
            raise RequestError(f"the line is a request to {url}, but the job's endpoint is {endpoint}")
    except RequestError as error:
        return BadLine(row.number, custom_id, code, str(error), row.digest, key, row.file, row.line, extra)
    return BatchLine(row.number, custom_id, url, body, row.digest, key, extra)


def refuse_duplicate(line: BatchLine, row: SourceRow, ids: CustomIds) -> BatchLine | BadLine:
    """Return the line, or a BadLine if an earlier line has the same custom_id."""
    if line.id_key is None:
        return line
    numbered = _NUMBERED.fullmatch(line.custom_id)
    if numbered and int(numbered[1]) != line.number:
        message = f"custom_id '{line.custom_id}' is the default of line {numbered[1]}; choose another"
    elif (first := ids.first_use(line.id_key, line.number)) == line.number:
        return line
    else:
        message = f"custom_id '{line.custom_id}' is already used by line {first}"
    code = "duplicate_custom_id"
    return BadLine(
        line.number, line.custom_id, code, message, line.digest, line.id_key, row.file, row.line, line.extra
    )


def _record(row: SourceRow) -> dict[str, Any]:
    """Return the fields of a row; none if it has a fault and no fields can be read."""
    if isinstance(row.data, dict):
        return row.data
    try:
        return _json_object(row.data)
    except RequestError:
        if row.fault is None:
            raise
        return {}


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data.decode("utf-8-sig"))
    except UnicodeError as error:
        raise RequestError(f"the line is not valid UTF-8 text: {error}") from error
    except ValueError as error:
        raise RequestError(f"the line is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the line is nested too deeply") from error
    if not isinstance(record, dict):
        raise RequestError(f"the line must be a JSON object, not {type(record).__name__}")
    return record


def _check_text(record: dict[str, Any]) -> None:
    """Reject lone surrogates: table bytes that are not UTF-8, or half a surrogate pair in JSON."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeError as error:
        raise RequestError(f"the line is not valid UTF-8 text: {error}") from error


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def _url_and_body(record: Mapping[str, Any], endpoint: str | None) -> tuple[str, Mapping[str, Any]]:
    custom_id = record.get("custom_id")
    if "url" in record or "body" in record:
        url, body = record.get("url"), record.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise RequestError("'custom_id' must be a string that is not empty")
        if record.get("method", "POST") != "POST":
            raise RequestError(f"'method' must be \"POST\", not {shown(record['method'])}")
        if not isinstance(body, dict):
            raise RequestError("'body' must be a JSON object")
        if url is None:
            return _url_of(body, endpoint), body
        if not isinstance(url, str) or url not in URLS:
            raise RequestError(f"'url' must be one of {', '.join(URLS)}, not {shown(url)}")
        return url, body
    if custom_id is not None and (not isinstance(custom_id, str) or not custom_id):
        raise RequestError("'custom_id' must be a string that is not empty")
    body = {name: value for name, value in record.items() if name != "custom_id"}
    return _url_of(body, endpoint), body


def _url_of(body: Mapping[str, Any], endpoint: str | None) -> str:
    """Return the endpoint that a body without a url is for.

    Raises:
        RequestError: no field of the body tells it.
    """
    if endpoint == RESPONSES and "input" in body:
        return RESPONSES
    url = next((url for field, url in _URL_OF_FIELD.items() if field in body), None)
    if url is None:
        raise RequestError("the line needs 'prompt', 'messages', 'input', or 'url' and 'body'")
    return url

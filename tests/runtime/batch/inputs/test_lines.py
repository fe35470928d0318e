"""Parsing of rows: both forms, every kind of fault, and arbitrary bytes."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from batch_kit import toy_worker
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import RequestError
from carryall.runtime.batch.inputs import sources
from carryall.runtime.batch.inputs.lines import (
    EMBEDDINGS,
    URLS,
    BadLine,
    BatchLine,
    CustomIds,
    id_key,
    parse_row,
    refuse_duplicate,
)
from carryall.runtime.batch.inputs.sources import Source, SourceRow
from carryall.runtime.batch.inputs.templates import PromptTemplate
from carryall.runtime.batch.workers.offline import OfflineEngine

PLAIN = PromptTemplate()


def parse(record: Any, endpoint: str | None = None) -> BatchLine | BadLine:
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_row(SourceRow(3, data, b"d", 3), PLAIN, endpoint)


def openai(**changes: Any) -> dict[str, Any]:
    record = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return {name: value for name, value in {**record, **changes}.items() if value is not ...}


def test_openai_form() -> None:
    body = {"model": "m", "prompt": "héllo", "max_tokens": 2}
    assert parse(openai(body=body)) == BatchLine(3, "a", "/v1/completions", body, b"d", id_key("a"))


@pytest.mark.parametrize(
    ("body", "url"),
    [
        ({"prompt": "x", "max_tokens": 2}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "/v1/chat/completions"),
        ({"input": ["x", "y"]}, "/v1/embeddings"),
        ({"text": "x", "continuations": ["y"]}, "/v1/score"),
        ({"query": "x", "documents": ["y"]}, "/v1/rerank"),
    ],
)
def test_a_bare_body_tells_what_it_asks(body: dict[str, Any], url: str) -> None:
    assert parse(body) == BatchLine(3, "line-3", url, body, b"d")


@pytest.mark.parametrize(
    ("record", "code", "message"),
    [
        (b"{", "invalid_line", "not valid JSON"),
        (b"\0" * 40, "invalid_line", "not valid JSON"),  # a crash may leave this at the end of a file
        (b"[" * 100_000, "invalid_line", "nested too deeply"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "invalid_line", "not valid JSON"),
        (b'{"prompt": "\xff"}', "invalid_line", "not valid UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16"), "invalid_line", "not valid UTF-8"),
        (b'{"prompt": "\\uD800"}', "invalid_line", "not valid UTF-8"),
        ([1], "invalid_line", "must be a JSON object, not list"),
        ({"text": "x"}, "invalid_request", "needs 'prompt', 'messages'"),
        ({"prompt": "x", "custom_id": 5}, "invalid_request", "'custom_id' must be"),
        ({"prompt": "x", "custom_id": ""}, "invalid_request", "'custom_id' must be"),
        (openai(custom_id=...), "invalid_request", "'custom_id' must be"),
        (openai(method="GET"), "invalid_request", "'method' must be"),
        (openai(url="/v1/moderations"), "invalid_request", "'url' must be one of /v1/completions"),
        (openai(url=["/v1/completions"]), "invalid_request", "'url' must be one of"),
        (openai(body=...), "invalid_request", "'body' must be"),
    ],
)
def test_faults(record: Any, code: str, message: str) -> None:
    line = parse(record)
    assert isinstance(line, BadLine)
    assert (line.number, line.code) == (3, code)
    assert message in line.message
    assert line.custom_id == ("a" if isinstance(record, dict) and "url" in record and "custom_id" in record
                              else "line-3")  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        b'{"custom_id": "mine", "prompt": "a\\ud800b"}',
        b'{"custom_id": "mine", "url": "/v1/completions", "body": {"prompt": "a\\ud800b"}}',
        b'{"custom_id": "mine", "messages": [{"role": "user", "content": "\\udfff"}]}',
    ],
)
def test_a_line_with_half_a_surrogate_pair_keeps_its_id(record: bytes) -> None:
    line = parse(record)
    assert isinstance(line, BadLine)
    assert (line.custom_id, line.id_key) == ("mine", id_key("mine"))
    assert "not valid UTF-8" in line.message


def test_an_id_with_half_a_surrogate_pair_is_none() -> None:
    line = parse(b'{"custom_id": "a\\ud800", "prompt": "x"}')
    assert isinstance(line, BadLine)
    assert (line.custom_id, line.id_key) == ("line-3", None)


@pytest.mark.parametrize("absent", [..., None])
def test_a_line_without_a_url_is_told_by_its_body(absent: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    line = parse(openai(url=absent, body=body))
    assert isinstance(line, BatchLine)
    assert (line.url, line.custom_id, line.body) == ("/v1/chat/completions", "a", body)
    assert isinstance(parse(openai(url=absent, body={"x": 1})), BadLine)


def test_mixed_endpoints_are_refused_where_one_is_demanded() -> None:
    assert isinstance(parse({"prompt": "x"}, "/v1/completions"), BatchLine)
    line = parse({"messages": []}, "/v1/completions")
    assert isinstance(line, BadLine)
    assert "a request to /v1/chat/completions, but the job's endpoint is /v1/completions" in line.message


def test_an_input_is_a_response_where_the_endpoint_says_so() -> None:
    assert parse({"input": "x"}, "/v1/responses") == BatchLine(
        3, "line-3", "/v1/responses", {"input": "x"}, b"d"
    )
    line = parse({"prompt": "x"}, "/v1/responses")
    assert isinstance(line, BadLine)
    assert "the job's endpoint is /v1/responses" in line.message


def test_surrogate_pairs_are_text() -> None:
    line = parse(b'{"prompt": "\\ud83d\\ude42"}')
    assert isinstance(line, BatchLine)
    assert line.body["prompt"] == "🙂"


def test_custom_ids_are_refused_the_second_time() -> None:
    ids = CustomIds()
    found = []
    for number, name in enumerate(["x", "y", "x", "line-9", "line-5"], start=1):
        row = SourceRow(number, json.dumps({"prompt": "p", "custom_id": name}).encode(), b"", number)
        line = parse_row(row, PLAIN)
        assert isinstance(line, BatchLine)
        found.append(refuse_duplicate(line, row, ids))
    assert [isinstance(line, BatchLine) for line in found] == [True, True, False, False, True]
    assert isinstance(found[2], BadLine)
    assert (found[2].code, found[2].custom_id) == ("duplicate_custom_id", "x")
    assert "line 1" in found[2].message
    assert isinstance(found[3], BadLine)
    assert "is the default of line 9" in found[3].message


def test_json_lines_are_numbered_with_the_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}\n{"prompt": "c"}')
    rows = list(Source([str(path)]))
    assert [row.number for row in rows] == [1, 4, 5]
    lines = [parse_row(row, PLAIN) for row in rows]
    assert [line.body["prompt"] for line in lines if isinstance(line, BatchLine)] == ["a", "b", "c"]


def test_an_endless_line_is_refused_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 20)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "' + b"x" * 100 + b'"}\n{"prompt": "a"}\n' + b"y" * 21)
    bad, good, last = (parse_row(row, PLAIN) for row in Source([str(path)]))
    assert isinstance(bad, BadLine)
    assert "longer than 20 bytes" in bad.message
    assert isinstance(good, BatchLine)
    assert good.number == 2
    assert isinstance(last, BadLine)
    changed = path.read_bytes()[:-1] + b"z"
    before = Source([str(path)]).content()
    path.write_bytes(changed)
    assert Source([str(path)]).content() != before  # bytes that were not kept count too


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LINE = ["custom_id", "method", "url", "body", "prompt", "messages", "role", "content", "input", "documents"]
OPTIONS = [
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "logprobs",
    "n",
    "seed",
    "chat_template_kwargs",
    "continuations",
    "query",
]
names = st.sampled_from([*LINE, *OPTIONS, "top_logprobs", "priority"])
bodies = st.dictionaries(
    names, json_values | st.lists(st.dictionaries(names, json_values, max_size=2), max_size=2)
)
records = st.dictionaries(names, json_values | st.sampled_from(list(URLS)) | bodies)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> OfflineEngine:
    return toy_worker(tmp_path_factory.mktemp("toy"))


@pytest.mark.long
@settings(deadline=None)
@given(
    st.one_of(
        st.binary(),
        json_values.map(lambda v: json.dumps(v).encode()),
        records.map(lambda v: json.dumps(v).encode()),
    )
)
def test_any_bytes_give_a_request_or_a_reason(worker: OfflineEngine, data: bytes) -> None:
    line = parse(data)
    if isinstance(line, BadLine):
        assert line.message
        return
    assert line.custom_id
    with contextlib.suppress(RequestError):  # anything else fails the test
        work = worker._preparer.prepare(line)
        assert work.groups or line.url == EMBEDDINGS  # the encoder computes these without the engine


@settings(deadline=None)
@given(st.text(), st.text(min_size=1))
def test_text_survives(prompt: str, custom_id: str) -> None:
    for escaped in (True, False):
        line = parse(json.dumps({"prompt": prompt, "custom_id": custom_id}, ensure_ascii=escaped).encode())
        assert isinstance(line, BatchLine)
        assert (line.body["prompt"], line.custom_id) == (prompt, custom_id)


def test_stdin_is_read_as_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b'{"prompt": "a"}\n')

    monkeypatch.setattr("sys.stdin", Stdin)
    source = Source(["-"])
    assert not source.rereadable
    assert [row.data for row in source] == [b'{"prompt": "a"}\n']

"""Batch lines: both forms, every kind of fault, and no surprise whatever the bytes."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.runtime.batch import lines as module
from carryall.runtime.batch.lines import BadLine, BatchLine, LineReader, parse_line
from carryall.runtime.service.messages import Conversation
from carryall.runtime.service.openai import ENDPOINTS
from carryall.runtime.types.sampling_params import SamplingParams


def parse(record: Any, **defaults: Any) -> BatchLine | BadLine:
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_line(3, data, defaults)


def openai(**changes: Any) -> dict[str, Any]:
    record = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return {name: value for name, value in {**record, **changes}.items() if value is not ...}


def test_openai_form() -> None:
    line = parse(openai(body={"model": "m", "prompt": "héllo", "max_tokens": 2}))
    assert isinstance(line, BatchLine)
    assert (line.number, line.custom_id) == (3, "a")
    assert line.endpoint is ENDPOINTS["/v1/completions"]
    assert (line.request.prompt, line.request.params) == ("héllo", SamplingParams(max_tokens=2))


def test_simple_forms() -> None:
    line = parse({"prompt": "x", "max_tokens": 2})
    assert isinstance(line, BatchLine)
    assert (line.custom_id, line.request.params.max_tokens) == ("line-3", 2)
    chat = parse({"custom_id": "c", "messages": [{"role": "user", "content": "Hi"}]})
    assert isinstance(chat, BatchLine)
    assert chat.custom_id == "c"
    assert chat.request.prompt == Conversation([{"role": "user", "content": "Hi"}])


def test_a_line_may_name_its_tenant() -> None:
    line = parse({"prompt": "x", "cache_salt": "tenant"})
    assert isinstance(line, BatchLine)
    assert line.request.cache_salt == "tenant"


def test_defaults_yield_to_the_line() -> None:
    line = parse({"prompt": "x", "max_tokens": 2}, max_tokens=9, temperature=0.5)
    assert isinstance(line, BatchLine)
    assert line.request.params == SamplingParams(max_tokens=2, temperature=0.5)


@pytest.mark.parametrize(
    ("record", "code", "message"),
    [
        (b"{", "invalid_line", "not valid JSON"),
        (b"[" * 100_000, "invalid_line", "nested too deeply"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "invalid_line", "not valid JSON"),
        (b'{"prompt": "\xff"}', "invalid_line", "not valid UTF-8"),
        (b'{"prompt": "\\uD800"}', "invalid_line", "not valid UTF-8"),
        ([1], "invalid_line", "must be a JSON object, not list"),
        ({"text": "x"}, "invalid_request", "needs 'prompt', 'messages'"),
        ({"prompt": "x", "custom_id": 5}, "invalid_request", "'custom_id' must be"),
        ({"prompt": "x", "custom_id": ""}, "invalid_request", "'custom_id' must be"),
        ({"prompt": "x", "top_q": 1}, "invalid_request", "did you mean"),
        (openai(custom_id=...), "invalid_request", "'custom_id' must be"),
        (openai(method="GET"), "invalid_request", "'method' must be"),
        (openai(url="/v1/embeddings"), "invalid_request", "'url' must be one of /v1/completions"),
        (openai(url=["/v1/completions"]), "invalid_request", "'url' must be one of"),
        (openai(body=...), "invalid_request", "'body' must be"),
    ],
)
def test_faults(record: Any, code: str, message: str) -> None:
    line = parse(record)
    assert isinstance(line, BadLine)
    assert (line.number, line.code) == (3, code)
    assert message in line.message


def test_surrogate_pairs_are_text() -> None:
    line = parse(b'{"prompt": "\\ud83d\\ude42"}')
    assert isinstance(line, BatchLine)
    assert line.request.prompt == "🙂"


def test_reading_counts_lines_skips_empty_ones_and_refuses_duplicates() -> None:
    data = b'\xef\xbb\xbf{"prompt": "a", "custom_id": "x"}\r\n\n  \n'
    data += b'{"prompt": "b", "custom_id": "x"}\n{"prompt": "c"}'
    reader = LineReader(io.BytesIO(data))
    first, second, third = reader
    assert isinstance(first, BatchLine)
    assert (first.number, first.custom_id) == (1, "x")
    assert isinstance(second, BadLine)
    assert (second.number, second.code, second.custom_id) == (4, "duplicate_custom_id", "x")
    assert "line 1" in second.message
    assert isinstance(third, BatchLine)
    assert third.custom_id == "line-5"
    assert reader.bytes_read == len(data)


def test_an_endless_line_is_refused_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 20)
    data = b'{"prompt": "' + b"x" * 100 + b'"}\n{"prompt": "a"}\n' + b"y" * 21
    reader = LineReader(io.BytesIO(data))
    bad, good, last = reader
    assert isinstance(bad, BadLine)
    assert "longer than 20 bytes" in bad.message
    assert isinstance(good, BatchLine)
    assert good.number == 2
    assert isinstance(last, BadLine)
    assert reader.bytes_read == len(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LINE = ["custom_id", "method", "url", "body", "prompt", "messages", "role", "content"]
OPTIONS = [
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "logprobs",
    "n",
    "seed",
]
names = st.sampled_from([*LINE, *OPTIONS, "top_logprobs", "priority"])
bodies = st.dictionaries(
    names, json_values | st.lists(st.dictionaries(names, json_values, max_size=2), max_size=2)
)
records = st.dictionaries(names, json_values | st.sampled_from(list(ENDPOINTS)) | bodies)


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(),
        json_values.map(lambda v: json.dumps(v).encode()),
        records.map(lambda v: json.dumps(v).encode()),
    )
)
def test_any_bytes_give_a_request_or_a_reason(data: bytes) -> None:
    line = parse_line(1, data, {"max_tokens": 4})
    if isinstance(line, BadLine):
        assert line.message
    else:
        assert line.custom_id


@settings(deadline=None)
@given(st.text(), st.text(min_size=1))
def test_text_survives(prompt: str, custom_id: str) -> None:
    for escaped in (True, False):
        line = parse_line(
            1, json.dumps({"prompt": prompt, "custom_id": custom_id}, ensure_ascii=escaped).encode(), {}
        )
        assert isinstance(line, BatchLine)
        assert (line.request.prompt, line.custom_id) == (prompt, custom_id)

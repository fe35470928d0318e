"""Large JSON is read as ``json.loads`` reads it, and other threads run meanwhile."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carryall.errors import RequestError
from carryall.runtime.process import large_json
from carryall.runtime.process.large_json import parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def outcome(read: Any, raw: bytes) -> Any:
    try:
        return repr(read(raw))
    except ValueError as error:
        return type(error), str(error)


def refuse(name: str) -> None:
    raise ValueError(name)


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "_PIECE", 16)
        yield


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    VALUES,
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 400),
    st.sampled_from([b"", b"x", b'"', b"\\", b",", b"]"]),
)
@example("\U0001f600" * 40, True, 0, 0, b"")
@example("a\\" * 40 + "é", True, 0, 0, b"")
@example(["x" * 50, [1.5, -2, 3e9] * 40, {"k" * 40: []}], True, 2, 0, b"")
@example([1] * 60, True, 0, 31, b",")
def test_it_is_what_json_reads(value: Any, ascii_only: bool, indent: int, place: int, put: bytes) -> None:
    """Also if a byte is changed: the same error at the same place."""
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent or None).encode("utf-8", "surrogatepass")
    if put:
        raw = raw[:place] + put + raw[place + 1 :]
    expected = outcome(lambda text: json.loads(text, parse_constant=refuse), raw)
    assert outcome(lambda text: parse(text, refuse), raw) == expected


def test_constants_are_refused_and_containers_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="-Infinity"):
        parse(b'{"a": [-Infinity]}', refuse)
    monkeypatch.setattr(large_json, "_MOST_CONTAINERS", 10)
    assert parse(b"[" + b"[]," * 8 + b"[]]", refuse) == [[]] * 9
    with pytest.raises(RequestError, match="more than 10 arrays and objects"):
        parse(b"[" + b"[]," * 9 + b"{}]", refuse)


@pytest.mark.parametrize(
    "raw",
    [b'{"a": "' + b"a\\n" * 2**10 + b'"}', b'["' + b"a" * 2**10 + b'"]', b"[" + b"12345," * 2**10 + b"1]"],
    ids=["escapes", "text", "numbers"],
)
def test_native_calls_are_short(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's lock is kept during each: they read a few pieces of 256 characters."""
    read = []

    def scanstring(text: str, at: int) -> tuple[str, int]:
        value, end = json.decoder.scanstring(text, at)  # type: ignore[attr-defined]
        read.append(end - at)
        return value, end

    def loads(text: str) -> Any:
        read.append(len(text))
        return json.loads(text)

    monkeypatch.setattr(large_json, "_PIECE", 256)
    monkeypatch.setattr(large_json, "scanstring", scanstring)
    monkeypatch.setattr(large_json, "json", SimpleNamespace(**{**vars(json), "loads": loads}))
    assert parse(raw, refuse) == json.loads(raw)
    assert sum(read) >= 1000
    assert max(read) <= 3 * 256

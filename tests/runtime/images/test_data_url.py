"""Addresses that hold their content, and base64."""

from __future__ import annotations

import base64
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import RequestError
from carryall.runtime.images.data_url import is_data_url, read_base64, read_data_url


@given(st.binary(), st.sampled_from(["", "\n", "\r\n", " \t\f"]), st.booleans())
def test_lines_and_missing_padding_do_not_count(content: bytes, ending: str, padded: bool) -> None:
    text = base64.b64encode(content).decode()
    text = text if padded else text.rstrip("=")
    broken = ending.join(textwrap.wrap(text, 7)) + ending
    assert read_base64(broken) == content
    assert read_data_url(f"data:image/png;base64,{broken}") == ("image/png", content)


@pytest.mark.parametrize(
    ("url", "media_type", "content"),
    [
        ("data:image/png;base64,/+A=", "image/png", b"\xff\xe0"),
        ("DATA:image/png;BASE64,/+A=", "image/png", b"\xff\xe0"),
        ("data:;base64,/+A=", "", b"\xff\xe0"),
        ("data:image/png;charset=utf-8;base64,/+A=", "image/png", b"\xff\xe0"),
        ("data:image/png; base64,/%2BA%3D", "image/png", b"\xff\xe0"),
        ("data:image/png;base64,", "image/png", b""),
    ],
)
def test_addresses_are_read_as_browsers_read_them(url: str, media_type: str, content: bytes) -> None:
    assert is_data_url(url)
    assert read_data_url(url) == (media_type, content)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://a.b/c.png", "not fetched from addresses"),
        ("file:///etc/passwd", "not fetched from addresses"),
        ("", "not fetched from addresses"),
        ("data", "not fetched from addresses"),
        ("scans/1.png", "'scans/1.png' does not begin with data:, .* beside a batch job file:PATH"),
        ("/9j/4AAQSkZJRgABAQ" * 99, r"'/9j/4AAQSkZJRgABAQ.*\.\.\. does not begin with data:"),
        ("data:image/png,abcd", "must be base64"),
        ("data:base64,abcd", "must be base64"),
        ("data:image/png;base64", "must be base64"),
        ("data:image/png;base64,a-_b", "is not base64"),
        ("data:image/png;base64,abcde", "is not base64"),
        ("data:image/png;base64,ab=", "is not base64"),
        ("data:image/png;base64,aé", "is not base64"),
    ],
)
def test_what_is_no_content_is_told(url: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        read_data_url(url)

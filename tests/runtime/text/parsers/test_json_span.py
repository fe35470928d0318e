"""Where a JSON value ends, found while it arrives character by character."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.text.parsers.json_span import JsonSpan

values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='\\"{}[]a'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def end(text: str) -> int | None:
    span = JsonSpan()
    found = None
    for size in range(1, len(text) + 1):
        found = span.end(text[:size])
        if found is not None:
            return found
    return found


@given(st.lists(values) | st.dictionaries(st.text(alphabet='\\"{}'), values))
def test_the_end_is_the_values_own(value: Any) -> None:
    text = json.dumps(value)
    assert end(text + "}]\\") == len(text)


@pytest.mark.parametrize("text", ['{"\\\\": null}', '["\\\\\\\\"]', '["\\\\\\""]'])
def test_an_escaped_backslash_does_not_escape_what_follows(text: str) -> None:
    assert end(text) == len(text)

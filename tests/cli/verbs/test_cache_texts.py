"""How ages and counts of cache entries are printed."""

from __future__ import annotations

import time

import pytest

from carryall.cli.verbs.cache import age_text, count_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "now"),
        (1, "now"),
        (30, "30 s ago"),
        (150, "2 m ago"),
        (3 * 3600, "3 h ago"),
        (21 * 86400, "21 d ago"),
    ],
)
def test_an_age_has_the_largest_unit_of_which_two_have_passed(
    seconds: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert age_text(1e9 - seconds) == text


def test_one_entry_is_singular() -> None:
    assert [count_text([]), count_text([None] * 2)] == ["0 entries", "2 entries"]  # type: ignore[list-item]
    assert count_text([None]) == "1 entry"  # type: ignore[list-item]

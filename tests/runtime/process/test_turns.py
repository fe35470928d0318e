"""Threads take turns at Python's global lock sooner in a service."""

from __future__ import annotations

import sys

import pytest

from carryall.runtime.process.turns import quick_turns


def test_turns_are_quick_until_the_end() -> None:
    before = sys.getswitchinterval()
    with quick_turns():
        assert sys.getswitchinterval() == pytest.approx(before / 10)
    assert sys.getswitchinterval() == before


def test_the_time_returns_after_an_error() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ZeroDivisionError), quick_turns():
        _ = 1 / 0
    assert sys.getswitchinterval() == before

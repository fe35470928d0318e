"""Threads that a library will need are tried before."""

from __future__ import annotations

import threading

import pytest

from carryall.runtime.process.threads import check_new_threads


def test_threads_end() -> None:
    before = threading.active_count()
    check_new_threads(3)
    assert threading.active_count() == before


def test_too_few_threads_are_an_error_and_all_of_them_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    start, left = threading.Thread.start, iter(range(2))

    def limited(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        check_new_threads(3)
    assert threading.active_count() == before

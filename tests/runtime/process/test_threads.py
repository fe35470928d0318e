"""Threads that a library will need are tried before, and some let others go first."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from carryall.runtime.process.threads import at_lower_priority, check_new_threads


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


def test_a_result_or_an_error_comes_back_from_a_thread_of_lower_priority() -> None:
    assert at_lower_priority(lambda: threading.current_thread() is not threading.main_thread())
    with pytest.raises(ZeroDivisionError):
        at_lower_priority(lambda: 1 // 0)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has priorities of threads that others inherit"
)
def test_threads_that_are_started_at_a_lower_priority_inherit_it() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def inherited() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(nice()))
        thread.start()
        thread.join()
        return found[0]

    before = nice()
    assert at_lower_priority(nice) == at_lower_priority(inherited) == min(19, before + 5)
    assert nice() == before

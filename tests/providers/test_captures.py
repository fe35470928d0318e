"""Captured runs beside threads that open and free sessions."""

from __future__ import annotations

import threading

from carryall.providers.captures import capture, no_capture


def test_no_run_is_captured_while_a_session_is_opened() -> None:
    with no_capture(), no_capture(), capture() as may:  # two threads may open sessions at once
        assert not may
    with capture() as may:
        assert may


def test_a_session_is_opened_after_the_capture() -> None:
    events = []
    began = threading.Event()

    def opening() -> None:
        began.set()
        with no_capture():
            events.append("opened")

    other = threading.Thread(target=opening)
    with capture() as may:
        assert may
        other.start()
        assert began.wait(10)
        other.join(0.05)
        events.append("captured")
    other.join(10)
    assert events == ["captured", "opened"]


def test_only_one_run_is_captured_at_once() -> None:
    with capture(), capture() as may:
        assert not may
    with capture() as may:
        assert may


def test_a_capturing_thread_may_free_a_session() -> None:
    """Its garbage collector may close a model, and must not wait for its own capture."""
    with capture() as may, no_capture():
        assert may
